"""What stands in the place of graphs where there is no card."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from quire.worker.buffer_ring import BufferRing
from quire.worker.graph_shapes import GraphShape


class CountedBufferRing(BufferRing):
    """Of a device whose memory is its own: by the time the host lays a step, all before it have fetched."""

    def lay(self) -> int:
        assert self.apart
        assert self.on_device.tolist() == [self._laid] * len(self.on_device)
        return super().lay()


class ReplayByRunning:
    """What was recorded is run again: the same launches, on the columns of the day, of which it takes as many."""

    def __init__(self) -> None:
        self._steps: dict[GraphShape, partial[Tensor]] = {}
        self._fetched: dict[GraphShape, int] = {}
        self.replayed: list[GraphShape] = []

    def record(self, shape: GraphShape, forward: Callable[[], Tensor]) -> None:
        assert isinstance(forward, partial)
        self._steps[shape] = forward
        self._fetched[shape] = self._entries(shape)

    def _entries(self, shape: GraphShape) -> int:
        fetched: int = self._steps[shape].func.__self__._columns._fetched  # type: ignore[attr-defined]
        return fetched

    def replay(self, shape: GraphShape) -> Tensor:
        assert self._entries(shape) == self._fetched[shape]
        self.replayed.append(shape)
        logits = self._steps[shape]()
        assert len(logits) == shape.reads
        return logits
