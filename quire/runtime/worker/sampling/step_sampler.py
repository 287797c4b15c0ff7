"""The end of a step: a token for each sampled position, on its way to the host with what is reported of it.

What tokens need beyond their slots' sampling parameters decides when they are sampled: most by the recorded step
itself, the *late* ones behind it, and of these the masked ones only when their bitmasks are there. Knows nothing about
models: it is given logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.foundation.messages.workers import Result, TokenBitmasks, TokenLogprobs
from quire.runtime.worker.buffer_ring import BufferRing
from quire.runtime.worker.sampling.logprobs import LogprobsMode
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
from quire.runtime.worker.step import Step
from quire.runtime.worker.step_handle import MaskedStepHandle, StepHandle

Errors = Callable[[npt.NDArray[np.int8]], Mapping[int, str]]
"""Finds from the faults of all sampled positions which positions failed, and why."""


class LateColumns(NamedTuple):
    """The positions of a step that are sampled late, on the device; all int64.

    Attributes:
        positions: [late], `Step.late`.
        slots: [late], their slots.
        masked: [masked], `Step.masked`.
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

    def begin(self, step: Step) -> None:
        """Decide which positions of the step are sampled late, and what is reported of its tokens."""
        slots, masked = step.slots, step.host.masked
        step.logprobs = self._slots.host.logprobs_request(slots, self._mode) or None
        unmasked = np.delete(slots, masked) if len(masked) else slots
        if step.keeps_scores or self._slots.transforms.any_active(unmasked):
            step.late, step.masked = np.arange(len(slots)), masked
        elif len(masked):
            step.late, step.masked = masked, np.arange(len(masked))

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

    def end(self, step: Step, logits: Tensor, sample_all: Callable[[], None]) -> StepHandle:
        """Sample what the step has not sampled itself, and launch the reports; the handle has the step's result.

        Args:
            step: What `begin` was told.
            logits: [sampled, vocab], or more with padding; may be changed.
            sample_all: Samples all positions of a step that `stops_at_logits`, from the same logits.
        """
        if step.stops_at_logits:
            return self._sample_masked(step, logits, sample_all)
        return self._sample_late(step, logits) if len(step.late) else self._finish(step, logits)

    def _finish(self, step: Step, logits: Tensor, errors: Errors = errors_of) -> StepHandle:
        """Launch the reports of what was sampled; the handle has the step's result.

        Args:
            step: The step.
            logits: [sampled, vocab], of which log probabilities are reported.
            errors: See Errors.
        """
        self._sampled(step.number)
        number, request = len(step.slots), step.logprobs
        reported = request.launch(logits, self.outputs.tokens[:number]) if request else None
        tokens, faults = self.outputs.on_host()

        def result(device_ms: float) -> Result:
            logprobs = [] if request is None or reported is None else request.collect(reported)
            prompts = step.prompts.collect() if step.prompts else []
            return _result(step.number, tokens[:number].tolist(), errors(faults[:number]), logprobs, prompts, device_ms)

        return step.timer.stop(result)

    def needs_bitmasks_only(self, step: Step) -> bool:
        """Whether positions are late for their bitmasks alone: with these applied to the logits, all can be sampled by
        their slots' parameters, and nobody reads the logits afterwards.
        """
        only_masked = 0 < len(step.masked) == len(step.late) and step.logprobs is None
        return only_masked and not self._slots.transforms.any_active(step.slots[step.late])

    def _sample_masked(self, step: Step, logits: Tensor, sample_all: Callable[[], None]) -> StepHandle:
        """Apply bitmasks once they are there, then sample all positions; where `needs_bitmasks_only`, on a CPU."""
        rows, masked = torch.from_numpy(step.late), set(step.late.tolist())

        def sample_then(masks: TokenBitmasks) -> StepHandle:
            _check(masks, step)
            with torch.inference_mode():
                self.bitmasks.apply(logits, rows, masks.bits)
                sample_all()
                return self._finish(step, logits, partial(errors_of, transformed=masked))

        return MaskedStepHandle(sample_then, step.timer.wait)

    def _sample_late(self, step: Step, logits: Tensor) -> StepHandle:
        """Sample the late positions: now, or when their bitmasks are there. Then as `_finish`. The logits are changed
        unless log probabilities are reported of them."""
        assert step.late_columns is not None
        sizes = [len(step.late), len(step.late), len(step.masked)]
        late = LateColumns(*torch.split(to_device_memory(step.late_columns), sizes))
        logits = logits[: len(step.slots)]
        own = logits if step.all_late else logits.index_select(0, late.positions)
        if not len(step.masked):
            return self._finish_late(step, logits, own, late)
        own = own.clone() if step.all_late and step.logprobs else own

        def sample_masked(masks: TokenBitmasks) -> StepHandle:
            _check(masks, step)
            with torch.inference_mode():
                self.bitmasks.apply(own, late.masked, masks.bits)
                return self._finish_late(step, logits, own, late)

        return MaskedStepHandle(sample_masked, step.timer.wait)

    def _finish_late(self, step: Step, logits: Tensor, own: Tensor, late: LateColumns) -> StepHandle:
        """`own`: [late, vocab], of `logits`, less what bitmasks forbid."""
        slots = step.slots[step.late]
        if step.keeps_scores or self._slots.transforms.any_active(slots):
            sampled = sample(own, slots, self._slots, keep_scores=step.keeps_scores, device_slots=late.slots)
            self._slots.last_token.index_copy_(0, late.slots, sampled.tokens)
            self._slots.num_sampled.index_add_(0, late.slots, torch.ones_like(late.slots))
            self._copy_to_outputs(late, sampled)
        else:
            sampled = self._sample_plain(step, own, late)
        self.outputs.send()
        scores = logits if sampled.scores is None else sampled.scores  # of all positions, where they are kept
        return self._finish(step, scores, partial(_late_errors, step, sampled))

    def _sample_plain(self, step: Step, own: Tensor, late: LateColumns) -> Sampled:
        """Sample late positions by the slots' parameters alone; with few calls, since on a CPU a step has to wait for
        each."""
        number = len(own)
        if step.all_late:
            sampled = Sampled(self.outputs.tokens[:number], self.outputs.faults[:number], {}, None)
        else:
            sampled = Sampled(torch.empty_like(late.slots), torch.empty_like(late.slots, dtype=torch.int8), {}, None)
        sample_and_advance(own, late.slots, self._slots, sampled.tokens, sampled.faults)
        if not step.all_late:
            self._copy_to_outputs(late, sampled)
        return sampled

    def _copy_to_outputs(self, late: LateColumns, sampled: Sampled) -> None:
        self.outputs.tokens.index_copy_(0, late.positions, sampled.tokens)
        self.outputs.faults.index_copy_(0, late.positions, sampled.faults)


def _check(masks: TokenBitmasks, step: Step) -> None:
    assert masks.step == step.number, f"bitmasks of step {masks.step}, expected those of {step.number}"
    assert len(masks.bits) == len(step.masked), "bitmasks of other rows than those that wait"


def _late_errors(step: Step, sampled: Sampled, faults: npt.NDArray[np.int8]) -> Mapping[int, str]:
    """Which of all positions failed in a step whose late positions are `sampled`, and why."""
    if not sampled.broken and not faults.any():
        return {}
    late = step.late.tolist()
    changed = {late[place] for place in (*sampled.transformed, *step.masked.tolist())}
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
