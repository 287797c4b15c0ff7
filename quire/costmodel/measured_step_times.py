"""How long steps take on a machine where some were timed: the terms of a step, fitted to these.

A step's time is a curve over its tokens (products; straight between the numbers of tokens that were timed), and beside
it so much for each sampled row, for each chunk, for each position that decoding rows read, and for each pair of
positions that chunks score. Where `step_time.py` derives such terms from a device's figures, here they are fitted:
least squares of relative errors, in which steps that stalled count less and less (Huber's weights). Knows nothing about
how steps are timed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from quire.errors import ConfigError, reason
from quire.models.spec import ModelSpec

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

_ROUNDS = 8
"""Of reweighting; weights move by less than a percent after five."""
_HUBER = 1.5
"""Residuals beyond so many times the median one count less."""
_SMOOTHNESS = 0.02
"""How much a kink of the curve costs, beside a relative error of 1: it only decides where nothing was timed."""


@dataclass(frozen=True)
class TimedStep:
    """A step that ran.

    Attributes:
        counts: Tokens of each row.
        before: Tokens before these in each row's context.
        sampled: Rows that sampled a token.
        ms: What it took.
    """

    counts: tuple[int, ...]
    before: tuple[int, ...]
    sampled: int
    ms: float


class ServerTerms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the HTTP API and its clients add, on the same processor.

    Attributes:
        request_ms: To a request, there and back.
        step_ms: To a step.
        row_ms: To a step, for each of its streams.
    """

    request_ms: float
    step_ms: float
    row_ms: float


class StepTerms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fit.

    Attributes:
        points: (tokens of a step, milliseconds), ascending: the curve.
        row_ms: Of each sampled row.
        chunk_ms: Of each row with more than one token.
        read_ms: Of each position that a decoding row reads, in all layers together.
        score_ms: Of each pair of positions in a chunk's attention, in all layers together.
        error: Median relative error of the steps that it was fitted to.
    """

    points: tuple[tuple[int, float], ...]
    row_ms: float
    chunk_ms: float
    read_ms: float
    score_ms: float
    error: float


class MeasuredStepTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was measured of a model on a machine.

    Attributes:
        model: How it was named.
        parameters: How many it has.
        dtype, kv_dtype: Of its weights and KV cache.
        threads: That computed.
        windows: (window or None, layers with it).
        steps: Of the engine alone.
        engine_request_ms: From a request to its engine and back, in one process.
        server: What a server adds.
    """

    model: str
    parameters: int
    dtype: str
    kv_dtype: str
    threads: int
    windows: tuple[tuple[int | None, int], ...]
    steps: StepTerms
    engine_request_ms: float
    server: ServerTerms

    def request_ms(self, *, server: bool) -> float:
        """From a request's arrival to its engine and back."""
        return self.engine_request_ms + server * self.server.request_ms

    def step_time(self, *, server: bool) -> MeasuredStepTime:
        """Predicts steps, of a server or of an engine in its client's process."""
        added = (self.server.step_ms, self.server.row_ms) if server else (0.0, 0.0)
        return MeasuredStepTime(self.steps, dict(self.windows), added)

    def check(self, spec: ModelSpec, dtype: str, kv_dtype: str) -> None:
        """Refuse to speak for another model.

        Raises:
            ConfigError: It was measured with something else.
        """
        own = (self.parameters, self.dtype, self.kv_dtype)
        if own != (spec.num_parameters, dtype, kv_dtype):
            raise ConfigError(
                f"These step times are those of {self.model} ({self.parameters:,} parameters, {self.dtype}, KV cache of "
                f"{self.kv_dtype}), not of a model of {spec.num_parameters:,} parameters, {dtype}, KV cache of "
                f"{kv_dtype}: measure again with --calibrate.",
                param="step_times",
            )


