"""Cases of the activations: bf16, as wide as Llama-3.1-8B's MLP and Gemma's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.tools.bench.kernel_cases import Arguments, KernelCase

_ITEM = 2
_WIDTH = 14_336
_VOCABULARY = 256_000


def _gated(op: str, tokens: int, width: int) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        x = torch.randn(tokens, 2 * width, dtype=torch.bfloat16, device=device)
        return (x, torch.empty(tokens, width, dtype=x.dtype, device=device)), {}

    return KernelCase(op, f"{tokens} × {width}", make, 3 * tokens * width * _ITEM)


def _plain(tokens: int, width: int) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        x = torch.randn(tokens, width, dtype=torch.bfloat16, device=device)
        return (x, torch.empty_like(x)), {}

    return KernelCase("gelu", f"{tokens} × {width}", make, 2 * tokens * width * _ITEM)


def _capped(tokens: int, width: int) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        return (torch.randn(tokens, width, dtype=torch.bfloat16, device=device), 30.0), {}

    return KernelCase("soft_cap", f"{tokens} × {width}", make, 2 * tokens * width * _ITEM)


def _cases(rows: Sequence[int], width: int, vocabulary: int) -> tuple[KernelCase, ...]:
    return (
        *(_gated("silu_and_mul", tokens, width) for tokens in rows),
        *(_gated("gelu_and_mul", tokens, width) for tokens in rows),
        *(_plain(tokens, width) for tokens in rows),
        _capped(rows[0], vocabulary),
    )


CASES = _cases((1, 128, 2_048, 8_192), _WIDTH, _VOCABULARY)
SMALL_CASES = _cases((3,), 64, 100)
