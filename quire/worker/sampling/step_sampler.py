"""The end of a step: a token for each read, and its way home with what is reported of it.

Knows nothing about models: it is given logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.messages import Result, TokenLogprobs
from quire.worker.buffer_ring import BufferRing
from quire.worker.sampling.logprobs import LogprobsMode, Reports
from quire.worker.sampling.prompt_logprobs import PromptScores
from quire.worker.sampling.sampled_outputs import SampledOutputs
from quire.worker.sampling.sampler import Deferred, Ints, draw_and_advance, errors_of, rehearse, sample
from quire.worker.slot_table import SlotTable
from quire.worker.step_handle import StepHandle, StepTimer

Errors = Callable[[npt.NDArray[np.int8]], Mapping[int, str]]
"""From the faults of all reads to those that failed, and why."""


@dataclass(frozen=True)
class Reads:
    """A step that draws tokens, and what is wanted beside them.

    Attributes:
        step: Its number.
        slots: Of each read.
        reports: Log probabilities that are wanted.
        have_rules: Whether any of the reads' logits are changed.
        timer: Over the step.
    """

    step: int
    slots: Ints
    reports: Reports
    have_rules: bool
    timer: StepTimer

    @property
    def see_scores(self) -> bool:
        """Whether what is reported is what tokens are drawn from."""
        return bool(self.reports) and self.reports.processed

    @property
    def are_plain(self) -> bool:
        """Whether tokens are drawn by their slots' parameters alone, and nobody wants to see from what."""
        return not self.have_rules and not self.see_scores


class StepSampler:
    """StepSampler tokens for the slots of a table.

    Args:
        slots: The table.
        reads: Most reads of a step.
        mode: What is reported.
        turns: Of the steps.
    """

    def __init__(self, slots: SlotTable, reads: int, mode: LogprobsMode, turns: BufferRing) -> None:
        self._slots = slots
        self._mode: LogprobsMode = mode
        self._drawn = SampledOutputs(reads, turns)

    def rehearse(self, logits: Tensor, deferred: Deferred, max_logprobs: int) -> None:
        """See the sampler's; and the way of what was drawn to the host."""
        rehearse(logits, self._slots, self._mode, deferred, max_logprobs)
        self._drawn.send()

    def reads_of(self, step: int, sampled_slots: Ints, timer: StepTimer) -> Reads:
        """What this step's reads of these slots ask for."""
        reports = self._slots.host.reports(sampled_slots, self._mode)
        return Reads(step, sampled_slots, reports, bool(self._slots.rules.asking(sampled_slots)), timer)

    def plainly(self, logits: Tensor, where: Tensor) -> None:
        """Draw a token for each read by its slot's parameters alone; its slot keeps it as the next step's input.

        Args:
            logits: [reads, vocab].
            where: [reads], their slots.
        """
        reads = logits.shape[0]
        draw_and_advance(logits, where, self._slots, self._drawn.tokens[:reads], self._drawn.faults[:reads])
        self._drawn.send()

    def as_asked(self, reads: Reads, logits: Tensor, where: Tensor, of_prompts: PromptScores) -> StepHandle:
        """The same by rules, or with the scores that tokens were drawn from; then as `brought`."""
        drawn = sample(logits, reads.slots, self._slots, keep_scores=reads.see_scores, where=where)
        self._slots.last.index_copy_(0, where, drawn.tokens)
        self._slots.drawn.index_add_(0, where, torch.ones_like(where))
        number = len(reads.slots)
        self._drawn.tokens[:number].copy_(drawn.tokens)
        self._drawn.faults[:number].copy_(drawn.faults)
        self._drawn.send()
        return self.brought(reads, logits if drawn.scores is None else drawn.scores, of_prompts, drawn.errors)

    def brought(self, reads: Reads, seen: Tensor, of_prompts: PromptScores, errors: Errors = errors_of) -> StepHandle:
        """What was drawn, once it is on the host, and what is reported of it by the logits that are to be seen."""
        reports, number = reads.reports, len(reads.slots)
        reported = reports.launch(seen, self._drawn.tokens[:number]) if reports else None
        tokens, faults = self._drawn.on_host()

        def finish(device_ms: float) -> Result:
            logprobs = [] if reported is None else reports.collect(reported)
            failed, prompts = errors(faults[:number]), of_prompts.collect()
            return _result(reads.step, tokens[:number].tolist(), failed, logprobs, prompts, device_ms)

        return reads.timer.stop(finish)


def _result(
    step: int,
    tokens: list[int],
    errors: Mapping[int, str],
    logprobs: list[TokenLogprobs | None],
    of_prompts: list[list[TokenLogprobs]],
    device_ms: float,
) -> Result:
    """The step's columns; reads that failed are errors and gain nothing."""
    counts = [1] * len(tokens)
    if errors:
        good = [read for read in range(len(tokens)) if read not in errors]
        counts = [int(read not in errors) for read in range(len(tokens))]
        tokens = [tokens[read] for read in good]
        logprobs = [logprobs[read] for read in good] if logprobs else []
    return Result(step, counts, tokens, logprobs, list(errors.items()), device_ms, of_prompts)
