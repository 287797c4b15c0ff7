"""Cases of low-rank updates: projections of Llama-3.1-8B at rank 16, bf16, whose rows share an adapter or do not."""

from __future__ import annotations

import numpy as np
import torch

from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.attention_inputs import CacheWrite, PagedKV, QKNormRope
from quire.compute.kernels.reference.lora import LowRankWeights, RowUpdate, Scaling, Tiles
from quire.models.lora.step_tiles import GPU_TILE, tile_tokens
from quire.tools.bench.kernel_cases import ITEM, Arguments, KernelCase, normal

_QKV, _GATE_UP, _DOWN = (4_096, (4_096, 1_024, 1_024)), (4_096, (14_336, 14_336)), (14_336, (4_096,))


def _arguments(
    tokens: int, adapters: int, rank: int, columns: int, rows: tuple[int, ...], device: torch.device
) -> tuple[torch.Tensor, LowRankWeights, Tiles]:
    outputs, a_size = sum(rows), len(rows) * rank * columns
    memory = normal(device, adapters, a_size + outputs * (rank + 2))
    a = memory[:, :a_size].view(adapters, len(rows) * rank, columns)
    b = memory[:, a_size : a_size + outputs * rank].view(adapters, outputs, rank)
    factors, summands = memory[:, -2 * outputs : -outputs], memory[:, -outputs:]
    ranks = torch.full((adapters,), rank, dtype=torch.int64, device=device)
    of_tokens = 1 + np.arange(tokens) % adapters
    slots, tiled = tile_tokens(of_tokens, GPU_TILE)
    tiles = Tiles(*(torch.tensor(column, device=device) for column in (slots, tiled, of_tokens)))
    x = normal(device, tokens, columns)
    return x, LowRankWeights(a, b, ranks, rows, Scaling(factors, summands, torch.zeros_like(ranks))), tiles


def _shrink(tokens: int, adapters: int, rank: int, columns: int, rows: tuple[int, ...]) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        return _arguments(tokens, adapters, rank, columns, rows, device), {}

    moved = adapters * rank * len(rows) * columns + tokens * (columns + 2 * len(rows) * rank)
    return KernelCase(
        "lora_shrink", f"{tokens} × {columns} → {len(rows)}, {adapters} of rank {rank}", make, moved * ITEM
    )


def _linear_and_shrink(tokens: int, adapters: int, rank: int, columns: int, rows: tuple[int, ...]) -> KernelCase:
    outputs = sum(rows)

    def make(device: torch.device) -> Arguments:
        x, weights, tiles = _arguments(tokens, adapters, rank, columns, rows, device)
        weight = torch.randn(outputs, columns, dtype=x.dtype, device=device)
        return (x, kernel("pack_linear", device.type)(weight), None, weights, tiles), {}

    moved = (outputs + adapters * rank * len(rows)) * columns + tokens * (columns + outputs + 2 * len(rows) * rank)
    name = f"{tokens} × {columns} → {outputs}, {adapters} of rank {rank}"
    return KernelCase("linear_and_shrink", name, make, moved * ITEM, 2 * tokens * outputs * columns)


def _expand(tokens: int, adapters: int, rank: int, columns: int, rows: tuple[int, ...]) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        x, weights, tiles = _arguments(tokens, adapters, rank, columns, rows, device)
        low = kernel("lora_shrink", device.type)(x, weights, tiles)
        return (low, weights, tiles, torch.randn(tokens, sum(rows), dtype=x.dtype, device=device)), {}

    moved = adapters * rank * sum(rows) + 2 * tokens * (sum(rows) + len(rows) * rank)
    return KernelCase("lora_expand", f"{tokens} × {sum(rows)}, {adapters} of rank {rank}", make, moved * ITEM)


def _expand_silu_and_mul(tokens: int, adapters: int, rank: int, columns: int, rows: tuple[int, ...]) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        (low, weights, tiles, y), _ = _expand(tokens, adapters, rank, columns, rows).make(device)
        return (low, weights, tiles, y, y.new_empty((tokens, sum(rows) // 2))), {}

    moved = adapters * rank * sum(rows) + tokens * (sum(rows) * 3 // 2 + len(rows) * rank)
    return KernelCase(
        "lora_expand_silu_and_mul", f"{tokens} × {sum(rows)}, {adapters} of rank {rank}", make, moved * ITEM
    )


def _rms_norm(tokens: int, adapters: int, rank: int, columns: int, rows: tuple[int, ...]) -> KernelCase:
    (width,) = rows

    def make(device: torch.device) -> Arguments:
        (low, weights, tiles, y), _ = _expand(tokens, adapters, rank, columns, rows).make(device)
        x, weight = torch.randn_like(y), torch.randn(width, dtype=y.dtype, device=device)
        return (low, weights, tiles, x, weight, 1e-5, torch.empty_like(x), y), {}

    moved = adapters * rank * width + tokens * (4 * width + rank)
    return KernelCase("lora_rms_norm", f"{tokens} × {width}, {adapters} of rank {rank}", make, moved * ITEM)


def _qk_norm_rope_and_cache(tokens: int, adapters: int, rank: int, columns: int, rows: tuple[int, ...]) -> KernelCase:
    d = min(128, rows[2])
    heads, kv_heads, _ = (each // d for each in rows)

    def make(device: torch.device) -> Arguments:
        (low, weights, tiles, y), _ = _expand(tokens, adapters, rank, columns, rows).make(device)
        angle = torch.randn(tokens, d // 2, dtype=y.dtype, device=device)
        keys, values = torch.randn(2, 2 * tokens, 1, kv_heads, d, dtype=y.dtype, device=device)
        q, places = y.new_empty((tokens, heads, d)), torch.arange(tokens, device=device)
        norm_rope = QKNormRope(None, 0.0, angle, angle, RowUpdate(low, weights, tiles))
        return (y.view(tokens, -1, d), norm_rope, CacheWrite(PagedKV(keys, values), places), q), {}

    moved = adapters * rank * sum(rows) + tokens * (2 * sum(rows) + 3 * rank)
    name = f"{tokens} × ({heads} + 2·{kv_heads}) × {d}, {adapters} of rank {rank}"
    return KernelCase("qk_norm_rope_and_cache", name, make, moved * ITEM)


_SHAPES = tuple(
    (tokens, adapters, 16, *shape)
    for tokens, adapters in ((32, 1), (32, 8), (32, 32), (2_048, 1))
    for shape in (_QKV, _GATE_UP, _DOWN)
)
_BEHIND = {_QKV: _qk_norm_rope_and_cache, _GATE_UP: _expand_silu_and_mul, _DOWN: _rms_norm}
CASES = (
    *(_shrink(*shape) for shape in _SHAPES),
    *(_linear_and_shrink(*shape) for shape in _SHAPES),
    *(_expand(*shape) for shape in _SHAPES),
    *(_BEHIND[shape[3:]](*shape) for shape in _SHAPES),
)
SMALL_CASES = (
    _shrink(5, 2, 16, 64, (32, 16)),
    _linear_and_shrink(5, 2, 16, 64, (32, 16)),
    _expand(5, 2, 16, 64, (32, 16)),
    _expand_silu_and_mul(5, 2, 16, 64, (32, 32)),
    _rms_norm(5, 2, 16, 64, (32,)),
    _qk_norm_rope_and_cache(5, 2, 16, 64, (64, 32, 32)),
)
