"""What all messages are."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Encoded as an array of its class's name and its fields."""
