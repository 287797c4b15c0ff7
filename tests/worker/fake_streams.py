"""A GPU's streams for tests on a CPU: whatever is launched is done at once, in the order of launches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


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
