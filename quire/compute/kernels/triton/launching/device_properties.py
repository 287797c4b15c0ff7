"""The kind and size of the GPU, which decide how many programs run at once and how large one may be."""

from __future__ import annotations

import functools

import torch

_INTERPRETED = 4
"""The number of multiprocessors that kernels see under Triton's interpreter: few, but several."""
_INTERPRETED_MEMORY = 227 * 1024
"""Bytes of shared memory that a program has under Triton's interpreter: as many as on Hopper."""
_KEPT = 1024
"""Bytes of shared memory that a multiprocessor keeps for itself."""


@functools.cache
def is_sm_90(device: torch.device) -> bool:
    """Whether the GPU is a Hopper, which some kernels are written for; newer GPUs lack its matrix instructions."""
    if device.type != "cuda" or torch.version.hip is not None:  # an AMD MI200 says that it is a (9, 0)
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of the device's multiprocessors; on a CPU, where kernels are interpreted, a small number."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _INTERPRETED


@functools.cache
def program_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may have: a multiprocessor's, less what it keeps for itself.

    These are 163 KiB on sm_80, 99 KiB on sm_86 and sm_89, and 227 KiB on sm_90.
    """
    if device.type != "cuda":
        return _INTERPRETED_MEMORY
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor - _KEPT
