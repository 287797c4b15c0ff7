"""The end of a step in a pipeline stage that is not the last: there are no logits, and nothing is sampled here."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from quire.compute.attention.metadata import IntArray
from quire.foundation.messages.workers import Result
from quire.runtime.worker.buffer_ring import BufferRing
from quire.runtime.worker.sampling.logprobs import LogprobsMode, LogprobsRequest
from quire.runtime.worker.sampling.prompt_logprobs import StepPromptLogprobs
from quire.runtime.worker.sampling.sampled_outputs import SampledOutputs
from quire.runtime.worker.sampling.sampler import Deferred
from quire.runtime.worker.sampling.step_sampler import StepSampling
from quire.runtime.worker.sampling.token_bitmasks import BitmaskBuffer
from quire.runtime.worker.slot_table import SlotTable
from quire.runtime.worker.step_handle import StepHandle, StepTimer

_NONE = np.zeros(0, dtype=np.int64)


class NoSampler:
    """Has the methods of a StepSampler, and takes what stands for logits as it comes.

    Args:
        slots, mode, ring: See StepSampler.

    Attributes:
        bitmasks, outputs: See StepSampler; of one position, since nobody uses them.
    """

    def __init__(self, slots: SlotTable, mode: LogprobsMode, ring: BufferRing) -> None:
        self._mode: LogprobsMode = mode
        self.outputs = SampledOutputs(1, ring)
        self.bitmasks = BitmaskBuffer(1, slots.vocab_size, slots.device)

    def warm_up(self, logits: Tensor, deferred: Deferred, max_logprobs: int) -> None:
        """Do nothing: there is nothing to launch."""

    def begin(self, step: int, slots: IntArray, masked: IntArray, timer: StepTimer) -> StepSampling:
        assert not len(masked), "nothing is sampled here"
        return StepSampling(step, slots, LogprobsRequest(_NONE, {}, self._mode), _NONE, _NONE, timer)

    def sample(self, logits: Tensor, slots: Tensor) -> None:
        """Do nothing: the last stage samples."""

    def finish(self, sampling: StepSampling, logits: Tensor, prompts: StepPromptLogprobs) -> StepHandle:
        """Return a handle whose result says only that this stage is done."""
        return sampling.timer.stop(lambda ms: Result(sampling.step, [], [], device_ms=ms))

    def needs_bitmasks_only(self, sampling: StepSampling) -> bool:
        return False

    def sample_masked(self, sampling: StepSampling, logits: Tensor, sample_all: Callable[[], None]) -> StepHandle:
        raise AssertionError("nothing is sampled here")

    def sample_late(
        self, sampling: StepSampling, logits: Tensor, columns: Tensor, prompts: StepPromptLogprobs
    ) -> StepHandle:
        raise AssertionError("nothing is sampled here")
