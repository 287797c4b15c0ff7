"""Cases of products with quantized weights: those of Llama-3.1-8B."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.linear import ScaledWeight
from quire.compute.kernels.reference.quantized_rows import quantize_rows as reference_codes
from quire.tools.bench.kernel_cases import ITEM, Arguments, KernelCase, scaled_normal

_GROUP = 128
_WEIGHTS = ((6_144, 4_096), (4_096, 4_096), (4_096, 14_336))
_GATED = (28_672, 4_096)


def _quantize(rows: int, columns: int) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        return (scaled_normal(device, rows, columns), torch.float8_e4m3fn, columns), {}

    return KernelCase("quantize_rows", f"{rows} × {columns}", make, rows * columns * (ITEM + 1), 0)


def _norm(rows: int, width: int) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        x, delta = scaled_normal(device, rows, width), scaled_normal(device, rows, width)
        return (x, x.new_ones(width), 1e-5, torch.float8_e4m3fn, delta), {}

    moved = rows * width * (3 * ITEM + 1)  # x and delta in, x and codes out
    return KernelCase("rms_norm_quantized", f"{rows} × {width} after +=", make, moved)


def _scaled(rows: int, outputs: int, columns: int, gate: bool, dtype: torch.dtype) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        codes, scales = reference_codes(scaled_normal(device, outputs, columns), dtype, columns)
        weight = ScaledWeight(codes, scales, (1, columns))
        return _arguments(device, rows, outputs, columns, weight, gate), {}

    return _case("scaled_linear", str(dtype).split(".")[1], rows, outputs, columns, gate, make, 1.0)


def _grouped(rows: int, outputs: int, columns: int, gate: bool) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        codes = torch.randint(0, 16, (outputs, columns), dtype=torch.uint8, device=device)
        scales = torch.rand(outputs, columns // _GROUP, device=device).add_(0.5).div_(columns**0.5)
        weight = kernel("pack_grouped", device.type)(codes, scales, None, 4, _GROUP, None, gate)
        return _arguments(device, rows, outputs, columns, weight, gate), {}

    return _case("grouped_linear", "4 bits", rows, outputs, columns, gate, make, 0.5 + ITEM / _GROUP)


def _codebook(rows: int, outputs: int, columns: int, gate: bool, values: str, group: int) -> KernelCase:
    def make(device: torch.device) -> Arguments:
        codes = torch.randint(0, 16, (outputs, columns), dtype=torch.uint8, device=device)
        scales = torch.rand(outputs, columns // group, device=device).add_(0.5).div_(columns**0.5)
        if values == "e2m1":
            scales = scales.to(torch.float8_e8m0fnu)
        weight = kernel("pack_codebook", device.type)(codes, scales, None, values, group)
        return _arguments(device, rows, outputs, columns, weight, gate), {}

    return _case(
        "codebook_linear", values, rows, outputs, columns, gate, make, 0.5 + (1 if values == "e2m1" else 4) / group
    )


def _case(
    op: str, kind: str, rows: int, outputs: int, columns: int, gate: bool, make: object, each: float
) -> KernelCase:
    """`each`: bytes of a weight."""
    made = outputs // 2 if gate else outputs
    moved = int(outputs * columns * each) + rows * (made + columns) * ITEM
    name = f"{kind}, {rows} rows, {outputs} × {columns}"
    return KernelCase(f"{op}_silu_and_mul" if gate else op, name, make, moved, 2 * rows * outputs * columns)  # type: ignore[arg-type]


def _arguments(
    device: torch.device, rows: int, outputs: int, columns: int, weight: object, gate: bool
) -> tuple[object, ...]:
    x = scaled_normal(device, rows, columns)
    return (x, weight, None, x.new_empty(rows, outputs // 2)) if gate else (x, weight, None)


def _cases(rows: Sequence[int], weights: Sequence[tuple[int, int]], gated: tuple[int, int]) -> tuple[KernelCase, ...]:
    shapes = [*((*weight, False) for weight in weights), (*gated, True)]
    return (
        *(_quantize(count, weights[0][1]) for count in rows),
        *(_norm(count, weights[0][1]) for count in rows),
        *(_scaled(count, *shape, torch.float8_e4m3fn) for count in rows for shape in shapes),
        *(_scaled(count, *shape, torch.int8) for count in rows for shape in shapes),
        *(_grouped(count, *shape) for count in rows for shape in shapes),
        *(_codebook(count, *shape, "nf4", 64) for count in rows for shape in shapes),
        *(_codebook(count, *shape, "e2m1", 32) for count in rows for shape in shapes),
    )


CASES = _cases((1, 8, 32, 128, 256), _WEIGHTS, _GATED)
SMALL_CASES = (
    *_cases((3,), ((64, 128),), (128, 128)),
    *(_grouped(rows, 128, 256, gate) for rows in (3, 20) for gate in (False, True)),  # of packed weights
)
