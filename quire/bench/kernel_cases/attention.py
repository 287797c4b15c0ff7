"""Cases of attention over the paged cache: bf16, the heads of Llama-3.1-8B, blocks of 16 tokens that lie anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.bench.kernel_cases import Arguments, KernelCase
from quire.kernels.reference import paged_attention

_ITEM, _INT = 2, 8
_BLOCK_SIZE, _PACK, _SCALE = 16, 128, 0.1


@dataclass(frozen=True)
class _Heads:
    query: int
    kv: int
    width: int

    def __str__(self) -> str:
        return f"{self.query}/{self.kv} × {self.width}"


_LLAMA, _SMALL = _Heads(32, 8, 128), _Heads(4, 2, 64)


def _caches(rows: int, length: int, heads: _Heads, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and a table for contexts of such a length; block 0 is nobody's."""
    each = -(-length // _BLOCK_SIZE)
    shape = (1 + rows * each, _BLOCK_SIZE, heads.kv, heads.width)
    keys, values = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
    return keys, values, 1 + torch.randperm(rows * each, device=device).view(rows, each)


def _decode(rows: int, length: int, heads: _Heads) -> KernelCase:
    """Each row's one token sees `length`, itself included."""

    def make(device: torch.device) -> Arguments:
        from quire.kernels.triton.attention.decode import FEWEST, keys_of_tile, kv_splits_at_once, kv_splits_for

        caches = _caches(rows, length, heads, device)
        q = torch.randn(rows, heads.query, heads.width, dtype=torch.bfloat16, device=device)
        at_once = kv_splits_at_once(heads.kv, device)
        room = kv_splits_for(rows, at_once)
        pieces = torch.zeros((room, paged_attention.KV_SPLIT_COLUMNS), dtype=torch.int32)
        starts, tile = torch.full((rows,), length - 1), keys_of_tile(heads.width, _ITEM)
        paged_attention.plan_kv_splits(starts, torch.arange(rows), None, None, None, tile, pieces, at_once, FEWEST)
        partials = paged_attention.new_decode_partials(room, heads.query, heads.kv, heads.width, device)
        return (q, *caches, pieces.to(device), partials, torch.empty_like(q), _SCALE), {}

    moved = 2 * rows * (length * heads.kv + heads.query) * heads.width * _ITEM
    return KernelCase("decode_attention", f"{rows} × {length:,}, {heads}", make, moved)


def _chunk(rows: int, tokens: int, before: int, heads: _Heads) -> KernelCase:
    """Each row has `tokens` in the step and so many `before` it."""

    def make(device: torch.device) -> Arguments:
        from quire.kernels.triton.attention.prefill import queries_of_tile

        caches = _caches(rows, before + tokens, heads, device)
        q = torch.randn(rows * tokens, heads.query, heads.width, dtype=torch.bfloat16, device=device)
        queries = queries_of_tile(heads.width, _ITEM, heads.query // heads.kv, device)
        offsets = torch.arange(0, tokens, queries).flip(0)
        tiles = (torch.arange(rows).repeat(len(offsets)), offsets.repeat_interleave(rows))
        starts, counts = torch.full((rows,), before), torch.full((rows,), tokens)
        columns = (*tiles, starts, counts, tokens * torch.arange(rows), torch.arange(rows))
        rest = (*(column.to(device) for column in columns), None, queries)
        return (q, *caches, *rest, torch.empty_like(q), _SCALE), {}

    moved = 2 * rows * ((before + tokens) * heads.kv + tokens * heads.query) * heads.width * _ITEM
    seen = rows * tokens * (before + (tokens + 1) // 2)  # pairs of a query and a key
    name = f"{rows} × {tokens:,}{f' after {before:,}' if before else ''}, {heads}"
    return KernelCase("prefill_attention", name, make, moved, 4 * seen * heads.query * heads.width)


def _parts(tokens: int, before: int, heads: _Heads) -> KernelCase:
    """A row of few tokens."""

    def make(device: torch.device) -> Arguments:
        from quire.attention import tiling
        from quire.kernels.triton.attention import prefill_split_kv
        from quire.kernels.triton.attention.prefill import queries_of_tile, tile_shape

        caches = _caches(1, before + tokens, heads, device)
        q = torch.randn(tokens, heads.query, heads.width, dtype=torch.bfloat16, device=device)
        queries = queries_of_tile(heads.width, _ITEM, heads.query // heads.kv, device)
        shape = tile_shape(heads.width, _ITEM, device)
        sizes = tiling.TileSizes(
            queries,
            parts=prefill_split_kv.max_splits(heads.kv, device, shape.at_once),
            alone=prefill_split_kv.max_unshared_splits(heads.kv, device),
            keys=shape.keys,
            fewest=prefill_split_kv.FEWEST,
            merge=prefill_split_kv.MERGE,
            shared=prefill_split_kv.SHARED,
            most_of_tile=prefill_split_kv.MAX_SPLITS_OF_TILE,
        )
        counts, bounds = np.array([tokens]), np.array([before])
        cut = tiling.parts(tiling.tiles(counts, bounds, np.arange(1), queries), counts, bounds, sizes)
        columns = (*cut, bounds, counts, 0 * counts, 0 * counts)
        partials = paged_attention.new_prefill_partials(len(cut[0]) * queries, heads.query, heads.width, device)
        rest = (*(torch.from_numpy(column).to(device) for column in columns), None, queries, partials)
        return (q, *caches, *rest, torch.empty_like(q), _SCALE), {}

    whole = _chunk(1, tokens, before, heads)
    return KernelCase("prefill_attention_split_kv", whole.name, make, whole.bytes, whole.flops)


def _long(rows: int, tokens: int, before: int, heads: _Heads) -> KernelCase:
    """The same, over contexts in one piece."""

    def make(device: torch.device) -> Arguments:
        size, pack = 128, -(-(before + tokens) // _PACK) * _PACK
        q = torch.randn(rows * tokens, heads.query, heads.width, dtype=torch.bfloat16, device=device)
        shape = (rows * pack, heads.kv, heads.width)
        k, v = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
        offsets = torch.arange(0, tokens, size).flip(0).repeat_interleave(rows)
        row = torch.arange(rows).repeat(len(offsets) // rows)
        columns = (row * tokens + offsets, (tokens - offsets).clamp(max=size), before + offsets, row * pack)
        return (q, k, v, *(column.to(device) for column in columns), torch.empty_like(q), _SCALE), {}

    paged = _chunk(rows, tokens, before, heads)
    return KernelCase("prefill_attention_dense", paged.name, make, paged.bytes, paged.flops)


def _gather(length: int, heads: _Heads) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        keys, values, table = _caches(1, length, heads, device)
        offsets = torch.arange(0, length, _PACK)
        columns = (torch.zeros_like(offsets), offsets, (length - offsets).clamp(max=_PACK))
        shape = (len(offsets) * _PACK, heads.kv, heads.width)
        k, v = (torch.empty(shape, dtype=keys.dtype, device=device) for _ in range(2))
        slots = torch.zeros(1, dtype=torch.int64, device=device)
        return (keys, values, table, slots, *(column.to(device) for column in columns), k, v), {}

    return KernelCase("gather_kv", f"{length:,}, {heads}", make, 4 * length * heads.kv * heads.width * _ITEM)


def _cut(rows: int, length: int, heads: _Heads) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        from quire.kernels.triton.attention.decode import keys_of_tile, kv_splits_at_once, kv_splits_for

        at_once = kv_splits_at_once(heads.kv, device)
        room = kv_splits_for(rows, at_once)
        pieces = torch.empty((room, paged_attention.KV_SPLIT_COLUMNS), dtype=torch.int32, device=device)
        starts, slots = torch.randint(length, (rows,), device=device), torch.arange(rows, device=device)
        return (starts, slots, None, None, None, keys_of_tile(heads.width, _ITEM), pieces, at_once), {}

    return KernelCase("plan_kv_splits", f"{rows} × up to {length:,}", make, 2 * rows * _INT)


def _place(tokens: int, rows: int) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        table = torch.randint(2**20, (rows, 512), device=device)
        slots, positions = (torch.randint(n, (tokens,), device=device) for n in (rows, 512 * _BLOCK_SIZE))
        return (table, slots, positions, _BLOCK_SIZE, torch.empty(tokens, dtype=torch.int64, device=device)), {}

    return KernelCase("compute_slot_mapping", f"{tokens}", make, 4 * tokens * _INT)


def _cases(decode: Sequence[tuple[int, int]], chunk: Sequence[tuple[int, int, int]], heads: _Heads) -> list[KernelCase]:
    return [
        *(_decode(rows, length, heads) for rows, length in decode),
        *(_chunk(rows, tokens, before, heads) for rows, tokens, before in chunk),
        *(_parts(tokens, before, heads) for rows, tokens, before in chunk if rows == 1 and tokens < 128),
        *(_long(rows, tokens, before, heads) for rows, tokens, before in chunk),
        *(_gather(tokens + before, heads) for rows, tokens, before in chunk if rows == 1),
        *(_cut(rows, 4_096, heads) for rows in (1, 256)),
        *(_place(tokens, 256) for tokens in (1, 256, 8_192)),
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
SMALL_CASES = tuple(_cases(((2, 40),), ((1, 9, 5),), _SMALL))
