"""Cases of a mixture of experts, Qwen3-30B-A3B's, each token going to experts drawn uniformly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.experts import ExpertAdapters, StackedLowRank
from quire.compute.kernels.reference.linear import CODEBOOKS, CodebookWeight, GroupedWeight, ScaledWeight
from quire.compute.kernels.reference.quantized_rows import LARGEST
from quire.compute.kernels.routing import Routing
from quire.tools.bench.kernel_cases import ITEM, Arguments, KernelCase, scaled_normal

_GROUP = 32
_RANK = 16


@dataclass(frozen=True)
class _Mixture:
    """A mixture of experts. `here` is how many experts have their weights here, as in one rank of several."""

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
_GPT_OSS_20B = _Mixture(32, 4, 2_880, 2_880, 32)


def _route(tokens: int, mixture: _Mixture) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        return (_logits(tokens, mixture, device), Routing(mixture.chosen, True), *_here(mixture)), {}

    moved = tokens * (mixture.experts * ITEM + mixture.chosen * (ITEM + 4))
    return KernelCase("route", f"{tokens} tokens to {mixture.chosen} of {mixture.name}", make, moved)


def _route_by_scores(tokens: int, mixture: _Mixture, routing: Routing) -> KernelCase:
    """A router other than Qwen3's; a correction is for the choice alone."""

    def make(device: torch.device) -> Arguments:
        correction = torch.randn(mixture.experts, device=device) if routing.correction else None
        return (_logits(tokens, mixture, device), routing, 0, None, correction), {}

    moved = tokens * (mixture.experts * ITEM + routing.chosen * (ITEM + 4))
    name = f"{tokens} tokens to {routing.chosen} of {mixture.experts} experts, {routing.scoring}"
    return KernelCase("route", f"{name}, {routing.groups} groups" if routing.groups > 1 else name, make, moved)


def _add_gated(tokens: int, width: int, gated: bool) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        gate = scaled_normal(device, tokens, 1) if gated else None
        return (scaled_normal(device, tokens, width), scaled_normal(device, tokens, width), gate), {}

    name = f"{tokens} tokens of {width}{', gated' if gated else ''}"
    return KernelCase("add_gated", name, make, 3 * tokens * width * ITEM)


def _experts(tokens: int, mixture: _Mixture) -> KernelCase:
    """A layer of experts. The bytes count as many experts as tokens that choose uniformly are expected to go to."""

    def make(device: torch.device) -> Arguments:
        pack = kernel("pack_experts", device.type)
        x = scaled_normal(device, tokens, mixture.hidden)
        gate_up = scaled_normal(device, mixture.here, 2 * mixture.width, mixture.hidden)
        down = scaled_normal(device, mixture.here, mixture.hidden, mixture.width)
        numbers, weights = _routed(tokens, mixture, device)
        return (x, pack(gate_up), pack(down), numbers, weights, torch.empty_like(x), mixture.experts - mixture.here), {}

    touched = _touched(tokens, mixture)
    moved = round(touched * 3 * mixture.hidden * mixture.width) + 2 * tokens * mixture.hidden
    name = f"{tokens} tokens, {touched:.0f} of {mixture.name}"
    return KernelCase("experts", name, make, moved * ITEM, _flops(tokens, mixture))


def _adapted(plain: KernelCase, tokens: int, mixture: _Mixture, adapters: int) -> KernelCase:
    """The case `plain` with adapters of rank _RANK; each token has one of these."""

    def make(device: torch.device) -> Arguments:
        arguments, _ = plain.make(device)
        return (*arguments, _adapters(tokens, mixture, adapters, device)), {}

    own = adapters * _touched(tokens / adapters, mixture)
    moved = plain.bytes + round(own * _RANK * 3 * (mixture.hidden + mixture.width)) * ITEM
    return KernelCase(f"adapted_{plain.op}", f"{plain.name}, {adapters} of rank {_RANK}", make, moved, plain.flops)


def _group_adapted_pairs(tokens: int, mixture: _Mixture, adapters: int) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        numbers, _ = _routed(tokens, mixture, device)
        changed = _adapters(tokens, mixture, adapters, device)
        return (numbers, changed.slots, changed.gate_up), {}

    moved = tokens * (8 + 2 * 4 * mixture.chosen)
    return KernelCase("group_adapted_pairs", f"{tokens} tokens, {mixture.name}, {adapters} adapters", make, moved)


