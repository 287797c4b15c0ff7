"""Memory that was freed but is still held by the C library. Knows nothing about who freed it."""

from __future__ import annotations

import ctypes


def give_back_freed() -> None:
    """Return freed memory to the system, where the C library can.

    Reading weights frees a plain copy of each after it is packed; glibc keeps many of these for later allocations,
    about a fifth of the weights' size.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
