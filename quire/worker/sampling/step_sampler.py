"""The end of a step: a token for each sampled position, on its way to the host with what is reported of it.

Knows nothing about models: it is given logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.attention.metadata import IntArray
from quire.messages import Result, TokenLogprobs
from quire.worker.buffer_ring import BufferRing
from quire.worker.sampling.logprobs import LogprobsMode, LogprobsRequest
from quire.worker.sampling.prompt_logprobs import StepPromptLogprobs
from quire.worker.sampling.sampled_outputs import SampledOutputs
from quire.worker.sampling.sampler import Deferred, errors_of, sample, sample_and_advance, warm_up
from quire.worker.slot_table import SlotTable
from quire.worker.step_handle import StepHandle, StepTimer

Errors = Callable[[npt.NDArray[np.int8]], Mapping[int, str]]
"""From the faults of all sampled positions to those that failed, and why."""


@dataclass(frozen=True)
class StepSampling:
    """What one step samples and reports.

    Attributes:
        step: Its number.
        slots: [sampled], the slot of each sampled position.
        logprobs: Log probabilities that are reported.
        has_transforms: Whether any slot's logits are changed before sampling.
        timer: Of the step.
    """

    step: int
    slots: IntArray
    logprobs: LogprobsRequest
    has_transforms: bool
    timer: StepTimer

    @property
    def keeps_scores(self) -> bool:
        """Whether log probabilities are reported of the scores that tokens were sampled from."""
        return bool(self.logprobs) and self.logprobs.processed

    @property
    def by_graph(self) -> bool:
        """Whether a captured graph can do it: tokens depend on their slots' sampling parameters alone, and the scores
        that they were sampled from are not needed.
        """
        return not self.has_transforms and not self.keeps_scores


class StepSampler:
    """Samples tokens for the slots of a table.

    Args:
        slots: The table.
        most: Sampled positions of a step, at most.
        mode: What is reported.
        ring: Of the steps' buffers.
    """

    def __init__(self, slots: SlotTable, most: int, mode: LogprobsMode, ring: BufferRing) -> None:
        self._slots = slots
        self._mode: LogprobsMode = mode
        self._outputs = SampledOutputs(most, ring)

    def warm_up(self, logits: Tensor, deferred: Deferred, max_logprobs: int) -> None:
        """Run all that may sample from such logits (see `sampler.warm_up`), and the copy to the host."""
        warm_up(logits, self._slots, self._mode, deferred, max_logprobs)
        self._outputs.send()

    def begin(self, step: int, slots: IntArray, timer: StepTimer) -> StepSampling:
        """What the step samples for these slots, [sampled]."""
        logprobs = self._slots.host.logprobs_request(slots, self._mode)
        return StepSampling(step, slots, logprobs, bool(self._slots.transforms.active_rows(slots)), timer)

    def sample(self, logits: Tensor, slots: Tensor) -> None:
        """Sample by the slots' parameters alone; each slot keeps its token as the next step's input.

        Nothing is decided on the host, so a graph can capture this.

        Args:
            logits: [sampled, vocab].
            slots: [sampled] int64.
        """
        number = len(logits)
        sample_and_advance(logits, slots, self._slots, self._outputs.tokens[:number], self._outputs.faults[:number])
        self._outputs.send()

    def finish(
        self, sampling: StepSampling, logits: Tensor, prompts: StepPromptLogprobs, errors: Errors = errors_of
    ) -> StepHandle:
        """Launch the reports of what was sampled; the handle has the step's result.

        Args:
            sampling: What `begin` said.
            logits: [sampled, vocab], of which log probabilities are reported.
            prompts: The step's log probabilities of prompts.
            errors: See Errors.
        """
        number = len(sampling.slots)
        request = sampling.logprobs
        reported = request.launch(logits, self._outputs.tokens[:number]) if request else None
        tokens, faults = self._outputs.on_host()

        def result(device_ms: float) -> Result:
            logprobs = [] if reported is None else request.collect(reported)
            failed = errors(faults[:number])
            return _result(sampling.step, tokens[:number].tolist(), failed, logprobs, prompts.collect(), device_ms)

        return sampling.timer.stop(result)

    def sample_transformed(
        self, sampling: StepSampling, logits: Tensor, slots: Tensor, prompts: StepPromptLogprobs
    ) -> StepHandle:
        """Sample with logits transforms, or keep the scores that tokens were sampled from; then as `finish`."""
        sampled = sample(logits, sampling.slots, self._slots, keep_scores=sampling.keeps_scores, device_slots=slots)
        self._slots.last_token.index_copy_(0, slots, sampled.tokens)
        self._slots.num_sampled.index_add_(0, slots, torch.ones_like(slots))
        number = len(sampling.slots)
        self._outputs.tokens[:number].copy_(sampled.tokens)
        self._outputs.faults[:number].copy_(sampled.faults)
        self._outputs.send()
        return self.finish(sampling, logits if sampled.scores is None else sampled.scores, prompts, sampled.errors)


def _result(
    step: int,
    tokens: list[int],
    errors: Mapping[int, str],
    logprobs: list[TokenLogprobs | None],
    prompt_logprobs: list[list[TokenLogprobs]],
    device_ms: float,
) -> Result:
    """The step's columns. A sampled position that failed is an error, and gains no token."""
    counts = [1] * len(tokens)
    if errors:
        counts = [int(place not in errors) for place in range(len(tokens))]
        tokens = [token for place, token in enumerate(tokens) if place not in errors]
        logprobs = [entry for place, entry in enumerate(logprobs) if place not in errors]
    return Result(step, counts, tokens, logprobs, list(errors.items()), device_ms, prompt_logprobs)
