"""Fills the slots of new sequences with what an encoder makes of what they bring."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.compute.attention.sources import SequenceSources
from quire.compute.kernels.reference.attention_inputs import PagedKV
from quire.foundation.messages.to_engine import Medium
from quire.foundation.messages.workers import Admitted
from quire.models.audio.encoder import SpeechEncoder
from quire.models.spec import ModelSpec
from quire.runtime.worker.host_memory import lazy_zeros
from quire.runtime.worker.slot_table import SlotTable


class SlotSources:
    """Admits sequences to a slot table, and has their sources encoded, unless a slot still has what was made of them.

    Args:
        encoder: Computes keys and values.
        sources: Where they are stored.
        slots: The slot table.

    Attributes:
        encoded: How many sources the encoder has read.
    """

    def __init__(self, encoder: SpeechEncoder, sources: SequenceSources, slots: SlotTable) -> None:
        self._encoder = encoder
        self._sources = sources
        self._slots = slots
        self._held: dict[int, bytes] = {}  # by slot, the digest of what its keys and values were made of
        self.encoded = 0

    def admit(self, owners: Sequence[Admitted]) -> None:
        """Give slots to their new owners, with what these bring."""
        self._slots.admit(owners)
        for owner in owners:
            if owner.source is not None:
                self._fill(owner.slot, owner.source)

    def _fill(self, slot: int, source: Medium) -> None:
        if self._held.get(slot) == source.digest:
            return
        holder = next((other for other, digest in self._held.items() if digest == source.digest), None)
        self._held.pop(slot, None)  # in case the encoder fails
        if holder is None:
            states = self._encoder.states(self._features(source))[0]
            self._sources.write(slot, self._encoder.keys_and_values(states))
            self.encoded += 1
        else:
            self._sources.write(slot, [(layer.keys[holder], layer.values[holder]) for layer in self._sources.layers])
        self._held[slot] = source.digest

    def _features(self, source: Medium) -> Tensor:
        """Return the features of a sound, [1, mels, frames] float32."""
        numbers = np.frombuffer(source.pixels, dtype=np.float32).reshape(1, source.height, source.width)
        return torch.from_numpy(numbers.copy()).to(self._slots.device)


def allocate_sources(
    spec: ModelSpec, slots: int, tokens: int, dtype: torch.dtype, device: torch.device
) -> SequenceSources:
    """Allocate the keys and values of all slots. On a CPU, only those that are written take memory.

    Args:
        spec: The model, whose layers attend to an encoder's states.
        slots: Number of slots, with the dummy.
        tokens: Most tokens of a step.
        dtype: The model's.
        device: Where it runs.
    """
    crosses = [layer.cross for layer in spec.layers if layer.cross is not None]
    shapes = [(slots, own.length, own.heads, own.head_dim) for own in crosses]
    layers = [PagedKV(lazy_zeros(shape, dtype, device), lazy_zeros(shape, dtype, device)) for shape in shapes]
    return SequenceSources(layers, tokens)