def _lora_of_pairs(tokens: int, mixture: _Mixture, adapters: int, first: bool) -> KernelCase:
    """The low-rank part of the first product, or of the second."""

    def make(device: torch.device) -> Arguments:
        numbers, _ = _routed(tokens, mixture, device)
        changed = _adapters(tokens, mixture, adapters, device)
        pairs = kernel("group_adapted_pairs", device.type)(numbers, changed.slots, changed.gate_up)
        rows, columns = (tokens, mixture.hidden) if first else (numbers.numel(), mixture.width)
        weights, sharing = (changed.gate_up, mixture.chosen) if first else (changed.down, 1)
        return (scaled_normal(device, rows, columns), weights, pairs, sharing), {}

    hidden, width, pairs = mixture.hidden, mixture.width, tokens * mixture.chosen
    of_expert = 2 * (hidden + width) if first else hidden + width
    moved = round(adapters * _touched(tokens / adapters, mixture) * _RANK * of_expert)
    moved += tokens * hidden + pairs * 2 * width if first else pairs * (width + hidden)
    name = f"{'gate and up' if first else 'down'}, {tokens} tokens, {mixture.name}, {adapters} of rank {_RANK}"
    return KernelCase("lora_of_pairs", name, make, moved * ITEM)


def _adapters(tokens: int, mixture: _Mixture, adapters: int, device: torch.device) -> ExpertAdapters:
    slots = torch.arange(tokens, device=device) % adapters + 1

    def stacked(modules: int, columns: int, outputs: int) -> StackedLowRank:
        a = scaled_normal(device, adapters, mixture.here, modules * _RANK, columns)
        b = scaled_normal(device, adapters, mixture.here, outputs, _RANK)
        return StackedLowRank(a, b, torch.full((adapters, mixture.here), _RANK, device=device))

    gate_up = stacked(2, mixture.hidden, 2 * mixture.width)
    return ExpertAdapters(slots, gate_up, stacked(1, mixture.width, mixture.hidden))


def _quantized_experts(tokens: int, mixture: _Mixture, bits: int | None) -> KernelCase:
    """A layer of experts whose weights are codes of `bits` bits with scales in groups of _GROUP columns; for None, fp8
    numbers with a scale for each output."""

    def make(device: torch.device) -> Arguments:
        def weight(rows: int, columns: int) -> GroupedWeight | ScaledWeight:
            if bits is None:
                return _scaled(mixture.here, rows, columns, device)
            return _coded(mixture.here, rows, columns, bits, device)

        numbers, weights = _routed(tokens, mixture, device)
        x = scaled_normal(device, tokens, mixture.hidden)
        gate_up, down = weight(2 * mixture.width, mixture.hidden), weight(mixture.hidden, mixture.width)
        return (x, gate_up, down, numbers, weights, torch.empty_like(x), mixture.experts - mixture.here), {}

    touched, weight_bytes = _touched(tokens, mixture), 1.0 if bits is None else bits / 8 + 4 / _GROUP
    moved = round(touched * 3 * mixture.hidden * mixture.width * weight_bytes) + 4 * tokens * mixture.hidden
    name = f"{'fp8' if bits is None else f'{bits} bits'}, {tokens} tokens, {touched:.0f} of {mixture.name}"
    return KernelCase("coded_experts", name, make, moved, _flops(tokens, mixture))


