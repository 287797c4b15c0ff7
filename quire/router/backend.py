"""A server as the router sees it: what it serves, whether it is well, and what it has to do. Asks nothing itself."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.clock import Clock
from quire.config.router import RouterConfig
from quire.router.backend_list import BackendAddress
from quire.router.circuit_breaker import CircuitBreaker
from quire.router.connection_pool import ConnectionPool
from quire.router.prompt_prefix import BLOCK_TOKENS
from quire.routing.replica_chooser import ReplicaLoad

_UNKNOWN_BLOCKS = 8_192
"""Blocks of a prompt's text that are supposed to be in the prefix cache of a server that does not say."""


@dataclass(frozen=True)
class ScrapedLoad:
    """What a server's /metrics says.

    Attributes:
        running, waiting: Sequences.
        cache_tokens: What its KV cache holds; 0 if it does not say.
        cache_usage: The share of it that is in use.
    """

    running: int = 0
    waiting: int = 0
    cache_tokens: int = 0
    cache_usage: float = 0.0


class Backend:
    """One server.

    Args:
        address: From the list.
        number: Its place among the chooser's replicas.
        config: When it is left alone.
        clock: For that.
        tls: For connections to servers with https.

    Attributes:
        address: From the list as it is now.
        number: As given.
        pool: Connections to it.
        breaker: Counts its failures.
        complaint: Why it gets no requests; empty if it is ready.
        cards: What its /v1/models says, by name.
        models: Names of models and adapters that requests may ask it for.
        load: What its /metrics said last.
        in_flight: Requests of this router that it has.
    """

    def __init__(
        self, address: BackendAddress, number: int, config: RouterConfig, clock: Clock, tls: ssl.SSLContext
    ) -> None:
        self.address = address
        self.number = number
        self.pool = ConnectionPool(address, tls)
        self.breaker = CircuitBreaker(config.cb_failure_threshold, config.cb_timeout_duration_secs, clock)
        self.complaint = "It was not asked yet."
        self.cards: Mapping[str, Any] = {}
        self.models = frozenset(address.models)
        self.load = ScrapedLoad()
        self.in_flight = 0
        self._left = False

    @property
    def is_ready(self) -> bool:
        """Whether it says that it would serve requests."""
        return not self.complaint

    @property
    def takes_requests(self) -> bool:
        """Whether it may get one now."""
        return self.is_ready and not self.address.drain and self.breaker.passes

    def relist(self, address: BackendAddress) -> None:
        """The list was read again; the URL is the same."""
        self.address = address
        self.models = frozenset(address.models or self.cards)

    def learn_cards(self, cards: Mapping[str, Any]) -> None:
        """Its /v1/models was read."""
        self.cards = cards
        self.models = frozenset(self.address.models or cards)

    def replica_load(self) -> ReplicaLoad:
        """What it has to do, in the chooser's terms: its blocks are those of text."""
        load = self.load
        num_blocks = load.cache_tokens // BLOCK_TOKENS or _UNKNOWN_BLOCKS
        free = int(num_blocks * (1 - load.cache_usage))
        return ReplicaLoad(max(self.in_flight, load.running + load.waiting), 0, free, num_blocks)

    def began(self) -> int:
        """It gets a request; its number, see CircuitBreaker."""
        self.in_flight += 1
        return self.breaker.sending()

    def ended(self) -> None:
        """A request that it had is over."""
        self.in_flight -= 1
        if self._left and not self.in_flight:
            self.pool.close()

    def leave(self) -> None:
        """It stands in the list no more: it finishes what it has."""
        self._left = True
        if not self.in_flight:
            self.pool.close()

    def state(self) -> dict[str, Any]:
        """For GET /backends."""
        return {
            "url": self.address.url,
            "ready": self.is_ready,
            "reason": self.complaint,
            "draining": self.address.drain,
            "circuit_open": self.breaker.is_open,
            "requests": self.in_flight,
            "models": sorted(self.models),
        }
