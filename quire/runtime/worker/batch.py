"""A step's input on the device: the positions and tokens of its rows, computed from the slot table."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from quire.compute.attention.backend import StepRows
from quire.compute.kernels.dispatch import kernel
from quire.models.layers.rotary import Positions
from quire.runtime.worker.graph_shapes import MAX_SHORT_TOKENS
from quire.runtime.worker.host_batch import HostBatch
from quire.runtime.worker.slot_table import SlotTable
from quire.runtime.worker.speculation.draft_steps import DeviceTokens
from quire.runtime.worker.step import StepInputs


@dataclass(frozen=True)
class Batch:
    """One step's input on the device: rows for attention, positions for rotary embeddings, and token ids [tokens]
    int64."""

    rows: StepRows
    positions: Positions
    tokens: Tensor


class BatchBuffers:
    """Builds a step's batch in persistent buffers, and advances the slots' lengths. `by_length` says whether the
    model's rope depends on a sequence's length, and `shifts` whether images shift positions. Without `device_tokens`,
    rows read only the token that their slot sampled last."""

    def __init__(
        self,
        slots: SlotTable,
        max_rows: int,
        step_tokens: int,
        by_length: bool = False,
        device_tokens: DeviceTokens | None = None,
        *,
        shifts: bool = False,
    ) -> None:
        self._table = slots
        self._device_tokens = device_tokens
        self._by_length = by_length or shifts
        self._prepare_inputs = kernel("prepare_inputs", slots.device.type)
        self._sequence_lengths = kernel("shifted_positions" if shifts else "sequence_lengths", slots.device.type)
        tokens = max(max_rows, step_tokens)
        self._tokens, self._positions, self._slot_of_token = torch.zeros(
            (3, tokens), dtype=torch.int64, device=slots.device
        ).unbind()
        self._starts = torch.zeros(max_rows, dtype=torch.int64, device=slots.device)
        self._ones = torch.ones(MAX_SHORT_TOKENS, dtype=torch.int64, device=slots.device)

    def prepare(self, host: HostBatch, inputs: StepInputs) -> Batch:
        """Build the batch of a step whose slot updates are applied."""
        table, rows, total = self._table, len(host.slots), len(host.token_ids)
        starts, positions = self._starts[:rows], self._positions[:total]
        slot_of_token, tokens = self._slot_of_token[:total], self._tokens[:total]
        device_tokens = None if host.is_decode else self._device_tokens  # a row of one token goes on with its last one
        if device_tokens is not None:
            device_tokens.begin(inputs)
        self._prepare_inputs(
            inputs.slots,
            inputs.counts,
            inputs.row_of_token,
            inputs.offsets,
            inputs.token_ids,
            table.length,
            table.last_token,
            table.dummy,
            starts,
            positions,
            slot_of_token,
            tokens,
        )
        if device_tokens is not None:
            device_tokens.look_up(inputs.token_ids, slot_of_token, tokens)
        lengths = None
        if self._by_length:
            lengths = torch.empty_like(positions)
            self._sequence_lengths(table.rope_length, slot_of_token, positions, lengths)
        rows_on_device = StepRows(
            counts=host.counts,
            row_of_token=host.row_of_token,
            bounds=host.max_lengths,
            slot_of_token=slot_of_token,
            starts=starts,
            positions=positions,
            slots=inputs.slots,
            tables=table.tables,
            metadata=inputs.attention,
            device_counts=inputs.counts,
        )
        if host.is_short:
            rows_on_device = self._by_token(rows_on_device)
        return Batch(rows_on_device, Positions(positions, lengths), tokens)

    def _by_token(self, rows: StepRows) -> StepRows:
        """Return the rows with each token as a row of its own, which attends to the tokens before it: their keys are
        written first."""
        places = np.arange(len(rows.row_of_token))
        return replace(
            rows,
            counts=np.ones_like(places),
            row_of_token=places,
            bounds=np.zeros_like(places),
            starts=rows.positions,
            slots=rows.slot_of_token,
            device_counts=self._ones[: len(places)],
        )
