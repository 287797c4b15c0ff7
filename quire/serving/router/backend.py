"""A server as the router sees it: what it serves, whether it is well, and its load. Asks nothing itself."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.foundation.clock import Clock
from quire.foundation.config.router import RouterConfig
from quire.foundation.http_client.http1 import HttpAddress
from quire.foundation.http_client.pool import ConnectionPool
from quire.serving.replica_chooser import ReplicaLoad
from quire.serving.router.backend_list import BackendAddress
from quire.serving.router.routed_request import BLOCK_TOKENS

_UNKNOWN_BLOCKS = 8_192
"""Blocks of prompt text that the prefix cache of a server is assumed to hold, if the server does not say."""


class CircuitBreaker:
    """Lets all requests pass while it is closed. `threshold` failures in a row open it, and for `open_s` seconds none
    passes; then one request passes, whose end decides."""

    def __init__(self, threshold: int, open_s: float, clock: Clock) -> None:
        self._threshold = threshold
        self._open_s = open_s
        self._clock = clock
        self._failures = 0
        self._opened_at: float | None = None
        self._sent = 0
        self._trial: int | None = None  # the request whose end decides

    @property
    def is_open(self) -> bool:
        return self._opened_at is not None

    @property
    def passes(self) -> bool:
        if self._opened_at is None:
            return True
        return self._trial is None and self._clock.now() - self._opened_at >= self._open_s

    def sending(self) -> int:
        """Count a request that is sent. Returns its number, for the methods that tell its end. While the breaker is
        open, the ends of requests that were sent before decide nothing."""
        self._sent += 1
        if self._opened_at is not None and self._trial is None:
            self._trial = self._sent
        return self._sent

    def succeeded(self, number: int) -> None:
        if self._decides(number):
            self._failures, self._opened_at, self._trial = 0, None, None

    def failed(self, number: int) -> None:
        if not self._decides(number):
            return
        self._failures += 1
        if number == self._trial or self._failures >= self._threshold:
            self._opened_at = self._clock.now()
        self._trial = None

    def left(self, number: int) -> None:
        """This request's client went away before the end. If the request was to try, another one has to."""
        if number == self._trial:
            self._trial = None

    def _decides(self, number: int) -> bool:
        return self._opened_at is None or number == self._trial


@dataclass(frozen=True)
class ScrapedLoad:
    """What a server's /metrics says: sequences that run and that wait, tokens that its KV cache holds (0 if it does not
    say), and the share of the cache that is in use."""

    running: int = 0
    waiting: int = 0
    cache_tokens: int = 0
    cache_usage: float = 0.0


class Backend:
    """One server, with its connections, its circuit breaker and its load.

    Args:
        number: Its place among the chooser's replicas.
        tls: For connections to servers with https.

    Attributes:
        complaint: Why it gets no requests; empty if it is ready.
        cards: What its /v1/models says, by name.
        models: Names of models and adapters that requests may ask it for.
        load: What its /metrics said last.
        in_flight: Open requests that this router has sent to it.
    """

    def __init__(
        self, address: BackendAddress, number: int, config: RouterConfig, clock: Clock, tls: ssl.SSLContext
    ) -> None:
        self.address = address
        self.number = number
        self.pool = ConnectionPool(HttpAddress.of(address.url), tls)
        self.breaker = CircuitBreaker(config.cb_failure_threshold, config.cb_timeout_duration_secs, clock)
        self.complaint = "It was not asked yet."
        self.cards: Mapping[str, Any] = {}
        self.models = frozenset(address.models)
        self.load = ScrapedLoad()
        self.in_flight = 0
        self._left = False

    @property
    def is_ready(self) -> bool:
        """Whether the server says that it would serve requests."""
        return not self.complaint

    @property
    def takes_requests(self) -> bool:
        return self.is_ready and not self.address.drain and self.breaker.passes

    def relist(self, address: BackendAddress) -> None:
        self.address = address
        self.models = frozenset(address.models or self.cards)

    def learn_cards(self, cards: Mapping[str, Any]) -> None:
        """Take over what the server's /v1/models says."""
        self.cards = cards
        self.models = frozenset(self.address.models or cards)

    def replica_load(self) -> ReplicaLoad:
        """The server's load in the chooser's terms, where a block is one of prompt text."""
        load = self.load
        num_blocks = load.cache_tokens // BLOCK_TOKENS or _UNKNOWN_BLOCKS
        free = int(num_blocks * (1 - load.cache_usage))
        return ReplicaLoad(max(self.in_flight, load.running + load.waiting), 0, free, num_blocks)

    def began(self) -> int:
        """Count a request that is being sent. Returns its number for the circuit breaker."""
        self.in_flight += 1
        return self.breaker.sending()

    def ended(self) -> None:
        self.in_flight -= 1
        if self._left and not self.in_flight:
            self.pool.close()

    def leave(self) -> None:
        """Take the server out of the list: its connections are closed once open requests have ended."""
        self._left = True
        if not self.in_flight:
            self.pool.close()

    def state(self) -> dict[str, Any]:
        """The server's state, as GET /backends shows it."""
        return {
            "url": self.address.url,
            "ready": self.is_ready,
            "reason": self.complaint,
            "draining": self.address.drain,
            "circuit_open": self.breaker.is_open,
            "requests": self.in_flight,
            "models": sorted(self.models),
        }
