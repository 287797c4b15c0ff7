"""The states of sequences on the device, in models whose layers keep one a sequence, and copies of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from quire.compute.attention.sequence_states import SequenceStates
from quire.errors import MemoryBudgetError
from quire.models.spec import ModelSpec
from quire.planning.footprint import format_bytes
from quire.runtime.worker.host_memory import lazy_zeros, upload

_FRESH = 0
"""The source of a state of no tokens. The dummy is not read for it, since rows of padding write there."""

Copies = Sequence[tuple[int, int]]
"""(from, to): states that are copied."""


class StateTensors:
    """The tensors of all states, by layer: [num_states + 1 + scratch, *shape] each, zeroed. State 0 is the dummy.

    Args:
        spec: This rank's share of the model.
        dtype: The model's.
        scratch: How many states there are besides, on which rows with drafts run, one a slot.

    Attributes:
        by_layer: The states as layers see them.
        first_scratch: The scratch state of slot 0.

    Raises:
        MemoryBudgetError: There is not enough memory.
    """

    def __init__(
        self, spec: ModelSpec, num_states: int, dtype: torch.dtype, device: torch.device, scratch: int = 0
    ) -> None:
        number = num_states + 1 + scratch
        try:
            tensors = {layer: _zeros(spec, layer, number, dtype, device) for layer in spec.state_layers}
        except (RuntimeError, MemoryError) as error:
            size = format_bytes(number * spec.state_bytes(str(dtype).removeprefix("torch.")))
            raise MemoryBudgetError(
                f"{num_states} states take {size}, which this machine cannot give: lower --max-num-seqs, "
                "--mamba-cache-share or --num-states-override."
            ) from error
        self.by_layer = SequenceStates(tensors)
        self.first_scratch = num_states + 1
        self._tensors = list(chain.from_iterable(tensors.values()))
        self._device = device

    def load(self, copies: Copies) -> None:
        """Copy states one after the other, before a step's rows move; a source of 0 makes zeros."""
        for part in _independent(copies):
            fresh = [target for source, target in part if source == _FRESH]
            if fresh:
                targets = upload(fresh, self._device)
                for tensor in self._tensors:
                    tensor.index_fill_(0, targets, 0)
            self.save([pair for pair in part if pair[0] != _FRESH])

    def save(self, copies: Copies) -> None:
        """Copy states, no target of which is a source or named twice."""
        if copies:
            sources, targets = upload(copies, self._device).unbind(1)
            for tensor in self._tensors:
                tensor.index_copy_(0, targets, tensor.index_select(0, sources))


def _zeros(spec: ModelSpec, layer: int, number: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(
        lazy_zeros((number, *plane.shape), getattr(torch, plane.element) if plane.element else dtype, device)
        for plane in spec.layers[layer].mixer.state_form()
    )


def _independent(copies: Copies) -> Iterator[list[tuple[int, int]]]:
    """Divide copies that are made in order into parts, within which the order does not matter."""
    part: list[tuple[int, int]] = []
    sources, targets = set[int](), set[int]()
    for source, target in copies:
        if source in targets or target in sources or target in targets:
            yield part
            part, sources, targets = [], set(), set()
        part.append((source, target))
        sources.add(source)
        targets.add(target)
    if part:
        yield part
