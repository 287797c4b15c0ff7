"""Steps on a CPU that are recorded once and replayed: what CUDA graphs are on a GPU.

One recording serves steps of any sizes up to a limit, so nothing is padded. Steps with adapters have another one, so
that those without are what they would be in an engine that serves none. Where adapters change experts, they have none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from quire.compute.kernels.cpu.library import library
from quire.compute.kernels.cpu.recording import NotRecordable, Recording, Sizes, record
from quire.models.lora.step_tiles import Adapted
from quire.runtime.worker.graph_shapes import GraphShape, ShapeKind

MAX_TOKENS = 256
"""Tokens of a recorded step, at most: larger ones take so long that the interpreter's share does not count."""
MAX_SAMPLED = 64
"""Positions with logits, which take much memory in a large vocabulary."""
_log = logging.getLogger(__name__)


class RecordedSteps:
    """Replays recorded steps, of sizes up to `most`.

    Args:
        recordings: Of such a step, by what adapters change in it.
        most: The largest sizes.
    """

    def __init__(self, recordings: dict[Adapted, Recording], most: Sizes) -> None:
        self._recordings = recordings
        self._last = next(iter(recordings.values()))
        self._most = most

    def for_step(
        self, tokens: int, rows: int, sampled: int, decode_rows: int, *, adapted: Adapted = Adapted.NOTHING
    ) -> GraphShape | None:
        """The shape of a step of these sizes whose adapters change `adapted`; None: no recording serves it."""
        if adapted not in self._recordings:
            return None
        if not sampled or any(own > most for own, most in zip((tokens, rows, sampled), self._most, strict=True)):
            return None
        return GraphShape(ShapeKind.DECODE if tokens == rows == sampled else ShapeKind.MIXED, tokens, rows, sampled)

    def replay(self, shape: GraphShape, *, adapted: Adapted = Adapted.NOTHING) -> Tensor:
        """Replay the staged step; returns [sampled, vocab] logits, valid until the next replay."""
        return self._recordings[adapted].replay(_sizes(shape))

    def replay_logits(self, shape: GraphShape, *, adapted: Adapted = Adapted.NOTHING) -> Tensor:
        """Replay the staged step up to its logits, which it returns. Nothing is sampled from them before `sample`."""
        self._last = self._recordings[adapted]
        return self._last.replay(_sizes(shape), held_back=1)

    def sample(self) -> None:
        """Replay the rest of the step whose logits were replayed last: it samples from them as they are by now."""
        self._last.replay_rest()


def record_steps(
    step: Callable[[Adapted, Sizes], Callable[[], Tensor]], kinds: Sequence[Adapted], rows: int, sampled: int
) -> RecordedSteps | None:
    """Record a step for up to `rows` rows and `sampled` positions; see `recording.record`.

    Args:
        step: Prepares a step, given what adapters change in it.
        kinds: What adapters may change; a step of each kind is recorded.
        rows, sampled: See above.

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


def _sizes(shape: GraphShape) -> Sizes:
    return Sizes(shape.tokens, shape.rows, shape.sampled)
