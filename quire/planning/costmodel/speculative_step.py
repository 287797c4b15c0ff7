"""How long steps with drafts take, and what they bring: the terms of `step_time.py`, put together for speculation.

A step of b rows with k drafts each is k passes of the draft model over b rows, one behind another, then a step of the
model over b · (1 + k) tokens, all of which are sampled. It brings b · (1 + a + a² + … + a^k) tokens where a draft is
accepted with probability a once those before it are (Leviathan, Kalman, Matias 2023, "Fast Inference from Transformers
via Speculative Decoding", section 3.1). Which k pays is decided by measured times, in
`runtime/worker/speculation/draft_lengths.py`; here times are predicted.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.planning.costmodel.step_time import StepTime


@dataclass(frozen=True)
class HostTimes:
    """The host's time for drafting, while the device waits.

    Attributes:
        ask_ms: Milliseconds of a step with drafts: taking the last result, finding what the draft model lacks,
            launching the model's step after the drafts.
        pass_ms: Milliseconds of a pass of the draft model, which takes at least as long.
    """

    ask_ms: float
    pass_ms: float


GPU_HOST = HostTimes(ask_ms=0.25, pass_ms=0.1)
"""Measured with Quill on an H100, whose steps take only the host's time: 0.25 ms without drafts, 0.9 ms with four."""
CPU_HOST = HostTimes(ask_ms=0.0, pass_ms=0.0)
"""On a CPU the host computes the step itself, so that the step's own terms include its time."""


class SpeculativeStepTime:
    """Predicts how long steps of a model with drafts take.

    Args:
        target: Predicts steps of the model.
        draft: Predicts steps of the draft model; None: drafts are looked up, which takes only the host's time.
        host: The host's times.
    """

    def __init__(self, target: StepTime, draft: StepTime | None, host: HostTimes) -> None:
        self._target, self._draft, self._host = target, draft, host

    def __call__(self, rows: int, context: float, drafts: int) -> float:
        """Return the milliseconds from one result to the next, for rows with `context` tokens and `drafts` drafts."""
        if not drafts:
            return self._target.decode(rows, context)
        drafting_ms = self.drafting_ms(rows, context, drafts)
        return self._host.ask_ms + drafting_ms + self.verification_ms(rows, context, drafts)

    def drafting_ms(self, rows: int, context: float, drafts: int) -> float:
        """Return the milliseconds of the draft model's passes."""
        if self._draft is None:
            return 0.0
        return drafts * max(self._host.pass_ms, self._draft.decode(rows, context))

    def verification_ms(self, rows: int, context: float, drafts: int) -> float:
        """Return the milliseconds of the model's own step."""
        return self._target.verification(rows, context, drafts)

    def tokens_per_s(self, rows: int, context: float, drafts: int, acceptance: float) -> float:
        """Return the tokens a second, if a draft is accepted with probability `acceptance` once those before it are."""
        return 1e3 * rows * tokens_of_a_row(drafts, acceptance) / self(rows, context, drafts)

    def best_drafts(self, rows: int, context: float, most: int, acceptance: float) -> int:
        """Return how many drafts, from 0 to `most`, bring the most tokens a second."""
        rates = [self.tokens_per_s(rows, context, drafts, acceptance) for drafts in range(most + 1)]
        return rates.index(max(rates))


def tokens_of_a_row(drafts: int, acceptance: float) -> float:
    """Return how many tokens a row with so many drafts brings in a step on average.

    A draft is accepted with probability `acceptance` once those before it are.
    """
    return sum(acceptance**place for place in range(drafts + 1))
