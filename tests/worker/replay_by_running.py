"""Stands in for CUDA graphs where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from quire.models.lora.step_tiles import Adapted
from quire.runtime.worker.buffer_ring import BufferRing
from quire.runtime.worker.graph_shapes import GraphShape
from quire.runtime.worker.replay import CudaGraphs
from quire.runtime.worker.step import Step


class CountedBufferRing(BufferRing):
    """Of a device with memory of its own: when the host begins a step, all steps before it have copied their inputs."""

    def advance(self) -> int:
        assert self.has_device_memory
        assert self.device_steps.tolist() == [self._host_steps] * len(self.device_steps)
        return super().advance()


class ReplayByRunning(CudaGraphs):
    """Runs a captured step again: the same launches on the staged inputs, of which it copies as many each time."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.steps: dict[tuple[GraphShape, Adapted], tuple[Step, Callable[[Step], Tensor]]] = {}
        self.replayed: list[GraphShape] = []

    @classmethod
    def put_into(cls, runner: Any) -> Any:
        """Take the place of the runner's graphs."""
        graphs = cls(runner._replayable.short)
        runner._replayable = graphs
        return graphs

    def capture(self, step: Step, compute: Callable[[Step], Tensor]) -> None:
        assert step.shape is not None
        step.staged = step.staged.captured()
        self.steps[step.shape, step.adapted] = step, compute

    def replay(self, step: Step) -> Tensor:
        assert step.shape is not None
        step.staged.copy_by_replay()
        captured, compute = self.steps[step.shape, step.adapted]
        assert step.staged.num_copied == captured.staged.num_copied
        self.replayed.append(step.shape)
        logits = compute(captured)
        assert len(logits) == step.shape.sampled
        return logits
