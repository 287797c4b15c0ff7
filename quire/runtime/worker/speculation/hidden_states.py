"""The states that a draft head reads of its model: one vector per token, fused from some of the model's residual
streams.

States are stored like the KV cache, in blocks of the same ids. A step of the model writes the states of its tokens, and
they move with their block when it is shared, copied, swapped or found by its prefix. So the head can read any token
whose keys the model still has.

After the blocks each slot has one row, for the head's own state of its last token. It replaces the model's state when
the head continues after a draft (Li et al. 2025, arXiv:2503.01840, section 3.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.compute.collectives.delta import Stream
from quire.compute.kernels.dispatch import kernel
from quire.errors import ConfigError
from quire.foundation.config import Config
from quire.models.head_spec import HeadSpec
from quire.models.layers.factory import LayerFactory
from quire.models.layers.linear import Projection
from quire.models.lent import Lent
from quire.models.spec import ModelSpec, read_spec
from quire.models.weights.standard_names import FUSION
from quire.models.weights.tensor_options import TensorOptions
from quire.runtime.worker.batch import Batch
from quire.runtime.worker.host_memory import lazy_zeros
from quire.runtime.worker.kv_tensors import whole_group
from quire.runtime.worker.step import StepInputs
from quire.runtime.worker.weight_loading import load_fusion


class StateRows:
    """The tensor of states, with a row for each token of the KV blocks and a row for each slot.

    Attributes:
        rows: [(blocks + 1) · block_size + slots, width]: rows of blocks, first the dummy, then rows of slots.
        first_slot: The row of slot 0.
    """

    def __init__(self, blocks: int, block_size: int, slots: int, width: int, options: TensorOptions) -> None:
        self.block_size = block_size
        self.first_slot = (blocks + 1) * block_size
        self.rows = lazy_zeros((self.first_slot + slots, width), options.dtype, options.device)

    @property
    def blocks(self) -> Tensor:
        """The rows of blocks in the layout of block transfers, [1, blocks + 1, block_size, width]."""
        return self.rows[: self.first_slot].view(1, -1, self.block_size, self.rows.shape[1])

    @property
    def slots(self) -> Tensor:
        """The rows of slots, [slots, width]."""
        return self.rows[self.first_slot :]


class ModelStates:
    """A StreamReader of the model: fuses the streams of a step's tokens, and writes the states to their blocks.

    Args:
        sources: The layers whose input streams are fused.
        width, hidden: Widths of a stream and of a state.
        fuse: Projection from [tokens, sources · width] to [tokens, hidden]; None: states are those behind the model's
            last norm.
        group: The KV group whose blocks hold the states; it has no sliding window.

    Attributes:
        states: The rows that states are written to, set by `allocate`.
    """

    def __init__(
        self,
        sources: Sequence[int],
        width: int,
        hidden: int,
        fuse: Projection | None,
        group: int,
        options: TensorOptions,
    ) -> None:
        self._hidden = hidden
        self._columns = {
            source: [slice(at * width, (at + 1) * width) for at, own in enumerate(sources) if own == source]
            for source in sources
        }
        self._width = len(sources) * width
        self._fuse = fuse
        self._group = group
        self._options = options
        self._compute_slot_mapping = kernel("compute_slot_mapping", options.device.type)
        self._copy_stream = kernel("copy_stream", options.device.type)
        self._put_rows = kernel("put_rows", options.device.type)
        self._streams: Tensor
        self._places: Tensor
        self.states: StateRows

    def allocate(self, blocks: int, block_size: int, slots: int) -> None:
        """Allocate the rows that states are written to: for `blocks` KV blocks and the dummy, and for `slots`."""
        self.states = StateRows(blocks, block_size, slots, self._hidden, self._options)

    def begin(self, batch: Batch, inputs: StepInputs) -> None:
        """Find the rows for the states of the step's tokens, and allocate the buffer of streams to fuse."""
        rows, options = batch.rows, self._options
        self._places = torch.empty_like(rows.positions)
        table = rows.tables[self._group]
        self._compute_slot_mapping(table, rows.slot_of_token, rows.positions, self.states.block_size, self._places)
        if self._fuse is not None:
            self._streams = torch.empty((len(self._places), self._width), dtype=options.dtype, device=options.device)

    def read(self, number: int, stream: Stream) -> None:
        for columns in self._columns.get(number, ()):
            self._copy_stream(*stream.tensors(), self._streams[:, columns])

    def finish(self, hidden: Tensor) -> None:
        if self._fuse is None:
            self._put_rows(hidden, self._places, self.states.rows)
            return
        self._put_rows(self._fuse(self._streams), self._places, self.states.rows)
        del self._streams