def _mxfp4_experts(tokens: int, mixture: _Mixture) -> KernelCase:
    """A layer of experts in mxfp4."""

    def make(device: torch.device) -> Arguments:
        def weight(rows: int, columns: int, gated: bool) -> Any:
            shape = (mixture.here, rows, columns // 2)
            codes = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
            exponents = torch.randint(117, 120, (*shape[:2], columns // 32), dtype=torch.uint8, device=device)
            table = torch.tensor(CODEBOOKS["e2m1"], device=device)
            stack = CodebookWeight(codes, exponents.view(torch.float8_e8m0fnu), None, table, 32, "e2m1")
            return kernel("pack_coded_experts", device.type)(stack, gated, torch.bfloat16)

        numbers, weights = _routed(tokens, mixture, device)
        x = scaled_normal(device, tokens, mixture.hidden)
        both = weight(2 * mixture.width, mixture.hidden, True), weight(mixture.hidden, mixture.width, False)
        return (x, *both, numbers, weights, torch.empty_like(x), mixture.experts - mixture.here), {}

    touched = _touched(tokens, mixture)
    moved = round(touched * 3 * mixture.hidden * mixture.width * 17 / 32) + 4 * tokens * mixture.hidden
    name = f"mxfp4, {tokens} tokens, {touched:.0f} of {mixture.name}"
    return KernelCase("coded_experts", name, make, moved, _flops(tokens, mixture))


def _scaled(experts: int, rows: int, columns: int, device: torch.device) -> ScaledWeight:
    wide = scaled_normal(device, experts, rows, columns).mul_(16 * columns**0.25)
    most = LARGEST[torch.float8_e4m3fn]
    codes = wide.clamp_(-most, most).to(torch.float8_e4m3fn)  # of what is larger, some versions of torch make NaN
    scales = torch.rand((experts, rows, 1), device=device).add_(0.5).div_(16 * columns**0.5)
    return ScaledWeight(codes, scales, (1, columns))


def _coded(experts: int, rows: int, columns: int, bits: int, device: torch.device) -> GroupedWeight:
    shape = (experts, rows, columns * bits // 8)
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    scales = torch.rand((experts, rows, columns // _GROUP), device=device).add_(0.5).div_(2**bits * columns**0.5)
    return GroupedWeight(codes, scales, None, bits, _GROUP, None)


def _routed(tokens: int, mixture: _Mixture, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token, and their weights."""
    logits = _logits(tokens, mixture, device)
    weights, numbers = kernel("route", device.type)(logits, Routing(mixture.chosen, True), *_here(mixture))
    return numbers, weights


def _here(mixture: _Mixture) -> tuple[int, ...]:
    """The arguments of `route` that tell which experts are here, if others are not."""
    return () if mixture.here == mixture.experts else (0, mixture.here)


def _touched(tokens: float, mixture: _Mixture) -> float:
    """How many of the experts here are expected to get tokens."""
    return mixture.here * (1 - float((1 - mixture.chosen / mixture.experts) ** tokens))


def _flops(tokens: int, mixture: _Mixture) -> int:
    return 6 * tokens * mixture.chosen * mixture.hidden * mixture.width * mixture.here // mixture.experts


def _logits(tokens: int, mixture: _Mixture, device: torch.device) -> torch.Tensor:
    return scaled_normal(device, tokens, mixture.experts)


def _cases(tokens: Sequence[int], mixture: _Mixture) -> tuple[KernelCase, ...]:
    return (
        *(case(count, mixture) for case in (_route, _experts) for count in tokens),
        *(_quantized_experts(count, mixture, bits) for bits in (4, 8, None) for count in tokens),
    )


def _adapted_cases(sizes: Sequence[tuple[int, int]], mixture: _Mixture) -> tuple[KernelCase, ...]:
    """Cases with adapters; `sizes` has pairs of tokens and adapters."""
    return (
        *(_group_adapted_pairs(tokens, mixture, adapters) for tokens, adapters in sizes),
        *(_lora_of_pairs(tokens, mixture, adapters, first) for first in (True, False) for tokens, adapters in sizes),
        *(_adapted(_experts(tokens, mixture), tokens, mixture, adapters) for tokens, adapters in sizes),
        *(
            _adapted(_quantized_experts(tokens, mixture, bits), tokens, mixture, adapters)
            for bits in (4, None)
            for tokens, adapters in sizes
        ),
    )


_DEEPSEEK = Routing(8, True, "sigmoid", 2.5, 1e-20, 8, 4, of_best_two=True, correction=True)
_OTHER_ROUTINGS = (
    Routing(8, True, "sigmoid", 2.5, correction=True),
    _DEEPSEEK,
    Routing(6, True, "sqrtsoftplus", 1.5, correction=True, cap=30.0),
    Routing(2, False, "sparsemixer", margin=0.01),
)


def _router_cases(tokens: Sequence[int], mixture: _Mixture) -> tuple[KernelCase, ...]:
    return (
        *(_route_by_scores(count, mixture, routing) for routing in _OTHER_ROUTINGS for count in tokens),
        *(_add_gated(count, mixture.hidden, gated) for gated in (False, True) for count in tokens),
    )


CASES = (
    *_router_cases((1, 32, 2_048), _Mixture(256, 8, 4_096, 1_536, 256)),
    *_cases((1, 8, 32, 128, 512, 2_048, 8_192), _QWEN3_30B),
    *_cases((1, 8, 32, 128, 2_048), _HALF_OF_QWEN3_30B),
    *(_mxfp4_experts(tokens, _GPT_OSS_20B) for tokens in (1, 8, 32, 128, 512, 2_048, 8_192)),
    *_adapted_cases(((1, 1), (32, 1), (32, 8), (128, 8), (2_048, 1), (8_192, 1)), _QWEN3_30B),
)
SMALL_CASES = (
    *_router_cases((3,), _Mixture(16, 8, 64, 32, 16)),
    *_cases((3,), _Mixture(4, 2, 64, 32, 4)),
    *_cases((3, 20, 200), _Mixture(4, 2, 64, 32, 2)),
    *(_mxfp4_experts(tokens, _Mixture(4, 2, 64, 64, 4)) for tokens in (1, 3, 200)),
    *_adapted_cases(((3, 2), (200, 1)), _Mixture(4, 2, 64, 32, 4)),
)
