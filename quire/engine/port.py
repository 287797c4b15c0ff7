"""The engine's side of the message seam: where messages come from and go to. Implementations: in-process and ZMQ."""

from __future__ import annotations

from typing import Protocol

from quire.messages import FromEngine, ToEngine


class Port(Protocol):
    """The engine's inbox and its way to each client."""

    def drain(self, wait: float | None) -> list[ToEngine]:
        """All messages that have arrived, waiting up to `wait` seconds for the first (None: for ever)."""
        ...

    def send(self, client: int, message: FromEngine) -> None:
        """Send a message to a client; never waits for it."""
        ...
