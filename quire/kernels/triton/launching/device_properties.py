"""What the GPU is, and how large: for grids of as many programs as it runs at once, and for programs of a size that it
takes.
"""

from __future__ import annotations

import functools

import torch

_INTERPRETED = 4
"""Where kernels are interpreted: few, but several."""
_INTERPRETED_MEMORY = 227 * 1024
"""The same as on Hopper."""
_KEPT = 1024
"""Bytes of shared memory."""


@functools.cache
def is_sm_90(device: torch.device) -> bool:
    """Whether it is Hopper, which some kernels are written for; newer GPUs lack its matrix products."""
    if device.type != "cuda" or torch.version.hip is not None:  # an AMD MI200 says that it is a (9, 0)
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of this device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _INTERPRETED


@functools.cache
def program_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have, all of a multiprocessor's but what that keeps for itself: 163 KiB
    on sm_80, 99 on sm_86 and sm_89, 227 on sm_90."""
    if device.type != "cuda":
        return _INTERPRETED_MEMORY
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor - _KEPT
