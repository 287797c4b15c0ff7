"""Steps on a CPU that are recorded once and replayed: what CUDA graphs are on a GPU.

One recording serves steps of any sizes up to a limit, so nothing is padded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import Tensor

from quire.kernels.cpu.library import library
from quire.kernels.cpu.recording import NotRecordable, Recording, Sizes, record
from quire.worker.graph_shapes import GraphShape, StepKind

MOST_TOKENS = 64
"""Tokens of a recorded step, at most: larger ones take so long that the interpreter's share does not count."""
_log = logging.getLogger(__name__)


class RecordedSteps:
    """Replays steps of up to `most` tokens.

    Args:
        recording: Of such a step.
        most: The largest sizes.
    """

    def __init__(self, recording: Recording, most: Sizes) -> None:
        self._recording = recording
        self._most = most

    def for_step(self, tokens: int, rows: int, sampled: int, decode_rows: int) -> GraphShape | None:
        """See GraphShapes."""
        if not sampled or tokens > self._most.tokens or rows > self._most.rows:
            return None
        return GraphShape(StepKind.DECODE if tokens == rows == sampled else StepKind.MIXED, tokens, rows, sampled)

    def replay(self, shape: GraphShape) -> Tensor:
        """[sampled, vocab] logits, valid until the next replay."""
        return self._recording.replay(_sizes(shape))

    def replay_logits(self, shape: GraphShape) -> Tensor:
        """The same, but nothing is sampled from them before `sample`."""
        return self._recording.replay(_sizes(shape), held_back=1)

    def sample(self) -> None:
        """The rest of a step whose logits were replayed, with what has become of them."""
        self._recording.replay_rest()


def record_steps(step: Callable[[Sizes], Callable[[], Tensor]], rows: int) -> RecordedSteps | None:
    """Record a step for up to `rows` rows; see `recording.record`. None where kernels do not compute all of it."""
    kernels = library()
    if kernels is None:
        return None
    most = Sizes(MOST_TOKENS, min(rows, MOST_TOKENS), min(rows, MOST_TOKENS))
    try:
        recording = record(kernels, step, most)
    except NotRecordable as reason:
        _log.info("Steps are not recorded, and take the interpreter longer: %s", reason)
        return None
    assert recording.last_entry in kernels.entries("sample"), "sampling is the end of a step"
    return RecordedSteps(recording, most)


def _sizes(shape: GraphShape) -> Sizes:
    return Sizes(shape.tokens, shape.rows, shape.sampled)
