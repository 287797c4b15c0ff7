"""The seam between ranks that send one another messages: in memory that they share, or over a network."""

from __future__ import annotations

from typing import Protocol


class MessageWriter(Protocol):
    """Where messages are handed over."""

    def write(self, message: bytes) -> None:
        """Hand a message to all readers; may wait until they have read earlier ones."""
        ...


class MessageReader(Protocol):
    """Where messages arrive, in the order in which they were written."""

    def read(self) -> bytes:
        """The next message; waits for it."""
        ...
