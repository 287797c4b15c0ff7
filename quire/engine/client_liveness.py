"""Which clients are alive: the requests of one that stops sending heartbeats are aborted.

A client that never sent one (in this process) is not watched. Knows nothing about transport.
"""

from __future__ import annotations

from quire.foundation.clock import Clock

SILENT_AFTER_S = 15.0
"""A client without a heartbeat for this long counts as dead."""

OWN_PAUSE_S = 3.0
"""The engine's loop turns every second; a longer pause is its own."""


class ClientLiveness:
    """When each client was last heard; times are those of `clock`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heard: dict[int, float] = {}
        self._gone: set[int] = set()  # as many as API processes have died
        self._checked = clock.now()

    @property
    def clients(self) -> list[int]:
        """Clients that are alive."""
        return list(self._heard)

    def mark_alive(self, client: int) -> bool:
        """Note a heartbeat of a client; returns whether the client is new, or back."""
        if client in self._gone:
            return False  # it was on its way
        new = client not in self._heard
        self._heard[client] = self._clock.now()
        return new

    def heard(self, client: int) -> None:
        """Note a request of a client. It is as good as a heartbeat, if the client sends heartbeats."""
        if client in self._heard:
            self._heard[client] = self._clock.now()

    def mark_gone(self, client: int) -> None:
        """Note that a client is dead and will not come back."""
        self._heard.pop(client, None)
        self._gone.add(client)

    def is_gone(self, client: int) -> bool:
        """Whether a client was marked as dead."""
        return client in self._gone

    def lost_clients(self) -> list[int]:
        """Forget the clients that have fallen silent, and return them. Checks at most once a second. When this process
        itself was left without time, no client is blamed for it."""
        now = self._clock.now()
        passed = now - self._checked
        if passed < 1.0:
            return []
        self._checked = now
        if passed > OWN_PAUSE_S:
            self._heard = {client: when + passed for client, when in self._heard.items()}
        silent = [client for client, when in self._heard.items() if now - when > SILENT_AFTER_S]
        for client in silent:
            del self._heard[client]
        return silent
