"""Bytes as people read them."""

from __future__ import annotations

GIB = 2**30
_MIB = 2**20


def format_bytes(count: int) -> str:
    """GiB, or MiB where it is less than one GiB."""
    if count >= GIB:
        return f"{count / GIB:.2f} GiB"
    return f"{count / _MIB:,.1f} MiB"
