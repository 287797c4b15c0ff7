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
    """`here`: how many of the experts there are weights of, as in a rank of several."""

    experts: int
    chosen: int
    hidden: int
    width: int
    here: int

    @property
    def name(self) -> str:
        return f"{self.experts} experts" if self.here == self.experts else f"{self.here} of {self.experts} experts"


_QWEN3_30B = _Mixture(128, 8, 2_048, 768, 128)
_HALF_OF_QWEN3_30B = _Mixture(128, 8, 2_048, 768, 64)


def _route(tokens: int, mixture: _Mixture) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        return (_logits(tokens, mixture, device), mixture.chosen, True, *_here(mixture)), {}

    moved = tokens * (mixture.experts * _ITEM + mixture.chosen * (_ITEM + 4))
    return KernelCase("route", f"{tokens} tokens to {mixture.chosen} of {mixture.name}", make, moved)


def _experts(tokens: int, mixture: _Mixture) -> KernelCase:
    """Counts the weights of as many experts as tokens that choose uniformly are expected to go to."""

    def make(device: torch.device) -> Arguments:
        pack = kernel("pack_experts", device.type)
        x = _normal(device, tokens, mixture.hidden)
        gate_up = _normal(device, mixture.here, 2 * mixture.width, mixture.hidden)
        down = _normal(device, mixture.here, mixture.hidden, mixture.width)
        numbers, weights = _routed(tokens, mixture, device)
        return (x, pack(gate_up), pack(down), numbers, weights, torch.empty_like(x), mixture.experts - mixture.here), {}

    touched = _touched(tokens, mixture)
    moved = round(touched * 3 * mixture.hidden * mixture.width) + 2 * tokens * mixture.hidden
    name = f"{tokens} tokens, {touched:.0f} of {mixture.name}"
    return KernelCase("experts", name, make, moved * _ITEM, _flops(tokens, mixture))


def _coded_experts(tokens: int, mixture: _Mixture, bits: int) -> KernelCase:
    """The same of codes with scales in groups of _GROUP columns."""

    def make(device: torch.device) -> Arguments:
        gate_up = _coded(mixture.here, 2 * mixture.width, mixture.hidden, bits, device)
        down = _coded(mixture.here, mixture.hidden, mixture.width, bits, device)
        numbers, weights = _routed(tokens, mixture, device)
        x = _normal(device, tokens, mixture.hidden)
        return (x, gate_up, down, numbers, weights, torch.empty_like(x), mixture.experts - mixture.here), {}

    touched = _touched(tokens, mixture)
    moved = round(touched * 3 * mixture.hidden * mixture.width * (bits / 8 + 4 / _GROUP)) + 4 * tokens * mixture.hidden
    name = f"{bits} bits, {tokens} tokens, {touched:.0f} of {mixture.name}"
    return KernelCase("coded_experts", name, make, moved, _flops(tokens, mixture))


def _coded(experts: int, rows: int, columns: int, bits: int, device: torch.device) -> GroupedWeight:
    shape = (experts, rows, columns * bits // 8)
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    scales = torch.rand((experts, rows, columns // _GROUP), device=device).add_(0.5).div_(2**bits * columns**0.5)
    return GroupedWeight(codes, scales, None, bits, _GROUP, None)


def _routed(tokens: int, mixture: _Mixture, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's experts, and their weights."""
    logits = _logits(tokens, mixture, device)
    weights, numbers = kernel("route", device.type)(logits, mixture.chosen, True, *_here(mixture))
    return numbers, weights


def _here(mixture: _Mixture) -> tuple[int, ...]:
    """What `route` is told of the experts that are here, if others are not."""
    return () if mixture.here == mixture.experts else (0, mixture.here)


def _touched(tokens: int, mixture: _Mixture) -> float:
    """Experts here that tokens go to, as may be expected."""
    return mixture.here * (1 - (1 - mixture.chosen / mixture.experts) ** tokens)


def _flops(tokens: int, mixture: _Mixture) -> int:
    return 6 * tokens * mixture.chosen * mixture.hidden * mixture.width * mixture.here // mixture.experts


def _logits(tokens: int, mixture: _Mixture, device: torch.device) -> torch.Tensor:
    return _normal(device, tokens, mixture.experts)


def _normal(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=device).div_(shape[-1] ** 0.25)


def _cases(tokens: Sequence[int], mixture: _Mixture) -> tuple[KernelCase, ...]:
    return (
        *(case(count, mixture) for case in (_route, _experts) for count in tokens),
        *(_coded_experts(count, mixture, bits) for bits in (4, 8) for count in tokens),
    )


CASES = (
    *_cases((1, 8, 32, 128, 512, 2_048, 8_192), _QWEN3_30B),
    *_cases((1, 8, 32, 128, 2_048), _HALF_OF_QWEN3_30B),
)
SMALL_CASES = (*_cases((3,), _Mixture(4, 2, 64, 32, 4)), *_cases((3, 200), _Mixture(4, 2, 64, 32, 2)))
