"""Attention on a GPU, by Triton kernels.

Decode rows are split along their keys, longer rows are cut into tiles of queries, and rows of many tokens have a kernel
of their own where the device supports it (dense prefill). Each kind is one launch, whatever the mix. A step of decode
rows alone depends on the host only for their number, so it can be recorded as a graph and replayed at any lengths. The
same holds for a step that is padded to PaddedLimits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.compute.attention.backend import AttentionLayer, KVView, StepRows
from quire.compute.attention.limits import DENSE_MIN_QUERIES, GATHER_CHUNK, PaddedLimits, gathered_tokens
from quire.compute.attention.metadata import (
    AttentionMetadata,
    DensePrefillMetadata,
    IntArray,
    PrefillMetadata,
)
from quire.compute.attention.metadata_builder import PrefillTiling, build_metadata
from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.attention_inputs import (
    CacheWrite,
    DecodeRows,
    Mask,
    PagedKV,
    PagedRows,
    QKNormRope,
    QueryTiles,
    Scores,
)
from quire.compute.kernels.reference.paged_attention import KV_SPLIT_COLUMNS, new_decode_partials, new_prefill_partials
from quire.compute.kernels.triton.attention import prefill_dense, prefill_split_kv
from quire.compute.kernels.triton.attention.decode_split_kv import (
    MIN_SPLIT_TILES,
    keys_of_tile,
    kv_splits_at_once,
    kv_splits_for,
)
from quire.compute.kernels.triton.attention.prefill import queries_of_tile, tile_shape
from quire.errors import ConfigError

_MAX_HEAD_DIM, _MAX_GROUP = 512, 16


@dataclass(frozen=True)
class _DensePrefill:
    """Rows of dense prefill, and memory for their keys and values: [chunks · GATHER_CHUNK, kv_heads, d]."""

    metadata: DensePrefillMetadata
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class _GroupStep:
    """A step as the layers of one KV group see it. A part without rows is None.

    Attributes:
        rows: The step's rows, with the group's block table.
        mask: What the group's layers see.
        slot_mapping: [tokens] int64, where each token's key and value go.
        decode_rows: Number of decode rows.
        kv_splits: [n, KV_SPLIT_COLUMNS], the splits of their keys.
        prefill: Rows of several tokens that read the cache through the table.
        dense: Rows of many tokens that dense prefill serves.
    """

    rows: PagedRows
    mask: Mask
    slot_mapping: Tensor
    decode_rows: int
    kv_splits: Tensor | None
    prefill: PrefillMetadata | None
    dense: _DensePrefill | None


class TritonAttention:
    """An AttentionBackend over a KV cache in a GPU's memory.

    Args:
        kv: The cache.
        heads: The number of query heads.
        max_rows, step_tokens: The maximum rows and tokens of a step.
        max_length: Tokens of the longest sequence.
        dtype: The dtype of queries; None: that of the cache.
        has_slopes: Whether scores depend on distances (`Scores.slopes`), which dense prefill does not support.

    Raises:
        ConfigError: The kernels do not serve this shape of attention.
    """

    def __init__(
        self,
        kv: KVView,
        heads: int,
        max_rows: int,
        step_tokens: int,
        max_length: int,
        dtype: torch.dtype | None = None,
        has_slopes: bool = False,
    ) -> None:
        cache = kv.layers[0].keys
        dtype = dtype or cache.dtype
        device, (kv_heads, d), item = cache.device, cache.shape[2:], dtype.itemsize
        if d > _MAX_HEAD_DIM or heads % kv_heads or heads // kv_heads > _MAX_GROUP:
            raise ConfigError(
                f"Attention of {heads} query heads and {kv_heads} KV heads, {d} wide, is not supported on a GPU: heads "
                f"may be {_MAX_HEAD_DIM} wide, and {_MAX_GROUP} query heads share a KV head, at most."
            )
        self._kv = kv
        self._tiling = _tiling(kv, heads, dtype, step_tokens, max_length, has_slopes)
        self._keys_of_tile = keys_of_tile(d, item)
        self._splits_at_once = kv_splits_at_once(kv_heads, device)
        splits = kv_splits_for(max_rows + 1, self._splits_at_once)  # one row for a step's padding
        self._decode_partials = new_decode_partials(splits, heads, kv_heads, d, device)
        queries = self._tiling.max_splits * self._tiling.tile_queries
        self._prefill_partials = new_prefill_partials(queries, heads, d, device)
        groups = len(kv.masks)
        self._kv_splits = torch.zeros((groups, splits, KV_SPLIT_COLUMNS), dtype=torch.int32, device=device)
        self._slot_mapping = torch.zeros((groups, max(max_rows, step_tokens)), dtype=torch.int64, device=device)
        self._gathered = torch.empty((2, self._tiling.gather_capacity, kv_heads, d), dtype=dtype, device=device)
        self._aux_stream = AuxStream(device)
        self._steps: list[_GroupStep] = []
        self._qk_norm_rope_and_cache = kernel("qk_norm_rope_and_cache", "cuda")
        self._compute_slot_mapping = kernel("compute_slot_mapping", "cuda")
        self._plan_kv_splits = kernel("plan_kv_splits", "cuda")
        self._decode_attention = kernel("decode_attention", "cuda")
        self._prefill_attention = kernel("prefill_attention", "cuda")
        self._prefill_attention_split_kv = kernel("prefill_attention_split_kv", "cuda")
        self._gather_kv = kernel("gather_kv", "cuda")
        self._prefill_attention_dense = kernel("prefill_attention_dense", "cuda")

    def build_metadata(
        self, counts: IntArray, bounds: IntArray, limits: PaddedLimits | None = None
    ) -> AttentionMetadata:
        return build_metadata(counts, bounds, self._tiling, limits)

    def prepare(self, rows: StepRows) -> None:
        self._steps = [self._prepare_group(rows, group) for group in range(len(self._kv.masks))]

    def run(self, layer: AttentionLayer, qkv: Tensor, norm_rope: QKNormRope, out: Tensor) -> None:
        kv, step = self._kv.layers[layer.number], self._steps[self._kv.groups[layer.number]]
        q = torch.empty_like(out)
        self._qk_norm_rope_and_cache(qkv, norm_rope, CacheWrite(kv, step.slot_mapping), q)
        mixed = step.kv_splits is not None and step.prefill is not None
        if step.prefill is not None:
            with self._aux_stream.fork() if mixed else nullcontext():
                self._run_prefill(q, kv, step, step.prefill, layer.scores, out)
        if step.kv_splits is not None:
            rows = 0 if mixed else step.decode_rows  # persistent programs would leave tiles no room beside them
            table, partials = step.rows.block_table, self._decode_partials
            self._decode_attention(q, kv, table, step.kv_splits, partials, layer.scores, out, rows)
        if mixed:
            self._aux_stream.join()
        if (dense := step.dense) is not None:
            self._gather_kv(kv, step.rows.block_table, step.rows.slots, dense.metadata.chunks, dense.k, dense.v)
            self._prefill_attention_dense(q, dense.k, dense.v, dense.metadata.tiles, layer.scores, out)

    def _run_prefill(
        self, q: Tensor, kv: PagedKV, step: _GroupStep, prefill: PrefillMetadata, scores: Scores, out: Tensor
    ) -> None:
        rows, tiles, queries, mask = step.rows, prefill.tiles, self._tiling.tile_queries, step.mask
        if prefill.splits is None:
            self._prefill_attention(q, kv, rows, tiles, queries, mask, scores, out)
            return
        self._prefill_attention_split_kv(
            q, kv, rows, tiles, prefill.splits, queries, self._prefill_partials, mask, scores, out
        )

    def _prepare_group(self, rows: StepRows, group: int) -> _GroupStep:
        """Prepare a step for a KV group; layers with a window have no dense prefill, so their dense rows are among the
        tiles."""
        paged, mask, metadata = rows.paged(group), self._kv.masks[group], rows.metadata
        slot_mapping = self._slot_mapping[group, : len(rows.positions)]
        self._compute_slot_mapping(
            paged.block_table, rows.slot_of_token, rows.positions, self._kv.block_size, slot_mapping
        )
        decode_rows = len(rows.counts) if metadata.decode is None else len(metadata.decode.rows)
        kv_splits = self._split_decode_rows(paged, group, metadata.decode, decode_rows) if decode_rows else None
        prefill, dense = metadata.prefill, None
        if metadata.dense_prefill is not None and prefill is not None and mask == Mask():
            prefill, dense = _without_dense_tiles(prefill), self._dense_prefill(metadata.dense_prefill)
        if prefill is not None and not len(prefill.tiles.rows):
            prefill = None
        return _GroupStep(paged, mask, slot_mapping, decode_rows, kv_splits, prefill, dense)

    def _split_decode_rows(self, rows: PagedRows, group: int, decode: DecodeRows | None, decode_rows: int) -> Tensor:
        kv_splits = self._kv_splits[group, : kv_splits_for(decode_rows, self._splits_at_once)]
        self._plan_kv_splits(
            rows, decode, self._kv.masks[group], kv_splits, self._keys_of_tile, self._splits_at_once, MIN_SPLIT_TILES
        )
        return kv_splits

    def _dense_prefill(self, metadata: DensePrefillMetadata) -> _DensePrefill:
        k, v = self._gathered[:, : len(metadata.chunks.rows) * self._tiling.gather_chunk].unbind()
        return _DensePrefill(metadata, k, v)


def _without_dense_tiles(prefill: PrefillMetadata) -> PrefillMetadata:
    first, (rows, offsets, first_tokens) = prefill.dense_tiles, prefill.tiles
    return PrefillMetadata(QueryTiles(rows[first:], offsets[first:], first_tokens))


def _tiling(
    kv: KVView, heads: int, dtype: torch.dtype, step_tokens: int, max_length: int, has_slopes: bool
) -> PrefillTiling:
    """Return the sizes and costs of this device's prefill kernels, for heads of this shape."""
    cache = kv.layers[0].keys
    device, (kv_heads, d), item = cache.device, cache.shape[2:], dtype.itemsize
    shape = tile_shape(d, item, device)
    tiling = PrefillTiling(
        queries_of_tile(d, item, heads // kv_heads, device),
        max_splits=prefill_split_kv.max_splits(kv_heads, device, shape.at_once),
        max_unshared_splits=prefill_split_kv.max_unshared_splits(kv_heads, device),
        split_keys=shape.keys,
        min_split_tiles=prefill_split_kv.MIN_SPLIT_TILES,
        merge_tiles=prefill_split_kv.MERGE_TILES,
        shared_slowdown=prefill_split_kv.SHARED_SLOWDOWN,
        max_splits_of_tile=prefill_split_kv.MAX_SPLITS_OF_TILE,
    )
    if has_slopes or Mask() not in kv.masks or not prefill_dense.serves_dense_prefill(device, dtype, d):
        return tiling
    return dataclasses.replace(
        tiling,
        dense_tile_queries=prefill_dense.QUERIES,
        dense_min_queries=DENSE_MIN_QUERIES,
        gather_chunk=GATHER_CHUNK,
        gather_capacity=gathered_tokens(2 * kv_heads * d * item, step_tokens, max_length),
    )


class AuxStream:
    """A second stream within a recorded step: its kernels run beside those of the main stream, if the device has room.

    A step that is launched kernel by kernel does not use it: events and a second stream cost the host more than the
    device gains. Kernels on it may start while the previous kernel ends (dependent launch); where the streams join, the
    next kernel waits for both. Until then, no other kernel may read or write what is written on it. On a CPU there is
    no second stream, and everything runs in order.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Launch on the second stream within the context, to run beside kernels that are launched until `join`."""
        if self._stream is None or not torch.cuda.is_current_stream_capturing():
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Let kernels that are launched from here on wait for both streams."""
        if self._stream is not None and torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
