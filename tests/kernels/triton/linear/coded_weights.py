"""Random weights of every scheme, in the reference's form."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.compute.kernels.reference.experts import Coded
from quire.compute.kernels.reference.linear import ScaledWeight, pack_codebook, pack_grouped
from quire.compute.kernels.reference.quantized_rows import LARGEST, quantize_rows


def codebook(rows: int, columns: int, seed: int, device: str, values: str, group: int) -> Coded:
    seeded = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, columns), generator=seeded, dtype=torch.uint8).to(device)
    factors = None
    if group == 32:
        exponents = torch.randint(119, 122, (rows, columns // group), generator=seeded, dtype=torch.uint8)
        scales = exponents.view(torch.float8_e8m0fnu)
    else:
        scales = (torch.rand(rows, columns // group, generator=seeded) + 0.5) / 16
    if group == 16:
        scales, factors = scales.to(torch.float8_e4m3fn), (torch.rand(rows, generator=seeded) + 0.5).to(device)
    return pack_codebook(codes, scales.to(device), factors, values, group)


def integers(rows: int, columns: int, seed: int, device: str, bits: int, group: int, symmetric: bool) -> Coded:
    seeded = torch.Generator().manual_seed(seed)
    most = 1 << bits
    codes = torch.randint(0, most, (rows, columns), generator=seeded, dtype=torch.uint8).to(device)
    scales = ((torch.rand(rows, columns // group, generator=seeded) + 0.5) / most / 2).to(device)
    zeros = torch.randint(most // 4, 3 * most // 4, scales.shape, generator=seeded, dtype=torch.uint8).to(device)
    return pack_grouped(codes, scales, None if symmetric else zeros, bits, group, None)


def scaled(rows: int, columns: int, seed: int, device: str, dtype: torch.dtype, block: int) -> Coded:
    dense = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) / columns**0.5
    if block == 1:
        return ScaledWeight(*(part.to(device) for part in quantize_rows(dense, dtype, columns)), (1, columns))
    down, across = -(-rows // block), -(-columns // block)
    scales = torch.rand(down, across, generator=torch.Generator().manual_seed(seed)) / 1e4 + 1e-4
    wide = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 100
    codes = wide.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)  # of what is larger, some versions of torch make NaN
    return ScaledWeight(codes.to(device), scales.to(device), (block, block))


CODED: dict[str, Callable[[int, int, int, str], Coded]] = {
    "4 bits, groups of 32": partial(integers, bits=4, group=32, symmetric=False),
    "4 bits, groups of 128, symmetric": partial(integers, bits=4, group=128, symmetric=True),
    "8 bits, groups of 64": partial(integers, bits=8, group=64, symmetric=False),
    "8 bits, groups of 16": partial(integers, bits=8, group=16, symmetric=True),
    "nf4, groups of 64": partial(codebook, values="nf4", group=64),
    "mxfp4": partial(codebook, values="e2m1", group=32),
    "nvfp4": partial(codebook, values="e2m1", group=16),
    "fp8, channels": partial(scaled, dtype=torch.float8_e4m3fn, block=1),
    "fp8, blocks": partial(scaled, dtype=torch.float8_e4m3fn, block=128),
    "int8, channels": partial(scaled, dtype=torch.int8, block=1),
}


def gate_and_up(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, dim=1)
    return F.silu(gate) * up
