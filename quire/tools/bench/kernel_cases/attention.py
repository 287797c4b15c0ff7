"""Cases of attention over the paged cache: bf16, the heads of Llama-3.1-8B, blocks of 16 tokens that lie anywhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.compute.kernels.reference import paged_attention
from quire.compute.kernels.reference.attention_inputs import (
    DenseTiles,
    GatherChunks,
    KVSplits,
    Mask,
    PagedKV,
    PagedRows,
    QueryTiles,
    Scores,
)
from quire.tools.bench.kernel_cases import INT, ITEM, Arguments, KernelCase, normal, on

_BLOCK_SIZE, _GATHER_CHUNK = 16, 128
_SCORES = Scores(0.1)


@dataclass(frozen=True)
class _Heads:
    query: int
    kv: int
    width: int

    def __str__(self) -> str:
        return f"{self.query}/{self.kv} × {self.width}"


_LLAMA, _SMALL = _Heads(32, 8, 128), _Heads(4, 2, 64)


def _caches(rows: int, length: int, heads: _Heads, device: torch.device) -> tuple[PagedKV, Tensor]:
    """A cache and a block table for contexts of this length; block 0 belongs to no context."""
    each = -(-length // _BLOCK_SIZE)
    shape = (1 + rows * each, _BLOCK_SIZE, heads.kv, heads.width)
    keys, values = (normal(device, *shape) for _ in range(2))
    return PagedKV(keys, values), 1 + torch.randperm(rows * each, device=device).view(rows, each)


def _decode(rows: int, length: int, heads: _Heads, narrow: torch.dtype | None = None) -> KernelCase:
    """Decode attention: each row's token sees `length` tokens with itself. `narrow` is the dtype of a quantized
    cache."""

    def make(device: torch.device) -> Arguments:
        from quire.compute.kernels.triton.attention.decode_split_kv import (
            MIN_SPLIT_TILES,
            keys_of_tile,
            kv_splits_at_once,
            kv_splits_for,
        )

        kv, table = _caches(rows, length, heads, device)
        q = normal(device, rows, heads.query, heads.width)
        at_once = kv_splits_at_once(heads.kv, device)
        room = kv_splits_for(rows, at_once)
        splits = torch.zeros((room, paged_attention.KV_SPLIT_COLUMNS), dtype=torch.int32)
        ones = torch.ones(rows, dtype=torch.int64)
        plan = PagedRows(table.cpu(), torch.arange(rows), (length - 1) * ones, ones)
        tile = keys_of_tile(heads.width, ITEM)
        paged_attention.plan_kv_splits(plan, None, Mask(), splits, tile, at_once, MIN_SPLIT_TILES)
        partials = paged_attention.new_decode_partials(room, heads.query, heads.kv, heads.width, device)
        if narrow is not None:
            kv = PagedKV(kv.keys.to(narrow), kv.values.to(narrow), torch.ones(2, heads.kv, device=device))
        return (q, kv, table, splits.to(device), partials, _SCORES, torch.empty_like(q)), {}

    item, suffix = (ITEM, "") if narrow is None else (1, f", {str(narrow).removeprefix('torch.')}")
    moved = 2 * rows * heads.width * (length * heads.kv * item + heads.query * ITEM)
    return KernelCase("decode_attention", f"{rows} × {length:,}, {heads}{suffix}", make, moved)


def _prefill(rows: int, tokens: int, before: int, heads: _Heads) -> KernelCase:
    """Prefill attention: each row has `tokens` tokens in the step and `before` ones before it."""

    def make(device: torch.device) -> Arguments:
        from quire.compute.kernels.triton.attention.prefill import queries_of_tile

        kv, table = _caches(rows, before + tokens, heads, device)
        q = normal(device, rows * tokens, heads.query, heads.width)
        queries = queries_of_tile(heads.width, ITEM, heads.query // heads.kv, device)
        offsets = torch.arange(0, tokens, queries).flip(0)
        row = torch.arange(rows)
        tiles = QueryTiles(row.repeat(len(offsets)), offsets.repeat_interleave(rows), tokens * row)
        step = PagedRows(table, row, torch.full((rows,), before), torch.full((rows,), tokens))
        return on(device, q, kv, step, tiles, queries, Mask(), _SCORES, torch.empty_like(q))

    moved = 2 * rows * ((before + tokens) * heads.kv + tokens * heads.query) * heads.width * ITEM
    seen = rows * tokens * (before + (tokens + 1) // 2)  # pairs of a query and a key
    name = f"{rows} × {tokens:,}{f' after {before:,}' if before else ''}, {heads}"
    return KernelCase("prefill_attention", name, make, moved, 4 * seen * heads.query * heads.width)


def _split_kv(tokens: int, before: int, heads: _Heads) -> KernelCase:
    """Prefill attention of one row of few tokens, with its keys and values split."""

    def make(device: torch.device) -> Arguments:
        from quire.compute.attention import metadata_builder
        from quire.compute.kernels.triton.attention import prefill_split_kv
        from quire.compute.kernels.triton.attention.prefill import queries_of_tile, tile_shape

        kv, table = _caches(1, before + tokens, heads, device)
        q = normal(device, tokens, heads.query, heads.width)
        queries = queries_of_tile(heads.width, ITEM, heads.query // heads.kv, device)
        shape = tile_shape(heads.width, ITEM, device)
        own = metadata_builder.PrefillTiling(
            queries,
            max_splits=prefill_split_kv.max_splits(heads.kv, device, shape.at_once),
            max_unshared_splits=prefill_split_kv.max_unshared_splits(heads.kv, device),
            split_keys=shape.keys,
            min_split_tiles=prefill_split_kv.MIN_SPLIT_TILES,
            merge_tiles=prefill_split_kv.MERGE_TILES,
            shared_slowdown=prefill_split_kv.SHARED_SLOWDOWN,
            max_splits_of_tile=prefill_split_kv.MAX_SPLITS_OF_TILE,
        )
        counts, bounds = np.array([tokens]), np.array([before])
        tiles, splits = metadata_builder.split_kv(
            metadata_builder.tiles_of(counts, bounds, np.arange(1), queries), counts, bounds, own
        )
        rows = PagedRows(table, *map(torch.from_numpy, (0 * counts, bounds, counts)))
        of_tiles = QueryTiles(*map(torch.from_numpy, (*tiles, 0 * counts)))
        of_splits = KVSplits(*map(torch.from_numpy, splits))
        partials = paged_attention.new_prefill_partials(len(tiles.rows) * queries, heads.query, heads.width, device)
        return on(device, q, kv, rows, of_tiles, of_splits, queries, partials, Mask(), _SCORES, torch.empty_like(q))

    whole = _prefill(1, tokens, before, heads)
    return KernelCase("prefill_attention_split_kv", whole.name, make, whole.bytes, whole.flops)


def _dense(rows: int, tokens: int, before: int, heads: _Heads) -> KernelCase:
    """Prefill attention as in `_prefill`, but over contexts in contiguous memory."""

    def make(device: torch.device) -> Arguments:
        size, chunk = 128, -(-(before + tokens) // _GATHER_CHUNK) * _GATHER_CHUNK
        q = normal(device, rows * tokens, heads.query, heads.width)
        shape = (rows * chunk, heads.kv, heads.width)
        k, v = (normal(device, *shape) for _ in range(2))
        offsets = torch.arange(0, tokens, size).flip(0).repeat_interleave(rows)
        row = torch.arange(rows).repeat(len(offsets) // rows)
        columns = (row * tokens + offsets, (tokens - offsets).clamp(max=size), before + offsets, row * chunk)
        return on(device, q, k, v, DenseTiles(*columns), _SCORES, torch.empty_like(q))

    paged = _prefill(rows, tokens, before, heads)
    return KernelCase("prefill_attention_dense", paged.name, make, paged.bytes, paged.flops)


def _gather(length: int, heads: _Heads) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        kv, table = _caches(1, length, heads, device)
        offsets = torch.arange(0, length, _GATHER_CHUNK)
        columns = (torch.zeros_like(offsets), offsets, (length - offsets).clamp(max=_GATHER_CHUNK))
        shape = (len(offsets) * _GATHER_CHUNK, heads.kv, heads.width)
        k, v = (torch.empty(shape, dtype=kv.keys.dtype, device=device) for _ in range(2))
        return on(device, kv, table, torch.zeros(1, dtype=torch.int64), GatherChunks(*columns), k, v)

    return KernelCase("gather_kv", f"{length:,}, {heads}", make, 4 * length * heads.kv * heads.width * ITEM)


def _plan(rows: int, length: int, heads: _Heads) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        from quire.compute.kernels.triton.attention.decode_split_kv import (
            keys_of_tile,
            kv_splits_at_once,
            kv_splits_for,
        )

        at_once = kv_splits_at_once(heads.kv, device)
        room = kv_splits_for(rows, at_once)
        splits = torch.empty((room, paged_attention.KV_SPLIT_COLUMNS), dtype=torch.int32, device=device)
        starts, slots = torch.randint(length, (rows,), device=device), torch.arange(rows, device=device)
        plan = PagedRows(slots[:, None], slots, starts, torch.ones_like(slots))
        return (plan, None, Mask(), splits, keys_of_tile(heads.width, ITEM), at_once), {}

    return KernelCase("plan_kv_splits", f"{rows} × up to {length:,}", make, 2 * rows * INT)


def _slot_mapping(tokens: int, rows: int) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        table = torch.randint(2**20, (rows, 512), device=device)
        slots, positions = (torch.randint(n, (tokens,), device=device) for n in (rows, 512 * _BLOCK_SIZE))
        return (table, slots, positions, _BLOCK_SIZE, torch.empty(tokens, dtype=torch.int64, device=device)), {}

    return KernelCase("compute_slot_mapping", f"{tokens}", make, 4 * tokens * INT)


def _with_sinks(case: KernelCase, heads: _Heads) -> KernelCase:
    """Return the case with sinks, and with a window where the op has a mask."""

    def make(device: torch.device) -> Arguments:
        args, kwargs = case.make(device)
        sinks = _SCORES._replace(sinks=torch.zeros(heads.query, device=device))
        other: dict[type, Scores | Mask] = {Scores: sinks, Mask: Mask(8)}
        return tuple(other.get(type(each), each) for each in args), kwargs

    return dataclasses.replace(case, name=f"{case.name}, sinks", make=make)


def _cases(
    decode: Sequence[tuple[int, int]], prefill: Sequence[tuple[int, int, int]], heads: _Heads
) -> list[KernelCase]:
    return [
        *(_decode(rows, length, heads) for rows, length in decode),
        *(_decode(rows, length, heads, torch.float8_e4m3fn) for rows, length in decode),
        *(_prefill(rows, tokens, before, heads) for rows, tokens, before in prefill),
        *(_split_kv(tokens, before, heads) for rows, tokens, before in prefill if rows == 1 and tokens < 128),
        *(_dense(rows, tokens, before, heads) for rows, tokens, before in prefill),
        *(_gather(tokens + before, heads) for rows, tokens, before in prefill if rows == 1),
        *(_plan(rows, 4_096, heads) for rows in (1, 256)),
        *(_slot_mapping(tokens, 256) for tokens in (1, 256, 8_192)),
    ]


CASES = (
    *_cases(
        ((1, 130_000), (1, 4_096), (1, 600), (8, 1_024), (32, 1_024), (32, 4_096), (256, 1_024)),
        ((1, 512, 0), (16, 512, 0), (1, 2_048, 0), (1, 8_192, 0), (1, 32_000, 0), (1, 50, 2_000), (1, 2_048, 30_000)),
        _LLAMA,
    ),
    _decode(128, 1_024, _Heads(16, 8, 128)),
    _decode(128, 1_024, _Heads(32, 4, 128)),
)
_SMALL_ONES = tuple(_cases(((2, 40),), ((1, 9, 5),), _SMALL))
SMALL_CASES = (
    *_SMALL_ONES,
    *(_with_sinks(case, _SMALL) for case in _SMALL_ONES if "attention" in case.op),
    _with_sinks(_decode(64, 40, _SMALL), _SMALL),
)
