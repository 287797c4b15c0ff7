"""Which clients are alive: the requests of one that stops sending heartbeats are aborted.

A client that never sent one (in this process) is not watched. Knows nothing about transport.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.clock import Clock
from quire.messages import CLIENT_SHIFT

SILENT_AFTER_S = 15.0
"""A client without a heartbeat for this long counts as dead."""


class ClientLiveness:
    """When each client was last heard."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heard: dict[int, float] = {}
        self._next_check = 0.0

    @property
    def clients(self) -> list[int]:
        """Clients that are alive."""
        return list(self._heard)

    def mark_alive(self, client: int) -> bool:
        """Note a heartbeat of `client`; returns whether the client is new, or back."""
        new = client not in self._heard
        self._heard[client] = self._clock.now()
        return new

    def requests_of_lost_clients(self, request_ids: Iterable[int]) -> list[int]:
        """Requests of clients that have died since; those clients are forgotten. Checks at most once a second."""
        now = self._clock.now()
        if now < self._next_check:
            return []
        self._next_check = now + 1.0
        silent = {client for client, when in self._heard.items() if now - when > SILENT_AFTER_S}
        for client in silent:
            del self._heard[client]
        return [i for i in request_ids if i >> CLIENT_SHIFT in silent] if silent else []
