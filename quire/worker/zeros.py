"""Zeros that take memory up as they are written, where the device allows it. Knows nothing about what they are for."""

from __future__ import annotations

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
