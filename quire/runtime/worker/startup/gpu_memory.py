"""A GPU's memory: how torch's allocator takes it, how much is left, and how it is returned."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quire.errors import MemoryBudgetError
from quire.foundation.config import environment


def use_expandable_segments(device: torch.device) -> None:
    """Let freed pieces be joined again, so that a large step fits after small ones. To be called before any tensor."""
    _set_expandable_segments(True)
    torch.cuda.set_device(device)


@contextmanager
def in_one_segment(device: torch.device) -> Iterator[None]:
    """Take what is allocated inside in one piece, for tensors that live until the end, such as the KV cache.

    This is faster than expandable segments, which map 20 MiB at a time. Does nothing on a CPU.
    """
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
    """What does not fit into a GPU's memory is refused with the flag to change."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise MemoryBudgetError(f"The GPU has no room for {what}: {advice}.") from None


def bytes_left(device: torch.device, utilization: float) -> int:
    """Bytes that are free up to a share `utilization` of the device. What torch's allocator has reserved counts as
    taken, because later steps need it.
    """
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return int(utilization * total) - (total - free)


def release() -> None:
    """Return unused memory to the device after the last step, so that another engine can take it."""
    gc.collect()  # a runner's parts refer to each other
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def _set_expandable_segments(enabled: bool) -> None:
    """Unless the user configured the allocator. torch has no public call for this, only a variable read at import."""
    if not environment.allocator_is_set():
        torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{enabled}")
