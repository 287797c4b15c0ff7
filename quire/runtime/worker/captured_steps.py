"""The small steps that are replayed: captured as CUDA graphs, or recorded where the host computes.

Knows which steps these are, and not what they do.
"""

from __future__ import annotations

from torch import Tensor

from quire.runtime.worker.cuda_graphs import CudaGraphs
from quire.runtime.worker.graph_shapes import GraphShape, GraphShapes, ShortSteps
from quire.runtime.worker.recorded_steps import RecordedSteps
from quire.runtime.worker.step import Step, StepKind


class CapturedSteps:
    """Holds the steps that can be replayed, and finds the one for a batch. There are none at first.

    Args:
        short: Which short steps there are.

    Attributes:
        graphs, shapes: Steps on a GPU.
        recorded: Steps on a CPU; None: there are none.
        short: Which short steps there are.
    """

    def __init__(self, short: ShortSteps) -> None:
        self.short = short
        self.graphs = CudaGraphs()
        self.shapes = GraphShapes(0, 0, 0, 0)
        self.recorded: RecordedSteps | None = None

    def covers(self, step: Step) -> GraphShape | None:
        """The captured shape that the step can be padded to, if there is one."""
        host = step.host
        tokens, rows, sampled = len(host.token_ids), len(host.slots), len(host.sampled_slots)
        if self.recorded is not None:
            return self.recorded.for_step(tokens, rows, sampled, host.decode_rows, adapted=step.adapted)
        may_be_short = self.short is ShortSteps.DRAFTING and not host.is_decode
        if may_be_short or (step.kind is StepKind.VERIFY and tokens == sampled):
            short = self.shapes.for_short(tokens, rows, sampled)
            if short is not None:
                return short
        return self.shapes.for_step(tokens, rows, sampled, host.decode_rows)

    def replay(self, step: Step) -> Tensor:
        """Replay the staged step; returns [sampled, vocab] logits, valid until the next replay."""
        assert step.shape is not None
        step.staged.copy_by_replay()
        if self.recorded is None:
            return self.graphs.replay(step.shape, adapted=step.adapted)
        if step.stops_at_logits:
            return self.recorded.replay_logits(step.shape, adapted=step.adapted)
        return self.recorded.replay(step.shape, adapted=step.adapted)

    def sample(self) -> None:
        """Replay the rest of the recorded step whose logits were replayed last."""
        assert self.recorded is not None
        self.recorded.sample()
