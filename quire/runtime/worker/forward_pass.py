"""The middle of a step: from what was staged to hidden states, and logits of sampled positions."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.compute.attention.backend import AttentionBackend
from quire.compute.kernels.dispatch import kernel
from quire.foundation.messages.workers import Plan
from quire.models.model import Model
from quire.runtime.worker.adapter_rows import AdapterRows
from quire.runtime.worker.batch import Batch, BatchBuffers
from quire.runtime.worker.host_batch import HostBatch
from quire.runtime.worker.sampling.prompt_logprobs import PromptLogprobs, StepPromptLogprobs
from quire.runtime.worker.speculation.hidden_states import StepStates
from quire.runtime.worker.stage_steps import StageSteps
from quire.runtime.worker.staging_buffer import StagingBuffer
from quire.runtime.worker.step_inputs import StepInputs


class ForwardPass:
    """Runs a model on staged steps.

    Args:
        device: Where they run.
        model: With its weights.
        attention: Over the KV cache.
        staging: Where steps are staged.
        batches: Makes the model's inputs.
        prompt_logprobs: Of the model.
        adapters: Of rows; None: there are none.
        states: Is told of each step before its model runs; None: nobody is.
        stages: What other stages of a pipeline are told.
    """

    def __init__(
        self,
        device: torch.device,
        model: Model,
        attention: AttentionBackend,
        staging: StagingBuffer,
        batches: BatchBuffers,
        prompt_logprobs: PromptLogprobs,
        adapters: AdapterRows | None,
        states: StepStates | None,
        stages: StageSteps,
    ) -> None:
        self._model = model
        self._attention = attention
        self._staging = staging
        self._batches = batches
        self._prompt_logprobs = prompt_logprobs
        self._adapters = adapters
        self._states = states
        self._stages = stages
        self._take_rows = kernel("take_rows", device.type)

    def batch_and_hidden(self, host: HostBatch, inputs: StepInputs) -> tuple[Batch, Tensor]:
        """The step's batch and its hidden states, [tokens, hidden]."""
        self._staging.copy_to_device()
        batch = self._batches.prepare(host, inputs)
        self._attention.prepare(batch.rows)
        if self._adapters is not None:
            self._adapters.begin(inputs.tiles, inputs.expert_slots)
        if self._states is not None:
            self._states.begin(batch, inputs)
        self._stages.begin(inputs.stage_step)
        return batch, self._model.hidden(batch.tokens, batch.positions, self._attention)

    def run(self, plan: Plan, host: HostBatch, inputs: StepInputs) -> tuple[Tensor, StepPromptLogprobs]:
        """The hidden states, [tokens, hidden], and the log probabilities of the plan's prompts."""
        batch, hidden = self.batch_and_hidden(host, inputs)
        return hidden, self._prompt_logprobs.launch(plan, host, batch, hidden)

    def logits(self, hidden: Tensor, inputs: StepInputs) -> Tensor:
        """The logits [sampled, vocab] of the step's sampled positions."""
        if (at := inputs.logits_indices) is None:
            return self._model.logits(hidden)
        chosen = hidden.new_empty((len(at), hidden.shape[1]))
        self._take_rows(hidden, at, chosen)
        return self._model.logits(chosen)
