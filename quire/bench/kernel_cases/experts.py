"""Cases of a mixture of experts: bf16, Qwen3-30B-A3B's, each token going to experts drawn uniformly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.bench.kernel_cases import Arguments, KernelCase
from quire.kernels.dispatch import kernel
from quire.kernels.reference.grouped_linear import GroupedWeight

_ITEM = 2
_GROUP = 32


@dataclass(frozen=True)
class _Mixture:
    experts: int
    chosen: int
    hidden: int
    width: int


_QWEN3_30B = _Mixture(128, 8, 2_048, 768)


def _route(tokens: int, mixture: _Mixture) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        return (_logits(tokens, mixture, device), mixture.chosen, True), {}

    moved = tokens * (mixture.experts * _ITEM + mixture.chosen * (_ITEM + 4))
    return KernelCase("route", f"{tokens} tokens to {mixture.chosen} of {mixture.experts}", make, moved)


def _experts(tokens: int, mixture: _Mixture) -> KernelCase:
    """Counts the weights of as many experts as tokens that choose uniformly are expected to go to."""

    def make(device: torch.device) -> Arguments:
        pack = kernel("pack_experts", device.type)
        x = _normal(device, tokens, mixture.hidden)
        gate_up = _normal(device, mixture.experts, 2 * mixture.width, mixture.hidden)
        down = _normal(device, mixture.experts, mixture.hidden, mixture.width)
        weights, numbers = kernel("route", device.type)(_logits(tokens, mixture, device), mixture.chosen, True)
        return (x, pack(gate_up), pack(down), numbers, weights, torch.empty_like(x)), {}

    touched = mixture.experts * (1 - (1 - mixture.chosen / mixture.experts) ** tokens)
    moved = round(touched * 3 * mixture.hidden * mixture.width) + 2 * tokens * mixture.hidden
    flops = 6 * tokens * mixture.chosen * mixture.hidden * mixture.width
    return KernelCase(
        "experts", f"{tokens} tokens, {touched:.0f} of {mixture.experts} experts", make, moved * _ITEM, flops
    )


def _coded_experts(tokens: int, mixture: _Mixture, bits: int) -> KernelCase:
    """The same of codes with scales in groups of _GROUP columns."""

    def make(device: torch.device) -> Arguments:
        gate_up = _coded(mixture.experts, 2 * mixture.width, mixture.hidden, bits, device)
        down = _coded(mixture.experts, mixture.hidden, mixture.width, bits, device)
        weights, numbers = kernel("route", device.type)(_logits(tokens, mixture, device), mixture.chosen, True)
        x = _normal(device, tokens, mixture.hidden)
        return (x, gate_up, down, numbers, weights, torch.empty_like(x)), {}

    touched = mixture.experts * (1 - (1 - mixture.chosen / mixture.experts) ** tokens)
    moved = round(touched * 3 * mixture.hidden * mixture.width * (bits / 8 + 4 / _GROUP)) + 4 * tokens * mixture.hidden
    flops = 6 * tokens * mixture.chosen * mixture.hidden * mixture.width
    name = f"{bits} bits, {tokens} tokens, {touched:.0f} of {mixture.experts} experts"
    return KernelCase("coded_experts", name, make, moved, flops)


def _coded(experts: int, rows: int, columns: int, bits: int, device: torch.device) -> GroupedWeight:
    shape = (experts, rows, columns * bits // 8)
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    scales = torch.rand((experts, rows, columns // _GROUP), device=device).add_(0.5).div_(2**bits * columns**0.5)
    return GroupedWeight(codes, scales, None, bits, _GROUP, None)


def _logits(tokens: int, mixture: _Mixture, device: torch.device) -> torch.Tensor:
    return _normal(device, tokens, mixture.experts)


def _normal(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=device).div_(shape[-1] ** 0.25)


def _cases(tokens: Sequence[int], mixture: _Mixture) -> tuple[KernelCase, ...]:
    return (
        *(case(count, mixture) for case in (_route, _experts) for count in tokens),
        *(_coded_experts(count, mixture, bits) for bits in (4, 8) for count in tokens),
    )


CASES = _cases((1, 8, 32, 128, 512, 2_048, 8_192), _QWEN3_30B)
SMALL_CASES = _cases((3,), _Mixture(4, 2, 64, 32))
