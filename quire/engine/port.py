"""The engine's side of its connections: an inbox, and a way to each client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from quire.foundation.messages.from_engine import FromEngine
from quire.foundation.messages.to_engine import ToEngine


@dataclass(frozen=True)
class Undecodable:
    """A message that could not be decoded, but says who waits for an answer.

    Attributes:
        sequences: Ids of the sequences that it would have added; each must get an End.
        control: Id of the Control that it would have been, which must get a Done; or None.
    """

    reason: str
    sequences: tuple[int, ...] = ()
    control: int | None = None


class Port(Protocol):
    """The engine's inbox and its way to each client."""

    def drain(self, wait: float | None) -> list[ToEngine | Undecodable]:
        """All messages that have arrived, waiting up to `wait` seconds for the first (None: for ever)."""

    def send(self, client: int, message: FromEngine) -> None:
        """Send a message to a client; never waits for it."""

    def forget(self, client: int) -> None:
        """Drop what a client that is gone was to get."""
