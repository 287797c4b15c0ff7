"""Replays small steps instead of launching them kernel by kernel: a GPU has a CUDA graph for each of a few shapes, a
CPU a recording for all sizes up to a limit.

A replay runs the same kernels on the same addresses, and the kernels read what varies (slots, lengths, block tables)
from buffers that do not move. Steps with adapters are captured separately, so that steps without them run exactly as in
an engine that serves none.
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
"""Maximum tokens of a recorded step. In larger steps the interpreter's share of the time is negligible."""
MAX_SAMPLED = 64
"""Maximum sampled positions of a recorded step. Their logits take much memory if the vocabulary is large."""
_log = logging.getLogger(__name__)


class Replayable(Protocol):
    """Replays steps that were captured or recorded. If `can_stop`, a replay can stop at the logits, so that the host
    reads or changes them before `replay_rest`."""

    can_stop: bool

    def covers(self, step: Step) -> GraphShape | None:
        """Return the shape that the step must be padded to, or None if it cannot be replayed."""

    def replay(self, step: Step) -> Tensor:
        """Replay a staged step that `covers` accepted. Returns [sampled, vocab] logits, which are valid until the next
        replay."""

    def replay_rest(self) -> None:
        """Replay the rest of the last step, which stopped at its logits. The step samples from the logits as they are
        now."""


class CudaGraphs:
    """CUDA graphs by the shape of their step and by what adapters change in it. `short` says which short steps are
    captured, and `shapes` has the captured shapes, none at first."""

    can_stop = False

    def __init__(self, short: ShortSteps = ShortSteps.NONE) -> None:
        self.short = short
        self.shapes = GraphShapes(0, 0, 0, 0)
        self._graphs: dict[tuple[GraphShape, Adapted], torch.cuda.CUDAGraph] = {}
        self._logits: dict[tuple[GraphShape, Adapted], Tensor] = {}

    def capture(self, step: Step, compute: Callable[[Step], Tensor]) -> None:
        """Capture what `compute` launches for a step that is staged and copied; `compute` returns the logits. This
        thread must not compile or load a kernel meanwhile.

        All graphs, and their logits, share one memory pool, because one replay ends before the next begins. Capture the
        largest shape first.
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
        """Return the smallest captured shape that holds the step, or None. A draft model's steps with several tokens
        per row, and steps that sample all tokens to verify drafts, get a short shape if one fits."""
        host = step.host
        tokens, rows, sampled = len(host.token_ids), len(host.slots), len(host.sampled_slots)
        drafting = self.short is ShortSteps.DRAFTING and not host.is_decode
        if drafting or (step.kind is StepKind.VERIFY and tokens == sampled):
            short = self.shapes.for_short(tokens, rows, sampled)
            if short is not None:
                return short
        if host.is_decode:
            return self.shapes.for_decode(rows)
        return self.shapes.for_prompts(tokens, rows, host.decode_rows, sampled)

    def replay(self, step: Step) -> Tensor:
        assert step.shape is not None, "no graph covers the step"
        step.staged.copy_by_replay()
        self._graphs[step.shape, step.adapted].replay()
        return self._logits[step.shape, step.adapted]

    def replay_rest(self) -> None:
        raise AssertionError("a graph does not stop")


class RecordedSteps:
    """Recorded steps of all sizes up to `most`, by what adapters change in them. Nothing is padded, and steps whose
    adapters change experts are not recorded."""

    can_stop = True

    def __init__(self, recordings: dict[Adapted, Recording], most: Sizes) -> None:
        self._recordings = recordings
        self._last = next(iter(recordings.values()))
        self._most = most

    def covers(self, step: Step) -> GraphShape | None:
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
    """Record a step for each kind of adapter change; returns None if Quire's own kernels do not compute all of a step.

    Args:
        step: Prepares a step, given what adapters change in it and its sizes.
        kinds: What adapters may change; a step of each kind is recorded.
        rows, sampled: Maximum rows and sampled positions of a step.
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
