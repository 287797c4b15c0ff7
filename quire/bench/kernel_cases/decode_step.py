"""Cases of steps of single tokens, from projected heads to attention: bf16, the heads of Llama-3.1-8B, and those of
Qwen3-0.6B with their norms."""

from __future__ import annotations

import torch

from quire.bench.kernel_cases import Arguments, KernelCase
from quire.kernels.reference import paged_rows

_ITEM, _BLOCK_SIZE, _SCALE = 2, 16, 0.1


def _step(rows: int, length: int, heads: int, kv_heads: int, d: int, *, normed: bool) -> KernelCase:
    """Each row's one token sees `length`, itself included."""

    def make(device: torch.device) -> Arguments:
        from quire.kernels.triton.attention.decode import FEWEST, keys_of_tile, spare_pieces

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, dtype=torch.bfloat16, device=device)

        each = -(-length // _BLOCK_SIZE)
        keys, values = (normal(1 + rows * each, _BLOCK_SIZE, kv_heads, d) for _ in range(2))
        table = 1 + torch.randperm(rows * each, device=device).view(rows, each)
        room = rows + spare_pieces(kv_heads, device)
        pieces = torch.zeros((room, paged_rows.PIECE_COLUMNS), dtype=torch.int32)
        starts, tile = torch.full((rows,), length - 1), keys_of_tile(d, _ITEM)
        paged_rows.cut_contexts(starts, torch.arange(rows), None, None, None, tile, pieces, FEWEST)
        partials = paged_rows.new_partials(room, heads, kv_heads, d, device)
        norm = normal(heads + kv_heads, d) if normed else None
        angles = torch.rand(rows, d // 2, device=device) * 6.3
        rule = (norm, 1e-6, angles.cos().bfloat16(), angles.sin().bfloat16())
        qkv = normal(rows, heads + 2 * kv_heads, d)
        return (qkv, *rule, keys, values, table, pieces.to(device), partials, normal(rows, heads, d), _SCALE), {}

    moved = 2 * rows * ((length + 1) * kv_heads + heads) * d + rows * d + normed * (heads + kv_heads) * d
    name = f"{rows} × {length:,}, {heads}/{kv_heads} × {d}{', normed' if normed else ''}"
    return KernelCase("rotate_and_attend", name, make, moved * _ITEM)


CASES = (
    *(_step(rows, length, 32, 8, 128, normed=False) for rows, length in ((1, 190), (32, 190), (32, 1_024), (256, 190))),
    *(_step(rows, 190, 16, 8, 128, normed=True) for rows in (1, 32, 256)),
)
SMALL_CASES = tuple(_step(2, 40, 4, 2, 64, normed=normed) for normed in (False, True))
