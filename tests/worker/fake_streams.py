"""A GPU's streams for tests on a CPU: whatever is launched is done at once, in the order of launches. And its swapping
over them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.runtime.worker import kv_tensors, kv_transfer
from quire.runtime.worker.kv_transfer import GpuBlockTransfer


class FakeStream:
    """Of no device."""

    def __init__(self, *_: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...


class FakeEvent:
    """Always passed."""

    def record(self, stream: Any) -> None: ...


@contextmanager
def _stream(stream: Any) -> Iterator[None]:
    yield


def use_fake_streams(patch: pytest.MonkeyPatch) -> None:
    """Let `torch.cuda` hand out fakes."""
    patch.setattr(torch.cuda, "Stream", FakeStream)
    patch.setattr(torch.cuda, "Event", FakeEvent)
    patch.setattr(torch.cuda, "current_stream", FakeStream)
    patch.setattr(torch.cuda, "stream", _stream)


def use_gpu_transfer(patch: pytest.MonkeyPatch, pin: Callable[[int], Tensor], unpin: Callable[[Tensor], None]) -> None:
    """Let workers on a CPU swap as they do on a GPU, to memory that `pin` makes."""
    use_fake_streams(patch)
    patch.setattr(kv_transfer, "pin_host_memory", pin)
    patch.setattr(kv_transfer, "unpin_host_memory", unpin)
    patch.setattr(kv_tensors, "block_transfer", GpuBlockTransfer)
