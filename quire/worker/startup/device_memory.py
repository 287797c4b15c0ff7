"""A GPU's memory: how torch takes it, how much of it is left, and how it is given back."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quire.config import environment


def begin(device: torch.device) -> None:
    """Before the first tensor: what is freed can be put together again, so that a large step fits after small ones."""
    _take_by_pieces(True)
    torch.cuda.set_device(device)


@contextmanager
def whole(device: torch.device) -> Iterator[None]:
    """What stays to the end is taken at once inside, which is sooner done: a piece has 20 MiB, a KV cache thousands."""
    if device.type == "cpu":
        yield
        return
    _take_by_pieces(False)
    try:
        yield
    finally:
        _take_by_pieces(True)


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


def _take_by_pieces(pieces: bool) -> None:
    """Unless the user chose: torch has no public way to say so but a variable that it reads as it is imported."""
    if not environment.allocator_is_set():
        torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{pieces}")
