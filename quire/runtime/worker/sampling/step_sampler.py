"""The end of a step: a token for each sampled position, on its way to the host with what is reported of it.

What tokens need beyond their slots' sampling parameters decides when they are sampled: most by the recorded step
itself, the *late* ones behind it, and of these the masked ones only when their bitmasks are there. Knows nothing about
models: it is given logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.compute.attention.metadata import IntArray
from quire.foundation.messages.workers import Result, TokenBitmasks, TokenLogprobs
from quire.runtime.worker.buffer_ring import BufferRing
from quire.runtime.worker.sampling.logprobs import LogprobsMode, LogprobsRequest
from quire.runtime.worker.sampling.prompt_logprobs import NO_PROMPT_LOGPROBS, StepPromptLogprobs
from quire.runtime.worker.sampling.sampled_outputs import SampledOutputs
from quire.runtime.worker.sampling.sampler import (
    REFUSALS,
    Deferred,
    Sampled,
    errors_of,
    sample,
    sample_and_advance,
    warm_up,
)
from quire.runtime.worker.sampling.token_bitmasks import BitmaskBuffer
from quire.runtime.worker.slot_table import SlotTable
from quire.runtime.worker.staging_buffer import to_device_memory
from quire.runtime.worker.step_handle import MaskedStepHandle, StepHandle, StepTimer

Errors = Callable[[npt.NDArray[np.int8]], Mapping[int, str]]
"""Finds from the faults of all sampled positions which positions failed, and why."""


@dataclass(frozen=True)
class StepSampling:
    """What one step samples and reports.

    Attributes:
        step: Its number.
        slots: [sampled], the slot of each sampled position.
        logprobs: Log probabilities that are reported.
        late: [late], positions that are sampled behind the recorded step: those that are masked; or all, where a
            position that is not masked has logits transforms, or the scores are reported that tokens are sampled from.
        masked: [masked], which of `late` wait for their bitmasks.
        timer: Of the step.
    """

    step: int
    slots: IntArray
    logprobs: LogprobsRequest
    late: IntArray
    masked: IntArray
    timer: StepTimer

    @property
    def keeps_scores(self) -> bool:
        """Whether log probabilities are reported of the scores that tokens were sampled from."""
        return bool(self.logprobs) and self.logprobs.processed

    @property
    def all_late(self) -> bool:
        """Whether the recorded step samples nothing."""
        return len(self.late) == len(self.slots)

    def columns(self) -> IntArray | None:
        """What the device needs for the late positions; see LateColumns. None: there are none."""
        if not len(self.late):
            return None
        return np.concatenate((self.late, self.slots[self.late], self.masked))


class LateColumns(NamedTuple):
    """The positions of a step that are sampled late, on the device; all int64.

    Attributes:
        positions: [late], StepSampling.late.
        slots: [late], theirs.
        masked: [masked], StepSampling.masked.
    """

    positions: Tensor
    slots: Tensor
    masked: Tensor


class StepSampler:
    """Samples tokens for the slots of a table.

    Args:
        slots: The table.
        most: Sampled positions of a step, at most.
        mode: What is reported.
        ring: Of the steps' buffers.
        max_masked: Positions of a step that may have bitmasks; None: as many as `most`.
        sampled: Called with the number of each step once all that samples its tokens is launched, and with 0 at the
            start.
        rows: Of a step, of which a number each is reported as well, at most.

    Attributes:
        bitmasks: Of the step whose masked positions are sampled.
        outputs: Where sampling leaves tokens and faults.
    """

    def __init__(
        self,
        slots: SlotTable,
        most: int,
        mode: LogprobsMode,
        ring: BufferRing,
        max_masked: int | None = None,
        sampled: Callable[[int], None] = lambda step: None,
        rows: int = 0,
    ) -> None:
        self._slots = slots
        self._mode: LogprobsMode = mode
        self._sampled = sampled
        self.outputs = SampledOutputs(most + rows, ring)
        self.bitmasks = BitmaskBuffer(max_masked or most, slots.vocab_size, slots.device)

    def warm_up(self, logits: Tensor, deferred: Deferred, max_logprobs: int) -> None:
        """Run all that may sample from such logits (see `sampler.warm_up`), and the copy to the host."""
        warm_up(logits, self._slots, self._mode, deferred, max_logprobs)
        with deferred():
            self.bitmasks.warm_up(logits)
        self.outputs.send()
        self._sampled(0)

    def begin(self, step: int, slots: IntArray, masked: IntArray, timer: StepTimer) -> StepSampling:
        """What the step samples for these slots, [sampled]; `masked` are positions that wait for their bitmasks."""
        logprobs = self._slots.host.logprobs_request(slots, self._mode)
        unmasked = np.delete(slots, masked) if len(masked) else slots
        if (logprobs and logprobs.processed) or self._slots.transforms.any_active(unmasked):
            return StepSampling(step, slots, logprobs, np.arange(len(slots)), masked, timer)
        return StepSampling(step, slots, logprobs, masked, np.arange(len(masked)), timer)

    def sample(self, logits: Tensor, slots: Tensor) -> None:
        """Sample by the slots' parameters alone; each slot keeps its token as the next step's input.

        Nothing is decided on the host, so a graph can capture this.

        Args:
            logits: [sampled, vocab].
            slots: [sampled] int64.
        """
        number = len(logits)
        sample_and_advance(logits, slots, self._slots, self.outputs.tokens[:number], self.outputs.faults[:number])
        self.outputs.send()

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
        self._sampled(sampling.step)
        number = len(sampling.slots)
        request = sampling.logprobs
        reported = request.launch(logits, self.outputs.tokens[:number]) if request else None
        tokens, faults = self.outputs.on_host()

        def result(device_ms: float) -> Result:
            logprobs = [] if reported is None else request.collect(reported)
            failed = errors(faults[:number])
            return _result(sampling.step, tokens[:number].tolist(), failed, logprobs, prompts.collect(), device_ms)

        return sampling.timer.stop(result)

    def needs_bitmasks_only(self, sampling: StepSampling) -> bool:
        """Whether positions are late for their bitmasks alone: with these applied to the logits, all can be sampled by
        their slots' parameters, and nobody reads the logits afterwards.
        """
        late = sampling.slots[sampling.late]
        only_masked = 0 < len(sampling.masked) == len(late) and not sampling.logprobs
        return only_masked and not self._slots.transforms.any_active(late)

    def sample_masked(self, sampling: StepSampling, logits: Tensor, sample_all: Callable[[], None]) -> StepHandle:
        """Apply bitmasks once they are there, then sample all positions; where `needs_bitmasks_only`, on a CPU.

        Args:
            sampling: What `begin` said.
            logits: [sampled, vocab]; changed.
            sample_all: As `sample`, from the same logits.
        """
        rows, masked = torch.from_numpy(sampling.late), set(sampling.late.tolist())

        def sample_then(masks: TokenBitmasks) -> StepHandle:
            _check(masks, sampling)
            with torch.inference_mode():
                self.bitmasks.apply(logits, rows, masks.bits)
                sample_all()
                return self.finish(sampling, logits, NO_PROMPT_LOGPROBS, partial(errors_of, transformed=masked))

        return MaskedStepHandle(sample_then, sampling.timer.wait)

    def sample_late(
        self, sampling: StepSampling, logits: Tensor, columns: Tensor, prompts: StepPromptLogprobs
    ) -> StepHandle:
        """Sample the late positions: now, or when their bitmasks are there. Then as `finish`.

        Args:
            sampling: What `begin` said.
            logits: [sampled, vocab]; changed unless log probabilities are reported of them.
            columns: `sampling.columns()` as the device reads them.
            prompts: The step's log probabilities of prompts.
        """
        sizes = [len(sampling.late), len(sampling.late), len(sampling.masked)]
        late = LateColumns(*torch.split(to_device_memory(columns), sizes))
        own = logits if sampling.all_late else logits.index_select(0, late.positions)
        if not len(sampling.masked):
            return self._finish_late(sampling, logits, own, late, prompts)
        own = own.clone() if sampling.all_late and sampling.logprobs else own

        def sample_masked(masks: TokenBitmasks) -> StepHandle:
            _check(masks, sampling)
            with torch.inference_mode():
                self.bitmasks.apply(own, late.masked, masks.bits)
                return self._finish_late(sampling, logits, own, late, prompts)

        return MaskedStepHandle(sample_masked, sampling.timer.wait)

    def _finish_late(
        self, sampling: StepSampling, logits: Tensor, own: Tensor, late: LateColumns, prompts: StepPromptLogprobs
    ) -> StepHandle:
        """`own`: [late, vocab], of `logits`, less what bitmasks forbid."""
        slots = sampling.slots[sampling.late]
        if sampling.keeps_scores or self._slots.transforms.any_active(slots):
            sampled = sample(own, slots, self._slots, keep_scores=sampling.keeps_scores, device_slots=late.slots)
            self._slots.last_token.index_copy_(0, late.slots, sampled.tokens)
            self._slots.num_sampled.index_add_(0, late.slots, torch.ones_like(late.slots))
            self._copy_to_outputs(late, sampled)
        else:
            sampled = self._sample_plain(sampling, own, late)
        self.outputs.send()
        scores = logits if sampled.scores is None else sampled.scores  # of all positions, where they are kept
        return self.finish(sampling, scores, prompts, partial(_late_errors, sampling, sampled))

    def _sample_plain(self, sampling: StepSampling, own: Tensor, late: LateColumns) -> Sampled:
        """Sample late positions by the slots' parameters alone; with few calls, since on a CPU a step has to wait for
        each."""
        number = len(own)
        if sampling.all_late:
            sampled = Sampled(self.outputs.tokens[:number], self.outputs.faults[:number], {}, None)
        else:
            sampled = Sampled(torch.empty_like(late.slots), torch.empty_like(late.slots, dtype=torch.int8), {}, None)
        sample_and_advance(own, late.slots, self._slots, sampled.tokens, sampled.faults)
        if not sampling.all_late:
            self._copy_to_outputs(late, sampled)
        return sampled

    def _copy_to_outputs(self, late: LateColumns, sampled: Sampled) -> None:
        self.outputs.tokens.index_copy_(0, late.positions, sampled.tokens)
        self.outputs.faults.index_copy_(0, late.positions, sampled.faults)


def _check(masks: TokenBitmasks, sampling: StepSampling) -> None:
    assert masks.step == sampling.step, f"bitmasks of step {masks.step}, expected those of {sampling.step}"
    assert len(masks.bits) == len(sampling.masked), "bitmasks of other rows than those that wait"


def _late_errors(sampling: StepSampling, sampled: Sampled, faults: npt.NDArray[np.int8]) -> Mapping[int, str]:
    """Which of all positions failed in a step whose late positions are `sampled`, and why."""
    if not sampled.broken and not faults.any():
        return {}
    late = sampling.late.tolist()
    changed = {late[place] for place in (*sampled.transformed, *sampling.masked.tolist())}
    return errors_of(faults, {late[place]: text for place, text in sampled.broken.items()}, changed)


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
    refused = [place for place, text in errors.items() if text in REFUSALS]
    return Result(step, counts, tokens, logprobs, list(errors.items()), device_ms, prompt_logprobs, refused=refused)