class MeasuredStepTime:
    """Predicts steps.

    Args:
        terms: Fitted.
        windows: Layers by their window; None looks back to the beginning.
        added: Milliseconds on top, of a step and of each sampled row.
    """

    def __init__(
        self, terms: StepTerms, windows: dict[int | None, int], added: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        self._terms, self._windows, self._added = terms, windows, added
        self._tokens = np.array([tokens for tokens, _ in terms.points], np.float64)
        self._ms = np.array([ms for _, ms in terms.points])

    def __call__(self, counts: IntArray, before: IntArray, sampled: int) -> float:
        """Milliseconds of a step; arguments as of StepTime."""
        reads, scores = _attended(counts, before, self._windows)
        chunks = int((counts > 1).sum())
        terms, tokens = self._terms, float(counts.sum())
        ms = float(_curve(self._tokens, tokens) @ self._ms)
        ms += terms.row_ms * sampled + terms.chunk_ms * chunks + terms.read_ms * reads + terms.score_ms * scores
        return max(ms, float(self._ms[0])) + self._added[0] + self._added[1] * sampled


def fitted(steps: Sequence[TimedStep], spec: ModelSpec) -> StepTerms:
    """The terms that explain these steps best.

    Raises:
        ValueError: There are too few steps of different sizes.
    """
    sizes = Counter(sum(step.counts) for step in steps)
    knots = _spread([tokens for tokens, times in sorted(sizes.items()) if times > 1])
    if len(knots) < 2:
        raise ValueError(f"{len(steps)} steps of {len(sizes)} sizes are too few to fit a step's time to")
    windows = windows_of(spec)
    features = np.array([_features(step, knots, windows) for step in steps])
    ms = np.array([step.ms for step in steps])
    weights = np.ones(len(steps))
    for _ in range(_ROUNDS):
        terms = _non_negative(features / ms[:, None] * weights[:, None], weights, knots)
        errors = np.abs(features @ terms / ms - 1)
        limit = _HUBER * max(1e-9, float(np.median(errors)))
        weights = np.sqrt(np.minimum(1.0, limit / np.maximum(errors, 1e-12)))
    points = tuple(zip(map(int, knots), terms[: len(knots)].tolist(), strict=True))
    row, chunk, read, score = terms[len(knots) :].tolist()
    return StepTerms(points, row, chunk, read, score, float(np.median(errors)))


def windows_of(spec: ModelSpec) -> dict[int | None, int]:
    """Layers by how far back they look."""
    return dict(Counter(spec.window if local else None for local in spec.local))


def read_step_times(path: str) -> MeasuredStepTimes:
    """What --calibrate has written.

    Raises:
        ConfigError: The file cannot be read, or holds something else.
    """
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=MeasuredStepTimes)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"--step-times {path} cannot be read: {reason(error)}. --calibrate writes such a file.", param="step_times"
        ) from error


def _features(step: TimedStep, knots: FloatArray, windows: dict[int | None, int]) -> FloatArray:
    counts, before = np.array(step.counts, np.int64), np.array(step.before, np.int64)
    reads, scores = _attended(counts, before, windows)
    beside = (step.sampled, int((counts > 1).sum()), reads, scores)
    return np.concatenate((_curve(knots, float(counts.sum())), beside))


def _attended(counts: IntArray, before: IntArray, windows: dict[int | None, int]) -> tuple[float, float]:
    """Positions that decoding rows read, and pairs that chunks score, summed over layers."""
    decoding = counts == 1
    contexts, chunks, cached = before[decoding] + 1, counts[~decoding], before[~decoding]
    mean, reads, scores = cached + chunks / 2, 0.0, 0.0
    for window, layers in windows.items():
        reads += layers * float((contexts if window is None else np.minimum(contexts, window)).sum())
        scores += layers * float((chunks * (mean if window is None else np.minimum(mean, window))).sum())
    return reads, scores


def _curve(knots: FloatArray, tokens: float) -> FloatArray:
    """What each knot counts for at so many tokens; beyond the last, the last piece goes on."""
    at = int(np.clip(np.searchsorted(knots, tokens) - 1, 0, len(knots) - 2))
    share = max(0.0, (tokens - knots[at]) / (knots[at + 1] - knots[at]))
    found = np.zeros(len(knots))
    found[at], found[at + 1] = 1 - share, share
    return found


def _spread(sizes: Sequence[int]) -> FloatArray:
    """Of sizes in ascending order those that are a quarter larger than the one before: closer ones tell noise."""
    kept: list[int] = []
    for size in sizes:
        if not kept or size >= 1.25 * kept[-1]:
            kept.append(size)
    return np.array(kept, np.float64)


def _non_negative(features: FloatArray, wanted: FloatArray, knots: FloatArray) -> FloatArray:
    """Terms of the least squares; those that would be negative are left out, one after another, and are 0."""
    columns, kinks = len(features[0]), np.zeros((max(0, len(knots) - 2), len(features[0])))
    for at in range(len(kinks)):
        left, right = knots[at + 1] - knots[at], knots[at + 2] - knots[at + 1]
        kinks[at, at : at + 3] = np.array([right, -left - right, left]) / (left + right)
    scale = np.maximum(1e-12, np.abs(features).max(axis=0))
    kinks *= _SMOOTHNESS * scale[: len(knots)].mean()
    whole = np.concatenate((features, kinks)) / scale
    target = np.concatenate((wanted, np.zeros(len(kinks))))
    terms, used = np.zeros(columns), list(range(columns))
    while used:
        found = np.linalg.lstsq(whole[:, used], target, rcond=None)[0]
        worst = int(np.argmin(found))
        if found[worst] >= 0:
            terms[used] = found
            break
        del used[worst]
    return terms / scale
