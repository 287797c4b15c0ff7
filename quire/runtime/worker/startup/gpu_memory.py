"""Controls a GPU's memory: how torch's allocator takes it, how much is free, and how it is released."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quire.errors import MemoryBudgetError
from quire.foundation.config import environment


def use_expandable_segments(device: torch.device) -> None:
    """Let torch join freed pieces again, so that a large step fits after small ones. Call this before any tensor is
    made."""
    _set_expandable_segments(True)
    torch.cuda.set_device(device)


@contextmanager
def in_one_segment(device: torch.device) -> Iterator[None]:
    """Allocate in one piece inside this context, for tensors that live until the end, such as the KV cache. This is
    faster than expandable segments, which map 20 MiB at a time. The context does nothing on a CPU."""
    if device.type == "cpu":
        yield
        return
    _set_expandable_segments(False)
    try:
        yield
    finally:
        _set_expandable_segments(True)


@contextmanager
def room_for(what: str, advice: str) -> Iterator[None]:
    """Turn an out-of-memory error into a MemoryBudgetError that says what did not fit and which flag to change."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise MemoryBudgetError(f"The GPU has no room for {what}: {advice}.") from None


def bytes_left(device: torch.device, utilization: float) -> int:
    """Return how many bytes may still be taken if the share `utilization` of the device may be used. Memory that
    torch's allocator has reserved counts as used, because later steps need it."""
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return int(utilization * total) - (total - free)


def release() -> None:
    """Return unused memory to the device after the last step, so that another engine can use it."""
    gc.collect()  # a runner's parts refer to each other
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def _set_expandable_segments(enabled: bool) -> None:
    """Switch expandable segments, unless the user has configured the allocator. torch has no public call for this, only
    an environment variable that it reads at import."""
    if not environment.allocator_is_set():
        torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{enabled}")
