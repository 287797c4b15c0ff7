"""Cases of the norms: bf16, the residual stream of Llama-3.1-8B and the heads of Qwen3's queries and keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.tools.bench.kernel_cases import Arguments, KernelCase

_ITEM = 2
_HIDDEN = 4_096
_HEADS, _HEAD = 40, 128


def _rms(tokens: int, width: int, *, added: bool) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        x, weight, delta = _normal(device, (tokens, width), (width,), (tokens, width))
        return (x, weight, 1e-5, torch.empty_like(x), delta if added else None), {}

    moved = (4 if added else 2) * tokens * width + width  # x and delta in, x and out out
    return KernelCase("rms_norm", f"{tokens} × {width}{' after +=' if added else ''}", make, moved * _ITEM)


def _rms_by_head(tokens: int, heads: int, width: int) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        x, weight = _normal(device, (tokens, heads, width), (heads, width))
        return (x, weight, 1e-6, torch.empty_like(x)), {}

    moved = 2 * tokens * heads * width + heads * width
    return KernelCase("rms_norm", f"{tokens} × {heads} × {width}", make, moved * _ITEM)


def _layer(tokens: int, width: int) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        x, weight, bias, delta = _normal(device, (tokens, width), (width,), (width,), (tokens, width))
        return (x, weight, bias, 1e-5, torch.empty_like(x), delta), {}

    return KernelCase("layer_norm", f"{tokens} × {width} after +=", make, (4 * tokens * width + 2 * width) * _ITEM)


def _normal(device: torch.device, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=torch.bfloat16, device=device) for shape in shapes]


def _cases(rows: Sequence[int], hidden: int, heads: int, head: int) -> tuple[KernelCase, ...]:
    return (
        *(_rms(tokens, hidden, added=added) for tokens in rows for added in (True, False)),
        *(_rms_by_head(tokens, heads, head) for tokens in rows),
        *(_layer(tokens, hidden) for tokens in rows),
    )


CASES = _cases((1, 128, 2_048, 8_192), _HIDDEN, _HEADS, _HEAD)
SMALL_CASES = _cases((3,), 64, 2, 16)
