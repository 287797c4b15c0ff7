"""A GPU's memory: how torch takes it, how much of it is left, and how it is given back."""

from __future__ import annotations

import gc

import torch


def begin(device: torch.device) -> None:
    """Before the first tensor: what is freed can be put together again, so that a large step fits after small ones."""
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    torch.cuda.set_device(device)


def left(device: torch.device, utilization: float) -> int:
    """Bytes up to that share of the device that nobody has taken. What torch holds for later steps counts as taken."""
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return int(utilization * total) - (total - free)


def give_back() -> None:
    """After the last step: what nobody holds any more is the device's again, so that another engine finds it."""
    gc.collect()  # a runner's parts know each other
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
