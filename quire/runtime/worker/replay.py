"""The small steps that are replayed instead of being launched kernel by kernel: on a GPU as CUDA graphs, one for each
of a few shapes; on a CPU as recordings, one for steps of any sizes up to a limit.

A replay runs the same kernels on the same addresses. They read what varies from step to step (slots, lengths, block
tables) from buffers that stay where they are. Steps whose adapters change something are captured or recorded apart, so
that those without are what they would be in an engine that serves none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from quire.compute.kernels.cpu.library import library
from quire.compute.kernels.cpu.recording import NotRecordable, Recording, Sizes, record
from quire.models.lora.step_tiles import Adapted
from quire.runtime.worker.graph_shapes import GraphShape, GraphShapes, ShapeKind, ShortSteps
from quire.runtime.worker.host_memory import unowned_view
from quire.runtime.worker.step import Step, StepKind

MAX_TOKENS = 256
"""Tokens of a recorded step, at most: larger ones take so long that the interpreter's share does not count."""
MAX_SAMPLED = 64
"""Positions with logits, which take much memory in a large vocabulary."""
_log = logging.getLogger(__name__)


class Replayable(Protocol):
    """The steps that can be replayed.

    Attributes:
        can_stop: Whether a replay can stop at the logits, so that the host changes or reads them before `replay_rest`.
    """

    can_stop: bool

    def covers(self, step: Step) -> GraphShape | None:
        """The shape that the step has to be padded to; None: it cannot be replayed."""
        ...

    def replay(self, step: Step) -> Tensor:
        """Replay a staged step that is covered; returns [sampled, vocab] logits, valid until the next replay."""
        ...

    def replay_rest(self) -> None:
        """Replay the rest of the step that was replayed last and stopped at its logits: it samples from them as they
        are by now."""
        ...


class CudaGraphs:
    """Graphs by the shape of their step, and what adapters change in it. There are none at first.

    Args:
        short: Which short steps there are.

    Attributes:
        short: Which short steps there are.
        shapes: The shapes that are captured.
    """

    can_stop = False

    def __init__(self, short: ShortSteps = ShortSteps.NONE) -> None:
        self.short = short
        self.shapes = GraphShapes(0, 0, 0, 0)
        self._graphs: dict[tuple[GraphShape, Adapted], torch.cuda.CUDAGraph] = {}
        self._logits: dict[tuple[GraphShape, Adapted], Tensor] = {}

    def capture(self, step: Step, compute: Callable[[Step], Tensor]) -> None:
        """Capture what `compute` launches for a step that was staged and copied; it returns logits. This thread must
        compile or load no kernel meanwhile.

        All graphs share their memory, also that of their logits, because one replay ends before the next begins. The
        largest shape should be captured first.
        """
        assert step.shape is not None, "a graph has a shape"
        step.staged = step.staged.captured()
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            logits = compute(step)
        self._graphs[step.shape, step.adapted] = graph
        self._logits[step.shape, step.adapted] = unowned_view(logits, logits.device)  # the next graph's memory too

    def covers(self, step: Step) -> GraphShape | None:
        """The smallest captured shape that holds the step. A draft model's steps of several tokens a row, and steps all
        of whose tokens are sampled to verify drafts, are short ones if they can."""
        host = step.host
        tokens, rows, sampled = len(host.token_ids), len(host.slots), len(host.sampled_slots)
        drafting = self.short is ShortSteps.DRAFTING and not host.is_decode
        if drafting or (step.kind is StepKind.VERIFY and tokens == sampled):
            short = self.shapes.for_short(tokens, rows, sampled)
            if short is not None:
                return short
        return self.shapes.for_step(tokens, rows, sampled, host.decode_rows)

    def replay(self, step: Step) -> Tensor:
        assert step.shape is not None, "no graph covers the step"
        step.staged.copy_by_replay()
        self._graphs[step.shape, step.adapted].replay()
        return self._logits[step.shape, step.adapted]

    def replay_rest(self) -> None:
        raise AssertionError("a graph does not stop")


class RecordedSteps:
    """Recorded steps of sizes up to `most`; nothing is padded.

    Args:
        recordings: Of such a step, by what adapters change in it. Where they change experts, there is none.
        most: The largest sizes.
    """

    can_stop = True

    def __init__(self, recordings: dict[Adapted, Recording], most: Sizes) -> None:
        self._recordings = recordings
        self._last = next(iter(recordings.values()))
        self._most = most

    def covers(self, step: Step) -> GraphShape | None:
        """The step's own sizes, if a recording serves them."""
        host = step.host
        sizes = tokens, rows, sampled = len(host.token_ids), len(host.slots), len(host.sampled_slots)
        if not sampled or step.adapted not in self._recordings:
            return None
        if any(own > most for own, most in zip(sizes, self._most, strict=True)):
            return None
        return GraphShape(ShapeKind.DECODE if tokens == rows == sampled else ShapeKind.MIXED, tokens, rows, sampled)

    def replay(self, step: Step) -> Tensor:
        assert step.shape is not None, "no recording covers the step"
        step.staged.copy_by_replay()
        self._last = self._recordings[step.adapted]
        sizes = Sizes(step.shape.tokens, step.shape.rows, step.shape.sampled)
        return self._last.replay(sizes, held_back=1 if step.stops_at_logits else 0)

    def replay_rest(self) -> None:
        self._last.replay_rest()


def record_steps(
    step: Callable[[Adapted, Sizes], Callable[[], Tensor]], kinds: Sequence[Adapted], rows: int, sampled: int
) -> RecordedSteps | None:
    """Record a step; see `recording.record`.

    Args:
        step: Prepares a step, given what adapters change in it.
        kinds: What adapters may change; a step of each kind is recorded.
        rows, sampled: Most rows and sampled positions of a step.

    Returns:
        The recorded steps; None where our kernels do not compute all of a step.
    """
    kernels = library()
    if kernels is None:
        return None
    most = Sizes(MAX_TOKENS, min(rows, MAX_TOKENS), min(sampled, MAX_SAMPLED))
    try:
        recordings = {adapted: record(kernels, partial(step, adapted), most) for adapted in kinds}
    except NotRecordable as reason:
        _log.info("Steps are not recorded, and take the interpreter longer: %s", reason)
        return None
    ends = kernels.entries("sample")
    assert all(each.last_entry in ends for each in recordings.values()), "sampling is the end of a step"
    return RecordedSteps(recordings, most)
