"""Starts kernels while the previous kernel still ends: programmatic dependent launch, which exists from sm_90 on.

A kernel launched this way may run as soon as every program of the previous kernel has called `release_dependents` or
ended. It must call `wait_for_inputs` before it reads what earlier kernels wrote, and before it writes anything; it may
read a weight, which never changes, sooner. Each kernel waits, so after its wait it sees the work of all earlier
kernels.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl


@functools.cache
def can_overlap(device: torch.device) -> bool:
    """Whether kernels on this device may be launched this way."""
    if device.type != "cuda" or torch.version.hip is not None:  # an AMD MI300 says that it is a (9, 4)
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """Wait until all earlier kernels have ended and their writes are visible."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()


@triton.jit
def release_dependents(OVERLAP: tl.constexpr):
    """Let the programs of the next kernel start as soon as there is room for them."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
