"""Stands in for CUDA graphs where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from quire.models.lora.step_tiles import Adapted
from quire.runtime.worker.buffer_ring import BufferRing
from quire.runtime.worker.graph_shapes import GraphShape


class CountedBufferRing(BufferRing):
    """Of a device with memory of its own: when the host begins a step, all steps before it have copied their inputs."""

    def advance(self) -> int:
        assert self.has_device_memory
        assert self.device_steps.tolist() == [self._host_steps] * len(self.device_steps)
        return super().advance()


class ReplayByRunning:
    """Runs a captured step again: the same launches on the staged inputs, of which it copies as many each time."""

    def __init__(self) -> None:
        self._steps: dict[tuple[GraphShape, Adapted], partial[Tensor]] = {}
        self._copied: dict[tuple[GraphShape, Adapted], int] = {}
        self.replayed: list[GraphShape] = []

    def capture(self, shape: GraphShape, step: Callable[[], Tensor], *, adapted: Adapted = Adapted.NOTHING) -> None:
        assert isinstance(step, partial)
        self._steps[shape, adapted] = step
        self._copied[shape, adapted] = self._entries(shape, adapted)

    def _entries(self, shape: GraphShape, adapted: Adapted) -> int:
        runner = self._steps[shape, adapted].func.__self__  # type: ignore[attr-defined]
        copied: int = runner._stager._staging._staged.num_copied
        return copied

    def replay(self, shape: GraphShape, *, adapted: Adapted = Adapted.NOTHING) -> Tensor:
        assert self._entries(shape, adapted) == self._copied[shape, adapted]
        self.replayed.append(shape)
        logits = self._steps[shape, adapted]()
        assert len(logits) == shape.sampled
        return logits
