"""Attention of layers whose heads differ in number or width: a backend for each shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from quire.compute.attention.backend import AttentionBackend, AttentionLayer, KVView, StepRows
from quire.compute.attention.limits import PaddedLimits
from quire.compute.attention.metadata import AttentionMetadata, IntArray
from quire.compute.kernels.reference.attention_inputs import QKNormRope


class DifferingAttention:
    """An AttentionBackend over layers of several shapes; those of one shape have a backend of their own.

    Args:
        kv: The cache of all layers.
        heads: For each layer, the number of query heads.
        build: Builds the backend of layers of one shape, given their cache and their number of query heads.
    """

    def __init__(self, kv: KVView, heads: Sequence[int], build: Callable[[KVView, int], AttentionBackend]) -> None:
        shapes = shapes_of(kv, heads)
        self._parts: list[tuple[AttentionBackend, tuple[int, ...]]] = []
        self._of_layer: dict[int, tuple[AttentionBackend, int]] = {}
        for shape in dict.fromkeys(shapes):
            own = [layer for layer, each in enumerate(shapes) if each == shape]
            groups = tuple(dict.fromkeys(kv.groups[layer] for layer in own))
            view = KVView(
                tuple(kv.layers[layer] for layer in own),
                tuple(groups.index(kv.groups[layer]) for layer in own),
                tuple(kv.masks[group] for group in groups),
                kv.spans_in_windows,
            )
            backend = build(view, shape[0])
            self._parts.append((backend, groups))
            self._of_layer |= {layer: (backend, number) for number, layer in enumerate(own)}

    def build_metadata(
        self, counts: IntArray, bounds: IntArray, limits: PaddedLimits | None = None
    ) -> AttentionMetadata:
        first, *others = (backend.build_metadata(counts, bounds, limits) for backend, _ in self._parts)
        return first._replace(others=tuple(others))

    def prepare(self, rows: StepRows) -> None:
        others = rows.metadata.others or (AttentionMetadata(),) * (len(self._parts) - 1)  # of decode rows alone
        metadata = (rows.metadata, *others)
        for (backend, groups), own in zip(self._parts, metadata, strict=True):
            backend.prepare(replace(rows, tables=tuple(rows.tables[group] for group in groups), metadata=own))

    def run(self, layer: AttentionLayer, qkv: Tensor, norm_rope: QKNormRope, out: Tensor) -> None:
        backend, number = self._of_layer[layer.number]
        backend.run(AttentionLayer(number, layer.scores), qkv, norm_rope, out)


def shapes_of(kv: KVView, heads: Sequence[int]) -> list[tuple[int, ...]]:
    """Return for each layer its number of query heads and the shapes of a token's keys and values."""
    return [(own, *layer.keys.shape[2:], *layer.values.shape[2:]) for own, layer in zip(heads, kv.layers, strict=True)]
