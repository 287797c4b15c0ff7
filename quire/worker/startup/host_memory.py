"""Main memory: taken up only as it is written, and given back when it is freed. Knows nothing about what it is for."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a GPU, torch's. On a CPU, numpy's: pages are taken up as they are first written, where torch writes them all
    at once.

    Raises:
        RuntimeError, MemoryError, ValueError: There is not that much memory.
    """
    if device.type != "cpu":
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    plain = torch.from_numpy(np.zeros(max(size, dtype.itemsize), dtype=np.uint8)).view(dtype)
    return plain[: math.prod(shape)].view(tuple(shape))


def give_back_freed() -> None:
    """Return memory that was freed, but that the C library still holds, to the system, where the library can.

    Reading weights frees a plain copy of each after it is packed; glibc keeps many of these for later allocations,
    about a fifth of the weights' size.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
