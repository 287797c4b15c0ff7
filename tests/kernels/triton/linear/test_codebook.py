"""Products with codes of sixteen values, against products in fp64 of what the codes stand for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.compute.kernels.reference.linear import CODEBOOKS, CodebookWeight
from quire.compute.kernels.triton.linear import grouped
from quire.compute.kernels.triton.linear.packed_expand import expand_codebook

SCALES = {64: torch.float32, 32: torch.float8_e8m0fnu, 16: torch.float8_e4m3fn}
"""By columns of a group."""


def coded(rows: int, columns: int, values: str, group: int, device: str) -> tuple[CodebookWeight, Tensor]:
    """A weight, and what it stands for in fp64."""
    seeded = torch.Generator().manual_seed(rows * columns + group)
    codes = torch.randint(0, 16, (rows, columns), generator=seeded, dtype=torch.uint8)
    if group == 32:
        scales = torch.randint(125, 130, (rows, columns // group), generator=seeded, dtype=torch.uint8)
        scales = scales.view(torch.float8_e8m0fnu)
    else:
        scales = (torch.rand(rows, columns // group, generator=seeded) + 0.5).to(SCALES[group])
    factors = torch.rand(rows, generator=seeded) + 0.5 if group == 16 else None
    dense = torch.tensor(CODEBOOKS[values], dtype=torch.float64)[codes.long()].view(rows, -1, group)
    dense = (dense * scales.double().unsqueeze(-1)).view(rows, columns)
    if factors is not None:
        dense *= factors.double().unsqueeze(1)
        factors = factors.to(device)
    return grouped.pack_codebook(codes.to(device), scales.to(device), factors, values, group), dense.to(device)


def exact(x: Tensor, weight: Tensor, gate: bool) -> Tensor:
    y = x.double() @ weight.T
    gates, ups = y.chunk(2, dim=1)
    return F.silu(gates) * ups if gate else y


def close(found: Tensor, expected: Tensor) -> None:
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error < 1e-2, f"{error:.2e}"


@pytest.mark.parametrize(("values", "group"), [("nf4", 64), ("fp4", 64), ("e2m1", 32), ("e2m1", 16)])
def test_codes_are_expanded(values: str, group: int, device: str) -> None:
    weight, dense = coded(5, 1152, values, group, device)
    torch.testing.assert_close(weight.dense().double(), dense)
    torch.testing.assert_close(expand_codebook(weight, torch.float32).double(), dense)


def test_a_scale_may_be_the_smallest_there_is(device: str) -> None:
    codes = torch.full((1, 32), 7, dtype=torch.uint8, device=device)
    scales = torch.tensor([[0]], dtype=torch.uint8, device=device).view(torch.float8_e8m0fnu)
    weight = grouped.pack_codebook(codes, scales, None, "e2m1", 32)
    assert (expand_codebook(weight, torch.float32) == 6 * 2.0**-127).all()


@pytest.mark.parametrize(("values", "group"), [("nf4", 64), ("e2m1", 16)])
@pytest.mark.parametrize("rows", [1, 5])
def test_the_op_agrees_with_its_reference(rows: int, values: str, group: int, device: str) -> None:
    weight, dense = coded(32, 192, values, group, device)
    dtype = torch.bfloat16 if rows == 1 else torch.float16
    x, bias = torch.randn(rows, 192, device=device).to(dtype), torch.randn(32, device=device).to(dtype)
    close(grouped.codebook_linear(x, weight, bias), exact(x, dense, False) + bias.double())
    out = x.new_empty(rows, 16)
    grouped.codebook_linear_silu_and_mul(x, weight, None, out)
    close(out, exact(x, dense, True))
