"""Attention on the CPU, which serves rows of one token and of many tokens in the same way."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.compute.attention.backend import AttentionLayer, KVView, StepRows, TwoSidedSpans
from quire.compute.attention.limits import PaddedLimits
from quire.compute.attention.metadata import AttentionMetadata, IntArray
from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.attention_inputs import CacheWrite, PagedRows, QKNormRope


class CpuAttention:
    """An AttentionBackend over a KV cache in main memory."""

    def __init__(self, kv: KVView) -> None:
        self._kv = kv
        self._qk_norm_rope_and_cache = kernel("qk_norm_rope_and_cache", "cpu")
        self._compute_slot_mapping = kernel("compute_slot_mapping", "cpu")
        self._paged_attention = kernel("paged_attention", "cpu")
        self._slot_mappings: list[Tensor] = []  # by KV group, as the next
        self._rows: list[PagedRows] = []
        self._spans: TwoSidedSpans | None = None

    def build_metadata(
        self, counts: IntArray, bounds: IntArray, limits: PaddedLimits | None = None
    ) -> AttentionMetadata:
        """Return empty metadata, because `prepare` finds everything on the host."""
        return AttentionMetadata()

    def prepare(self, rows: StepRows) -> None:
        self._rows = [rows.paged(group) for group in range(len(rows.tables))]
        self._spans = rows.spans
        self._slot_mappings = [torch.empty_like(rows.positions) for _ in rows.tables]
        for table, mapping in zip(rows.tables, self._slot_mappings, strict=True):
            self._compute_slot_mapping(table, rows.slot_of_token, rows.positions, self._kv.block_size, mapping)

    def run(self, layer: AttentionLayer, qkv: Tensor, norm_rope: QKNormRope, out: Tensor) -> None:
        kv, group = self._kv.layers[layer.number], self._kv.groups[layer.number]
        q = torch.empty_like(out)
        self._qk_norm_rope_and_cache(qkv, norm_rope, CacheWrite(kv, self._slot_mappings[group]), q)
        self._paged_attention(q, kv, self._rows[group], self._kv.masks[group], layer.scores, out)
        sees_behind = self._kv.masks[group].window is not None or not self._kv.spans_in_windows
        if self._spans is not None and sees_behind:
            self._attend_in_spans(self._spans, layer, q, out)

    def _attend_in_spans(self, spans: TwoSidedSpans, layer: AttentionLayer, q: Tensor, out: Tensor) -> None:
        """Compute tokens of spans again, which are as rows that end with their span: its keys are written already."""
        kv, group = self._kv.layers[layer.number], self._kv.groups[layer.number]
        rows = PagedRows(self._rows[group].block_table, spans.slots, spans.starts, spans.counts)
        own = torch.empty_like(out[spans.tokens])
        mask = self._kv.masks[group]._replace(two_sided=True)
        self._paged_attention(q[spans.tokens], kv, rows, mask, layer.scores, own)
        out.index_copy_(0, spans.tokens, own)
