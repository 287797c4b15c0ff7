"""Cases of matrix products: bf16, the weights of Llama-3.1-8B."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.compute.kernels.dispatch import kernel
from quire.tools.bench.kernel_cases import Arguments, KernelCase

_ITEM = 2
_WEIGHTS = ((6_144, 4_096), (4_096, 4_096), (28_672, 4_096), (4_096, 14_336), (128_256, 4_096))
_GATED = (28_672, 4_096)


def _plain(rows: int, outputs: int, columns: int) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        x, weight = _normal(device, (rows, columns), (outputs, columns))
        return (x, kernel("pack_linear", device.type)(weight), None), {}

    moved = outputs * columns + rows * (outputs + columns)
    return KernelCase(
        "linear", f"{rows} rows, {outputs} × {columns}", make, moved * _ITEM, 2 * rows * outputs * columns
    )


def _gated(rows: int, outputs: int, columns: int) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        x, weight = _normal(device, (rows, columns), (outputs, columns))
        out = torch.empty(rows, outputs // 2, dtype=x.dtype, device=device)
        return (x, kernel("pack_linear", device.type)(weight), None, out), {}

    moved = outputs * columns + rows * (outputs // 2 + columns)
    return KernelCase(
        "linear_silu_and_mul", f"{rows} rows, {outputs} × {columns}", make, moved * _ITEM, 2 * rows * outputs * columns
    )


def _normal(device: torch.device, *shapes: tuple[int, int]) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=torch.bfloat16, device=device).div_(shape[1] ** 0.25) for shape in shapes]


def _cases(rows: Sequence[int], weights: Sequence[tuple[int, int]], gated: tuple[int, int]) -> tuple[KernelCase, ...]:
    return (
        *(_plain(count, *weight) for count in rows for weight in weights),
        *(_gated(count, *gated) for count in rows),
    )


CASES = _cases((1, 8, 32, 64, 128, 256, 2_048), _WEIGHTS, _GATED)
SMALL_CASES = _cases((3,), ((64, 32),), (64, 32))
