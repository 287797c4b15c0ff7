"""All servers, and which of them gets a request: those with its model, by prefix or session and load."""

from __future__ import annotations

import itertools
import ssl
from collections.abc import Collection, Mapping
from typing import Any

from quire.errors import ConfigError, RequestError, UnavailableError, UnknownModelError, reason
from quire.foundation.clock import Clock
from quire.foundation.config.router import RouterConfig
from quire.serving.replica_chooser import ReplicaChooser, ReplicaLoad
from quire.serving.router.backend import Backend
from quire.serving.router.backend_list import BackendAddress
from quire.serving.router.routed_request import BLOCK_TOKENS, RoutedRequest

EXPECTED_OUTPUT = 128
"""Estimated tokens of an answer, for the cost of a request."""


class Fleet:
    """The servers of the list. Raises ConfigError if the file of certificates cannot be read."""

    def __init__(self, config: RouterConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._tls = _tls(config.backend_ssl_ca_certs)
        self._backends: dict[str, Backend] = {}
        self._chooser = ReplicaChooser(0, BLOCK_TOKENS, clock)
        self._turns = itertools.count()

    @property
    def backends(self) -> Collection[Backend]:
        """All servers, in the order of the list."""
        return self._backends.values()

    @property
    def is_ready(self) -> bool:
        """Whether any server takes requests."""
        return any(backend.takes_requests for backend in self.backends)

    def update(self, addresses: Collection[BackendAddress]) -> None:
        """Replace the list. A server that is in both lists stays as it is; one that has left finishes its requests."""
        before, self._backends = self._backends, {}
        for address in addresses:
            backend = before.pop(address.url, None)
            if backend is None:
                number = self._chooser.add(address.url.encode())
                backend = Backend(address, number, self._config, self._clock, self._tls)
            backend.relist(address)
            self._backends[address.url] = backend
        for backend in before.values():
            self._chooser.remove(backend.number)
            backend.leave()

    def forget_cache(self, backend: Backend) -> None:
        """Take a server's prefix cache to be empty, because the server was away."""
        self._chooser.forget(backend.number)

    def choose(self, request: RoutedRequest, tried: Collection[Backend] = ()) -> Backend:
        """Choose a server for a request that was sent to those of `tried` before. Raises RequestError if none has its
        model or it has to name one, and UnavailableError if none with the model takes requests now."""
        serving = self._serving(request.model)
        able = [backend for backend in serving if backend.takes_requests and backend not in tried]
        if not able:
            what = "this request" if request.model is None else f"the model '{request.model[:200]}'"
            raise UnavailableError(f"No server takes requests for {what} now. Try again in a few seconds.")
        if self._config.routing_logic == "roundrobin":
            return able[next(self._turns) % len(able)] if len(able) > 1 else able[0]
        if len(serving) == 1:  # where others are only away, what this one gets now is remembered
            return able[0]
        loads: list[ReplicaLoad | None] = [None] * self._chooser.num_replicas
        for backend in able:
            loads[backend.number] = backend.replica_load()
        chosen = self._chooser.choose(loads, request.blocks, request.prompt_tokens, EXPECTED_OUTPUT)
        return next(backend for backend in able if backend.number == chosen)

    def cards(self) -> Mapping[str, Any]:
        """What /v1/models shows, by name: all models of servers that are ready."""
        found: dict[str, Any] = {}
        for backend in self.backends:
            for name in sorted(backend.models) if backend.is_ready else ():
                usual = {"id": name, "object": "model", "created": 0, "owned_by": "unknown"}
                found.setdefault(name, backend.cards.get(name, usual))
        return found

    def _serving(self, model: str | None) -> list[Backend]:
        backends = list(self.backends)
        if model is not None:
            serving = [backend for backend in backends if model in backend.models]
            if serving or not all(backend.models for backend in backends):
                return serving
            raise UnknownModelError(
                f"No server has the model '{model[:200]}'. GET /v1/models lists what there is.", param="model"
            )
        known = [backend.models for backend in backends if backend.models]
        if known and not frozenset.intersection(*known):
            raise RequestError("The servers have different models: name one as 'model'.", param="model")
        return backends


def _tls(ca_certs: str | None) -> ssl.SSLContext:
    """The certificates by which servers prove that they are those of the list."""
    try:
        return ssl.create_default_context(cafile=ca_certs)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"--backend-ssl-ca-certs {ca_certs} cannot be used: {reason(error)}.", param="backend_ssl_ca_certs"
        ) from error
