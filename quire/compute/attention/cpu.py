"""Attention on the CPU: every row in one way, whether it has one token or many."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.compute.attention.backend import AttentionLayer, KVView, QKNormRope, StepRows
from quire.compute.attention.metadata import AttentionMetadata, IntArray, PaddedLimits
from quire.compute.kernels.dispatch import kernel


@dataclass(frozen=True)
class _Step:
    """What all layers share.

    Attributes:
        slot_mappings: By KV group, [tokens] int64: block · block_size + offset.
        tables: See StepRows.
        slots, starts, counts: [rows] int64, see StepRows.
    """

    slot_mappings: tuple[Tensor, ...]
    tables: tuple[Tensor, ...]
    slots: Tensor
    starts: Tensor
    counts: Tensor


class CpuAttention:
    """An AttentionBackend over a KV cache in main memory."""

    def __init__(self, kv: KVView) -> None:
        self._kv = kv
        self._qk_norm_rope_and_cache = kernel("qk_norm_rope_and_cache", "cpu")
        self._compute_slot_mapping = kernel("compute_slot_mapping", "cpu")
        self._paged_attention = kernel("paged_attention", "cpu")
        self._step: _Step

    def build_metadata(
        self, counts: IntArray, bounds: IntArray, limits: PaddedLimits | None = None
    ) -> AttentionMetadata[IntArray]:
        """Nothing: all of it is on the host, where `prepare` finds it."""
        return AttentionMetadata()

    def prepare(self, rows: StepRows) -> None:
        mappings = tuple(torch.empty_like(rows.positions) for _ in rows.tables)
        for table, mapping in zip(rows.tables, mappings, strict=True):
            self._compute_slot_mapping(table, rows.slot_of_token, rows.positions, self._kv.block_size, mapping)
        counts = torch.from_numpy(rows.counts) if rows.device_counts is None else rows.device_counts
        self._step = _Step(mappings, rows.tables, rows.slots, rows.starts, counts)

    def run(self, layer: AttentionLayer, qkv: Tensor, norm_rope: QKNormRope, out: Tensor) -> None:
        kv, step = self._kv, self._step
        (keys, values, scales), group = kv.of_layer(layer.number), kv.groups[layer.number]
        q = torch.empty_like(out)
        self._qk_norm_rope_and_cache(qkv, *norm_rope, keys, values, step.slot_mappings[group], q, scales)
        rows = (step.tables[group], step.slots, step.starts, step.counts, kv.windows[group])
        self._paged_attention(q, keys, values, *rows, out, layer.scale, layer.cap, scales)
