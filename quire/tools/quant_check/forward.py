"""Hidden states of whole sequences, by the worker's own steps: several sequences in a step, a long one in chunks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.compute.attention.backend import AttentionBackend
from quire.foundation.clock import Clock
from quire.foundation.messages.workers import Admitted, Plan
from quire.models.layers.rotary import Positions
from quire.models.model import MediaVectors, Model
from quire.planning.auto_config import ResolvedConfig
from quire.planning.kv_cache_plan import NumBlocks
from quire.planning.step_limits import StepLimits
from quire.runtime.worker.slot_table import SlotTable
from quire.runtime.worker.worker import Worker
from quire.runtime.worker.worker_parts import LoadedModel
from quire.sampling_params import SamplingParams

TOKENS_A_STEP = 2048
MAX_ROWS = 64


class SequenceForward:
    """Runs sequences of these lengths in tokens through a model. `batches` tells which are computed together, in
    order."""

    def __init__(self, resolved: ResolvedConfig, lengths: Sequence[int], clock: Clock) -> None:
        self.batches = _batches(lengths)
        rows = max(len(batch) for batch in self.batches)
        most = max(sum(lengths[batch.start : batch.stop]) for batch in self.batches)
        config = resolved.config.with_values(
            max_num_seqs=rows, max_num_batched_tokens=min(most, TOKENS_A_STEP), max_model_len=max(lengths)
        )
        self._limits, self._step = StepLimits.of(config), 0
        self._block_size, self._groups = config.cache.block_size, len(resolved.spec.kv_groups())
        self._captured = _CapturedHidden()
        device = torch.device("cuda:0" if config.device.device == "cuda" else "cpu")
        blocks, entries = self._blocks(max(lengths)), resolved.spec.block_entries
        slots = SlotTable(rows, blocks, self._groups, resolved.spec.vocab_size, device, entries=entries)
        self._worker = Worker(config, clock)
        self._worker.set_threads()
        loaded = LoadedModel(resolved.spec, self._captured, slots, kernels_known=False, gemm_warmup=None)
        needed = max(sum(map(self._blocks, lengths[batch.start : batch.stop])) for batch in self.batches)
        self._has_states = bool(resolved.spec.state_layers)
        self._worker.allocate(loaded, NumBlocks(needed * self._groups, 0, rows if self._has_states else 0))

    def hidden(self, model: Model, sequences: Sequence[list[int]]) -> list[Tensor]:
        """The hidden states [tokens, hidden] of each sequence of a batch, on the device."""
        self._captured.model = model
        done, parts = [0] * len(sequences), []
        while done[0] < len(sequences[0]):
            plan = self._plan(sequences, done)
            self._worker.execute(plan)
            parts.append(self._captured.hidden_states[: sum(plan.counts)])
            done = [begun + count for begun, count in zip(done, plan.counts, strict=True)]
        return list(torch.split(torch.cat(parts), [len(tokens) for tokens in sequences]))

    def close(self) -> None:
        self._worker.close()

    def _blocks(self, length: int) -> int:
        return -(-length // self._block_size)

    def _plan(self, sequences: Sequence[list[int]], done: Sequence[int]) -> Plan:
        """The step that computes the next chunk of each sequence; the first step begins sequence n in slot n."""
        self._step += 1
        chunks = [tokens[at : at + self._limits.tokens] for tokens, at in zip(sequences, done, strict=True)]
        begins = not done[0]
        table = self._block_tables(sequences) if begins else []
        return Plan(
            step=self._step,
            admitted=self._owners(sequences) if begins else [],
            state_loads=[(0, 1 + slot) for slot in range(len(sequences))] if begins and self._has_states else [],
            block_slots=[slot for slot, _, _ in table],
            block_groups=[group for _, group, _ in table],
            block_indices=[index for _, _, index in table],
            block_ids=list(range(1, len(table) + 1)),  # 0 is the dummy
            slots=list(range(len(sequences))),
            counts=[len(chunk) for chunk in chunks],
            token_rows=list(range(len(sequences))),
            tokens=[token for chunk in chunks for token in chunk],
        )

    def _owners(self, sequences: Sequence[list[int]]) -> list[Admitted]:
        """The owners of slots, each with the state behind its slot's number."""
        return [
            Admitted(
                slot, 0, 0, 0, SamplingParams(max_tokens=1), prompt_len=len(tokens), rope_length=len(tokens),
                state=1 + slot if self._has_states else 0,
            )
            for slot, tokens in enumerate(sequences)
        ]  # fmt: skip

    def _block_tables(self, sequences: Sequence[list[int]]) -> list[tuple[int, int, int]]:
        """Slot, KV group and index of each block that the sequences need."""
        return [
            (slot, group, index)
            for slot, tokens in enumerate(sequences)
            for group in range(self._groups)
            for index in range(self._blocks(len(tokens)))
        ]


class _CapturedHidden:
    """A Model that keeps the hidden states of the last step."""

    model: Model
    hidden_states: Tensor
    has_logits = True

    def hidden(
        self, tokens: Tensor, positions: Positions, attention: AttentionBackend, media: MediaVectors | None = None
    ) -> Tensor:
        self.hidden_states = self.model.hidden(tokens, positions, attention, media)
        return self.hidden_states

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)


def _batches(lengths: Sequence[int]) -> list[range]:
    """Neighbours that fit one step, from the first sequence on."""
    batches, start, total = [], 0, 0
    for number, length in enumerate(lengths):
        if number > start and (total + length > TOKENS_A_STEP or number - start == MAX_ROWS):
            batches.append(range(start, number))
            start, total = number, 0
        total += length
    return [*batches, range(start, len(lengths))]