def model_states(config: Config, spec: ModelSpec, options: TensorOptions) -> ModelStates | None:
    """Make the ModelStates for the configured draft head and load the weights of its fusion; returns None without a
    head.

    Raises:
        CheckpointError: The head's files are broken or do not fit.
    """
    speculation = config.speculation.speculation
    if speculation is None or speculation.method not in ("eagle3", "mtp"):
        return None
    if max(spec.block_entries, default=1) > 1:
        raise ConfigError(
            "A head that reads the model's states cannot follow a model whose layers cache different amounts: use "
            '--speculative-config with "method": "ngram" or "draft_model".',
            param="speculative_config",
        )
    if speculation.method == "mtp":
        return ModelStates((), 0, spec.hidden, None, whole_group(spec), options)
    head = read_spec(speculation.model)
    assert isinstance(head.head, HeadSpec), "a head was asked for"
    sources, width = head.head.sources_of(len(spec.layers)), head.head.target_hidden
    factory = LayerFactory(options, head.quantization)
    fuse = factory.column_parallel((FUSION,), (head.hidden,), len(sources) * width, bias=False)
    load_fusion(config.with_values(model=speculation.model), head, factory)
    return ModelStates(sources, width, head.hidden, fuse, whole_group(spec), options)


class HeadStates:
    """LentStates of a head's worker: finds the state that each token of a step is read with. The main model's worker,
    which owns `states`, must have the same slots."""

    def __init__(self, states: StateRows) -> None:
        device = states.rows.device.type
        self._states = states
        self._compute_slot_mapping = kernel("compute_slot_mapping", device)
        self._state_rows = kernel("state_rows", device)
        self._take_rows = kernel("take_rows", device)
        self._put_rows = kernel("put_rows", device)
        self._rows: Tensor
        self._sampled_slots: Tensor
        self._sampled: Tensor | None = None

    def begin(self, batch: Batch, inputs: StepInputs) -> None:
        """Find the states that the step's tokens are read with. A token that the plan does not name is a draft that its
        slot sampled, so it is read with the slot's row."""
        rows, states = batch.rows, self._states
        places, self._rows = torch.empty_like(rows.positions), torch.empty_like(rows.positions)
        self._compute_slot_mapping(rows.tables[0], rows.slot_of_token, rows.positions, states.block_size, places)
        self._state_rows(inputs.token_ids, places, rows.slot_of_token, states.first_slot, self._rows)
        self._sampled, self._sampled_slots = inputs.logits_indices, inputs.sampled_slots

    def take(self) -> Tensor:
        """Return the states [tokens, hidden] that the step's tokens are read with, as a copy."""
        taken = self._states.rows.new_empty((len(self._rows), self._states.rows.shape[1]))
        self._take_rows(self._states.rows, self._rows, taken)
        return taken

    def keep(self, states: Tensor) -> None:
        """Store the head's own states [tokens, hidden] of the step's sampled positions in the rows of their slots."""
        if self._sampled is not None:
            chosen = states.new_empty((len(self._sampled), states.shape[1]))
            self._take_rows(states, self._sampled, chosen)
            states = chosen
        self._put_rows(states, self._sampled_slots, self._states.slots)


StepStates = ModelStates | HeadStates
"""Is told of each step before its model runs."""


@dataclass(frozen=True)
class Loan(Lent):
    """What the worker of a draft head borrows from the worker of its model, and the head's spec."""

    states: HeadStates
    spec: ModelSpec
