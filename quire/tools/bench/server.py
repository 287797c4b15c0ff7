"""A running server that a benchmark asks: its address, its model and the tokens of prompts."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.errors import ConfigError, QuireError, UnavailableError, reason
from quire.foundation.http_client.http1 import HttpError
from quire.foundation.http_client.pool import BlockingClient
from quire.models.weights import hub
from quire.text.tokenizer import load_tokenizer
from quire.tools.bench.datasets import LocalTokens, ServedTokens, Tokens, has_tokenizer

CONNECT_S = 30.0
RETRY_S = 1.0


@dataclass(frozen=True)
class ServerOptions:
    """Which server, and what every request has."""

    base_url: str | None = None
    """Address of the server, without the API's path. Default: http://HOST:PORT."""
    host: str = "127.0.0.1"
    """Host of the server, where --base-url is not given."""
    port: int = 8000
    """Port of the server, where --base-url is not given."""
    model: str | None = None
    """Name of the model in requests. Default: the first one that the server serves."""
    tokenizer: str | None = None
    """Directory or hub id of a tokenizer. Default: the server's own, by /tokenize and /detokenize; where the server has
    none, random token ids below its vocabulary's size."""
    vocab_size: int | None = None
    """Draw random token ids below this, without any tokenizer."""
    api_key: str | None = None
    """API key, if the server asks for one."""
    header: tuple[str, ...] = ()
    """Headers of every request, as NAME=VALUE."""
    insecure: bool = False
    """Do not check the server's certificate."""
    extra_body: dict[str, Any] = field(default_factory=dict)
    """Fields of every request, as JSON."""
    seed: int | None = None
    """Seed of prompts and arrivals. Default: a new one each time, so that no earlier run's prompts are cached."""
    ready_check_timeout_sec: float = 0.0
    """Wait this long for the server to come up."""

    @property
    def root(self) -> str:
        return (self.base_url or f"http://{self.host}:{self.port}").rstrip("/")

    @property
    def drawn_seed(self) -> int:
        """The seed, or a new one."""
        return random.SystemRandom().getrandbits(32) if self.seed is None else self.seed

    def headers(self) -> dict[str, str]:
        """Headers of every request; raises ConfigError for one without a value."""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        for pair in self.header:
            name, equals, value = pair.partition("=")
            if not equals:
                raise ConfigError(f"--header takes NAME=VALUE, got '{pair}'.", param="header")
            headers[name] = value
        return headers

    def connect(self) -> BlockingClient:
        """A client of the server; raises ConfigError if the address or a header cannot be used."""
        headers = self.headers()
        try:
            return BlockingClient(self.root, headers, connect_s=CONNECT_S, insecure=self.insecure, timeout_s=CONNECT_S)
        except ValueError as error:
            raise ConfigError(f"--base-url or --header cannot be used: {error}.", param="base_url") from error


@dataclass(frozen=True)
class ServedModel:
    """What the server says about its model. The vocabulary's size and the longest context are None if it does not say.
    A server without a tokenizer takes and returns token ids only."""

    name: str
    vocab_size: int | None
    has_tokenizer: bool
    max_model_len: int | None = None


def served_model(http: BlockingClient, options: ServerOptions) -> ServedModel:
    """Ask until the server answers; raises QuireError if it wants another key, or UnavailableError if it does not
    answer in time."""
    deadline = time.monotonic() + options.ready_check_timeout_sec
    while True:
        try:
            if http.ask("GET", "/health")[0] == 503:
                raise ValueError("it is starting or draining: --ready-check-timeout-sec waits for it")
            status, content = http.ask("GET", "/v1/models")
            if status in (401, 403):
                raise QuireError(f"{options.root} asks for an API key: give --api-key.")
            if status != 200:
                raise ValueError(f"it answers {status}")
            card = msgspec.json.decode(content)["data"][0]
            return _described(http, card, options.model or str(card["id"]))
        except (HttpError, msgspec.DecodeError, ValueError, LookupError, TypeError, AttributeError) as error:
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"{options.root} does not answer as an OpenAI server ({reason(error)}). "
                    "Start one with 'quire serve', or give --base-url."
                ) from error
            time.sleep(RETRY_S)


def _described(http: BlockingClient, card: Mapping[str, Any], name: str) -> ServedModel:
    return ServedModel(name, card.get("vocab_size"), has_tokenizer(http, name), card.get("max_model_len"))


def prompt_tokens(options: ServerOptions, http: BlockingClient, model: ServedModel) -> Tokens:
    """The tokens that prompts are made of; raises ConfigError if the tokenizer that is named cannot be read."""
    if options.tokenizer is not None:
        tokenizer = load_tokenizer(hub.resolve(options.tokenizer, weights=False))
        return LocalTokens(options.vocab_size or tokenizer.vocab_size, tokenizer)
    if options.vocab_size is not None:
        return LocalTokens(options.vocab_size)
    if model.vocab_size is not None and not model.has_tokenizer:
        return LocalTokens(model.vocab_size)
    return ServedTokens(http, model.name)
