"""Cases of what is done to queries, keys and values before attention: bf16, the heads of Llama-3.1-8B, and those of
Qwen3 with their norms."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.tools.bench.kernel_cases import Arguments, KernelCase

_ITEM, _INT = 2, 8
_BLOCK_SIZE, _HEAD = 16, 128


def _qk_norm_rope_and_cache(tokens: int, heads: int, kv_heads: int, d: int, *, normed: bool) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        blocks = 2 * (tokens // _BLOCK_SIZE + 1)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, dtype=torch.bfloat16, device=device)

        qkv, norm = normal(tokens, heads + 2 * kv_heads, d), normal(heads + kv_heads, d) if normed else None
        angles = torch.rand(tokens, d // 2, device=device) * 6.3
        keys, values = (normal(blocks, _BLOCK_SIZE, kv_heads, d) for _ in range(2))
        slot_mapping = torch.randperm(blocks * _BLOCK_SIZE, device=device)[:tokens]
        q = torch.empty(tokens, heads, d, dtype=qkv.dtype, device=device)
        angle = angles.cos().bfloat16(), angles.sin().bfloat16()
        return (qkv, norm, 1e-6, *angle, None, keys, values, slot_mapping, q), {}

    moved = 2 * tokens * (heads + 2 * kv_heads) * d + tokens * d + normed * (heads + kv_heads) * d
    name = f"{tokens} × ({heads} + 2·{kv_heads}) × {d}{', normed' if normed else ''}"
    return KernelCase("qk_norm_rope_and_cache", name, make, moved * _ITEM + tokens * _INT)


def _cases(rows: Sequence[int], heads: int, kv_heads: int, d: int) -> tuple[KernelCase, ...]:
    return tuple(
        _qk_norm_rope_and_cache(tokens, heads, kv_heads, d, normed=normed)
        for normed in (False, True)
        for tokens in rows
    )


CASES = _cases((1, 32, 256, 2_048, 8_192), 32, 8, _HEAD)
SMALL_CASES = _cases((3,), 4, 2, 16)
