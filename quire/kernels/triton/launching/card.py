"""How large the card is, for grids of as many programs as it runs at once."""

from __future__ import annotations

import functools

import torch

_INTERPRETED = 4
"""Where kernels are interpreted: few, but several."""


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of this device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _INTERPRETED
