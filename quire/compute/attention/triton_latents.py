"""Attention over latents on a GPU, by Triton kernels.

Decode rows are split along their entries, and longer rows are cut into tiles of queries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.compute.attention.backend import AttentionLayer, KVView, StepRows
from quire.compute.attention.limits import PaddedLimits
from quire.compute.attention.metadata import AttentionMetadata, IntArray, PrefillMetadata
from quire.compute.attention.metadata_builder import PrefillTiling, build_metadata
from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.attention_inputs import CacheWrite, PagedRows, QKNormRope
from quire.compute.kernels.reference.paged_attention import KV_SPLIT_COLUMNS, new_decode_partials
from quire.compute.kernels.triton.attention import latents
from quire.compute.kernels.triton.attention.decode_split_kv import MIN_SPLIT_TILES, kv_splits_for


class TritonLatentAttention:
    """An AttentionBackend over a cache of latents in a GPU's memory.

    Its results lack their rotated parts, which are undefined.

    Args:
        kv: The cache, whose layers are one KV group without a window.
        rotated: Width of the entries' rotated part.
        heads: The number of query heads.
        max_rows, step_tokens: The maximum rows and tokens of a step.
        dtype: The dtype of queries.
    """

    def __init__(
        self, kv: KVView, rotated: int, heads: int, max_rows: int, step_tokens: int, dtype: torch.dtype
    ) -> None:
        cache = kv.layers[0].keys
        device, d, tiles = cache.device, cache.shape[3], latents.tiles_of_heads(heads)
        self._kv = kv
        self._rotated = rotated
        self._tiling = PrefillTiling(latents.queries_of_tile(dtype.itemsize, device))
        self._keys_of_tile = latents.keys_of_tile(dtype.itemsize, device)
        self._splits_at_once = latents.splits_at_once(heads, device)
        splits = kv_splits_for(max_rows + 1, self._splits_at_once)  # one row for a step's padding
        self._partials = new_decode_partials(splits, tiles * latents.HEADS_OF_TILE, tiles, d - rotated, device)
        self._splits = torch.zeros((splits, KV_SPLIT_COLUMNS), dtype=torch.int32, device=device)
        self._slot_mapping = torch.zeros(max(max_rows, step_tokens), dtype=torch.int64, device=device)
        self._own_splits: Tensor | None = None
        self._prefill: PrefillMetadata | None = None
        self._rows: PagedRows
        self._places: Tensor
        self._qk_norm_rope_and_cache = kernel("qk_norm_rope_and_cache", "cuda")
        self._compute_slot_mapping = kernel("compute_slot_mapping", "cuda")
        self._plan_kv_splits = kernel("plan_kv_splits", "cuda")
        self._decode_latents = kernel("decode_latents", "cuda")
        self._prefill_latents = kernel("prefill_latents", "cuda")

    def build_metadata(
        self, counts: IntArray, bounds: IntArray, limits: PaddedLimits | None = None
    ) -> AttentionMetadata:
        return build_metadata(counts, bounds, self._tiling, limits)

    def prepare(self, rows: StepRows) -> None:
        paged, metadata = rows.paged(0), rows.metadata
        self._rows = paged
        self._places = self._slot_mapping[: len(rows.positions)]
        self._compute_slot_mapping(
            paged.block_table, rows.slot_of_token, rows.positions, self._kv.block_size, self._places
        )
        decode_rows = len(rows.counts) if metadata.decode is None else len(metadata.decode.rows)
        self._own_splits = None
        if decode_rows:
            self._own_splits = self._splits[: kv_splits_for(decode_rows, self._splits_at_once)]
            self._plan_kv_splits(
                paged, metadata.decode, self._kv.masks[0], self._own_splits, self._keys_of_tile, self._splits_at_once,
                MIN_SPLIT_TILES,
            )  # fmt: skip
        prefill = metadata.prefill
        self._prefill = prefill if prefill is not None and len(prefill.tiles.rows) else None

    def run(self, layer: AttentionLayer, qkv: Tensor, norm_rope: QKNormRope, out: Tensor) -> None:
        kv, rows, scale = self._kv.layers[layer.number], self._rows, layer.scores.scale
        q, entries = torch.empty_like(out), kv.keys.squeeze(2)
        self._qk_norm_rope_and_cache(qkv, norm_rope, CacheWrite(kv, self._places), q)
        if (prefill := self._prefill) is not None:
            queries = self._tiling.tile_queries
            self._prefill_latents(q, entries, self._rotated, rows, prefill.tiles, queries, scale, out)
        if (splits := self._own_splits) is not None:
            self._decode_latents(q, entries, self._rotated, rows.block_table, splits, self._partials, scale, out)
