"""Bytes of model files, compared without keeping them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class FileBytes:
    """Where a tensor's values lie in a file."""

    path: Path
    offset: int
    size: int


def are_equal(one: FileBytes, other: FileBytes) -> bool:
    """Whether both are the same bytes; reads no further than the first difference."""
    if one.size != other.size:
        return False
    with one.path.open("rb") as first, other.path.open("rb") as second:
        first.seek(one.offset)
        second.seek(other.offset)
        rest = one.size
        while rest:
            part = first.read(min(rest, _AT_ONCE))
            if not part or part != second.read(len(part)):
                return False
            rest -= len(part)
    return True
