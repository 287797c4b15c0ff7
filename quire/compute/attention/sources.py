"""Keys and values of what encoders have made for sequences: as many for each, cached as long as the sequence has its
slot.

To the kernels they are a paged cache with a block for each slot, whose tokens stand behind its last entry.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.compute.attention.backend import AttentionBackend, OtherAttention, StepRows
from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.attention_inputs import Mask, PagedKV, PagedRows, Scores

_SEES_ALL = Mask()


class SequenceSources:
    """The keys and values of all slots, by layer.

    Args:
        layers: Each layer's, [slots, length, heads, d].
        tokens: Most tokens of a step.
    """

    def __init__(self, layers: Sequence[PagedKV], tokens: int) -> None:
        keys = layers[0].keys
        self.layers = layers
        self._table = torch.arange(len(keys), device=keys.device).unsqueeze(1)
        self._starts = torch.full((tokens,), keys.shape[1] - 1, device=keys.device)
        self._counts = torch.ones_like(self._starts)
        self._paged_attention = kernel("paged_attention", keys.device.type)
        self._rows: PagedRows

    def begin(self, slot_of_token: Tensor) -> None:
        """Begin a step, whose tokens are of these slots, [tokens] int64."""
        tokens = len(slot_of_token)
        self._rows = PagedRows(self._table, slot_of_token, self._starts[:tokens], self._counts[:tokens])

    def attend(self, layer: int, queries: Tensor, scores: Scores, out: Tensor) -> None:
        """Attend to all that a token's slot has: queries [tokens, heads, d] → out of the same shape."""
        self._paged_attention(queries, self.layers[layer], self._rows, _SEES_ALL, scores, out)

    def write(self, slot: int, made: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Store each layer's keys and values [length, heads, d] of a slot's new owner."""
        for layer, (keys, values) in zip(self.layers, made, strict=True):
            layer.keys[slot].copy_(keys)
            layer.values[slot].copy_(values)


class AttentionBesideSources(OtherAttention):
    """An AttentionBackend of a model whose layers also attend to what an encoder has made.

    Args:
        attention: The backend of attention among tokens.

    Attributes:
        sources: What the encoder has made.
    """

    def __init__(self, attention: AttentionBackend, sources: SequenceSources) -> None:
        super().__init__(attention)
        self.sources = sources

    def prepare(self, rows: StepRows) -> None:
        super().prepare(rows)
        self.sources.begin(rows.slot_of_token)


def sources_of(backend: AttentionBackend) -> SequenceSources:
    """Return the sources beside a backend, which a model with an encoder is given."""
    assert isinstance(backend, AttentionBesideSources), "this model has an encoder"
    return backend.sources
