"""How long steps take on a machine where some were timed: the terms of a step, fitted to these.

A step's time is a curve over its tokens (products; straight between the numbers of tokens that were timed), plus so
much for each sampled row, each chunk, each position that decoding rows read, and each pair of positions that chunks
score. Where `step_time.py` derives such terms from a device's figures, here they are fitted: least squares of relative
errors, in which steps that stalled count less and less (Huber's weights). Knows nothing about how steps are timed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
import numpy.typing as npt

from quire.errors import ConfigError, reason
from quire.models.spec import ModelSpec
from quire.planning.costmodel.step_work import Attended, IntArray, Windows, attended, windows_of

FloatArray = npt.NDArray[np.float64]

_ROUNDS = 8
"""Rounds of reweighting; weights move by less than a percent after five."""
_HUBER = 1.5
"""Residuals beyond so many times the median one count less."""
_BINS = 4
"""Steps are alike if their attention differs by less than a fourth of a power of two."""
_LONGEST_STALL = 8.0
"""Stalls count up to this many times the usual time: longer ones are too rare to predict from a load of seconds."""
_FEWEST = 8
"""Terms cannot be told from fewer different steps than this."""


@dataclass(frozen=True)
class TimedStep:
    """A step that ran: the tokens of each row, those before them in its context, and how many rows sampled."""

    counts: tuple[int, ...]
    before: tuple[int, ...]
    sampled: int
    ms: float


class ServerTerms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Milliseconds that the HTTP API and its clients add, on the same processor: to a request there and back, to the
    next step for each request that came, to each step, and to a step for each of its streams."""

    request_ms: float
    arrival_ms: float
    step_ms: float
    row_ms: float


class StepTerms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fitted milliseconds.

    Attributes:
        points: (tokens of a step, milliseconds), ascending: the curve.
        row_ms: For each sampled row.
        chunk_ms: For each row with more than one token.
        read_ms: For each position that a decoding row reads, in all layers together.
        score_ms: For each pair of positions in a chunk's attention, in all layers together.
        error: Median relative error of the steps that the terms were fitted to.
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
        threads: The largest number of threads that computed.
        windows: (window or None, layers with it).
        steps: Terms of the engine alone.
        engine_request_ms: Milliseconds of a request to its engine and back, in one process.
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
        """Milliseconds from a request's arrival to its engine and back."""
        return self.engine_request_ms + server * self.server.request_ms

    def arrival_ms(self, *, server: bool) -> float:
        """Milliseconds that a request's arrival takes from the next step."""
        return self.server.arrival_ms if server else 0.0

    def step_time(self, *, server: bool) -> MeasuredStepTime:
        """Predicts steps, of a server or of an engine in its client's process."""
        added = (self.server.step_ms, self.server.row_ms) if server else (0.0, 0.0)
        return MeasuredStepTime(self.steps, dict(self.windows), added)

    def check(self, spec: ModelSpec, dtype: str, kv_dtype: str) -> None:
        """Raise a ConfigError unless these times are of this model."""
        own = (self.parameters, self.dtype, self.kv_dtype)
        if own != (spec.num_parameters, dtype, kv_dtype):
            raise ConfigError(
                f"These step times are of {self.model} ({self.parameters:,} parameters, {self.dtype}, KV cache of "
                f"{self.kv_dtype}), not of a model of {spec.num_parameters:,} parameters, {dtype}, KV cache of "
                f"{kv_dtype}: measure again with --calibrate.",
                param="step_times",
            )


class MeasuredStepTime:
    """Predicts steps. `added` is milliseconds on top of each step, and of each sampled row."""

    def __init__(self, terms: StepTerms, windows: Windows, added: tuple[float, float] = (0.0, 0.0)) -> None:
        self._terms, self._attention, self._added = terms, _by_layers(windows), added
        self._tokens = np.array([tokens for tokens, _ in terms.points], np.float64)
        self._ms = np.array([ms for _, ms in terms.points])

    def __call__(self, counts: IntArray, before: IntArray, sampled: int) -> float:
        """Milliseconds of a step; arguments as of StepTime."""
        reads, scores = attended(counts, before, self._attention)
        chunks = int((counts > 1).sum())
        terms, tokens = self._terms, float(counts.sum())
        ms = float(_curve(self._tokens, tokens) @ self._ms)
        ms += terms.row_ms * sampled + terms.chunk_ms * chunks + terms.read_ms * reads + terms.score_ms * scores
        return max(ms, float(self._ms[0])) + self._added[0] + self._added[1] * sampled

    def decode(self, rows: int, context: int) -> float:
        """Milliseconds of a step in which so many rows decode, with `context` tokens each."""
        return self(np.ones(rows, np.int64), np.full(rows, context, np.int64), rows)

    def prompt(self, tokens: int) -> float:
        """Milliseconds of a step that computes a prompt and samples its first token."""
        return self(np.array([tokens], np.int64), np.array([0], np.int64), 1)


