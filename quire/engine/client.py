"""The seam between the engine and the API server or `LLM`, with its two ends: messages in, messages out.

`quire.engine.inprocess` runs the engine in the receiving thread; `quire.engine.transport` reaches one over ZMQ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from quire.foundation.messages.from_engine import EngineId, FromEngine
from quire.foundation.messages.to_engine import ToEngine


@dataclass(frozen=True)
class Lost:
    """Stands in place of a message from the engine that could not be decoded, so its contents are unknown."""

    reason: str


class EngineClient(Protocol):
    """One connection to one engine.

    `send` may be called from one thread while another one waits in `receive`.
    """

    @property
    def number(self) -> int:
        """The client's number: ids that it makes are `number << CLIENT_SHIFT | counter`."""

    @property
    def engine(self) -> EngineId:
        """The engine that it is connected to."""

    def send(self, message: ToEngine) -> None:
        """Send a message; never waits for the engine."""

    def connect(self, engine: EngineId) -> None:
        """Send to this engine from now on. Messages of the one before it may still be received."""

    def receive(self, timeout: float | None) -> FromEngine | Lost | None:
        """The next message, or None after `timeout` seconds (None: wait for ever).

        The first message of a working engine is Ready. After Lost, the state of open requests is unknown.
        """

    def close(self) -> None:
        """Disconnect; an engine in this process stops."""


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
