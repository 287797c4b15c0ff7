"""The seam between the API server or `LLM` and the engine: messages in, messages out.

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
        ...

    @property
    def engine(self) -> EngineId:
        """The engine that it is connected to."""
        ...

    def send(self, message: ToEngine) -> None:
        """Send a message; never waits for the engine."""
        ...

    def connect(self, engine: EngineId) -> None:
        """Send to this engine from now on. Messages of the one before it may still be received."""
        ...

    def receive(self, timeout: float | None) -> FromEngine | Lost | None:
        """The next message, or None after `timeout` seconds (None: wait for ever).

        The first message of a working engine is Ready. After Lost, the state of open requests is unknown.
        """
        ...

    def close(self) -> None:
        """Disconnect; an engine in this process stops."""
        ...