def fitted(steps: Sequence[TimedStep], spec: ModelSpec) -> StepTerms:
    """Return the terms that explain these steps best. Raises ConfigError if the steps are too few, or all of one
    size."""
    attention = _by_layers(windows_of(spec))
    alike = _medians(steps, attention)
    knots = _knots([sum(step.counts) for step in alike])
    if len(alike) < _FEWEST or len(knots) < 2:
        raise ConfigError(
            f"{len(alike)} different steps are too few to fit a step's time to: raise --max-model-len or "
            "--max-num-batched-tokens.",
            param="calibrate",
        )
    features = np.array([_features(step, knots, attention) for step in alike])
    ms = np.array([step.ms for step in alike])
    weights = np.ones(len(alike))
    for _ in range(_ROUNDS):
        terms = non_negative(features / ms[:, None] * weights[:, None], weights)
        errors = np.abs(features @ terms / ms - 1)
        limit = _HUBER * max(1e-9, float(np.median(errors)))
        weights = np.sqrt(np.minimum(1.0, limit / np.maximum(errors, 1e-12)))
    curve = np.cumsum(terms[: len(knots)]).tolist()
    row, chunk, read, score = terms[len(knots) :].tolist()
    every = np.array([_features(step, knots, attention) for step in steps]) @ terms
    error = float(np.median(np.abs(every / np.array([step.ms for step in steps]) - 1)))
    return StepTerms(tuple(zip(knots, curve, strict=True)), row, chunk, read, score, error)


def as_long_as(terms: StepTerms, steps: Sequence[TimedStep], spec: ModelSpec) -> StepTerms:
    """These terms, scaled alike so that they sum up to what these steps took: terms are of the usual step, while a load
    also has stalls, which its requests wait out."""
    predict = MeasuredStepTime(terms, windows_of(spec))
    usual = [predict(np.array(step.counts), np.array(step.before), step.sampled) for step in steps]
    took = sum(min(step.ms, _LONGEST_STALL * ms) for step, ms in zip(steps, usual, strict=True))
    factor = took / sum(usual)
    curve = tuple((tokens, factor * ms) for tokens, ms in terms.points)
    row, chunk, read, score = (factor * ms for ms in (terms.row_ms, terms.chunk_ms, terms.read_ms, terms.score_ms))
    return StepTerms(curve, row, chunk, read, score, terms.error)


def read_step_times(path: str) -> MeasuredStepTimes:
    """The file that --calibrate has written. Raises ConfigError if it cannot be read, or holds something else."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=MeasuredStepTimes)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"--step-times {path} cannot be read: {reason(error)}. --calibrate writes such a file.", param="step_times"
        ) from error


def _by_layers(windows: Windows) -> list[Attended]:
    """Attention that counts by layers: terms are fitted to one model, whose layers are alike but for their windows."""
    return [Attended(window, layers, layers) for window, layers in windows.items()]


def _medians(steps: Sequence[TimedStep], attention: Sequence[Attended]) -> list[TimedStep]:
    """One step for all that do about the same work, with the median of their times, so that stalls do not count."""
    alike: dict[tuple[int, ...], list[TimedStep]] = {}
    for step in steps:
        reads, scores = attended(np.array(step.counts), np.array(step.before), attention)
        work = (round(math.log2(amount + 1) * _BINS) for amount in (reads, scores))
        alike.setdefault((sum(step.counts), len(step.counts), step.sampled, *work), []).append(step)
    return [replace(each[len(each) // 2], ms=median(step.ms for step in each)) for each in alike.values()]


def _features(step: TimedStep, knots: Sequence[int], attention: Sequence[Attended]) -> FloatArray:
    """What each term is multiplied with. The curve's features are its rises between knots, which are not negative."""
    counts, before = np.array(step.counts, np.int64), np.array(step.before, np.int64)
    reads, scores = attended(counts, before, attention)
    beside = (step.sampled, int((counts > 1).sum()), reads, scores)
    rises = np.cumsum(_curve(np.array(knots, np.float64), float(counts.sum()))[::-1])[::-1]
    return np.concatenate((rises, beside))


def _curve(knots: FloatArray, tokens: float) -> FloatArray:
    """How much each knot counts at so many tokens; beyond the last, the last piece goes on."""
    at = int(np.clip(np.searchsorted(knots, tokens) - 1, 0, len(knots) - 2))
    share = max(0.0, (tokens - knots[at]) / (knots[at + 1] - knots[at]))
    found = np.zeros(len(knots))
    found[at], found[at + 1] = 1 - share, share
    return found


def _knots(sizes: Sequence[int]) -> list[int]:
    """Powers of two among the sizes, and the largest size: closer ones would tell noise."""
    largest = max(sizes, default=0)
    return [2**power for power in range(max(0, largest - 1).bit_length()) if 2**power < 0.75 * largest] + [largest]


def non_negative(features: FloatArray, wanted: FloatArray) -> FloatArray:
    """Return the terms of the least squares for `features` [equations, terms] and `wanted` [equations]. Terms that
    would be negative are left out, one after another, and are 0."""
    scale = np.maximum(1e-12, np.abs(features).max(axis=0))
    terms, used = np.zeros(len(scale)), list(range(len(scale)))
    while used:
        found = np.linalg.lstsq(features[:, used] / scale[used], wanted, rcond=None)[0]
        worst = int(np.argmin(found))
        if found[worst] >= 0:
            terms[used] = found
            break
        del used[worst]
    return np.asarray(terms / scale)
