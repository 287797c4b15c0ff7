"""Main memory: allocated page by page as it is written, and returned to the system when it is freed."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros. On a CPU it is made by numpy, which takes a page when it is first written; torch would write
    all of them at once.

    Raises:
        RuntimeError, MemoryError, ValueError: There is not that much memory.
    """
    if device.type != "cpu":
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    plain = torch.from_numpy(np.zeros(max(size, dtype.itemsize), dtype=np.uint8)).view(dtype)
    return plain[: math.prod(shape)].view(tuple(shape))


def trim_heap() -> None:
    """Return freed memory that the C library still holds to the system, where the library can.

    Reading weights frees a plain copy of each weight after it is packed. glibc keeps many of these copies for later
    allocations, about a fifth of the weights' size.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
