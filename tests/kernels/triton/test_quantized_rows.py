"""Norms that quantize their rows, against a norm and a quantization behind each other."""

from __future__ import annotations

import pytest
import torch

from quire.compute.kernels.reference import quantized_rows as reference
from quire.compute.kernels.triton.norm import rms_norm_quantized


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("with_delta", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 4096), (5, 300)])
def test_codes_are_those_of_norm_and_quantization(
    rows: int, width: int, with_delta: bool, dtype: torch.dtype, device: str
) -> None:
    """The stream is changed alike. Codes at the middle between two may fall to either side."""
    seeded = torch.Generator().manual_seed(rows)
    x, delta = torch.randn(2, rows, width, generator=seeded).to(device)
    weight = torch.randn(width, generator=seeded).to(device)
    x[-1] *= 100
    theirs, ours = x.clone(), x.clone()
    expected = reference.rms_norm_quantized(theirs, weight, 1e-5, dtype, delta if with_delta else None)
    found = rms_norm_quantized(ours, weight, 1e-5, dtype, delta if with_delta else None)
    assert torch.equal(ours, theirs)
    assert (found.dtype, found.shape) == (x.dtype, x.shape)
    torch.testing.assert_close(found.scales, expected.scales, rtol=1e-5, atol=0)
    seen, wanted = found.codes.float() * found.scales, expected.codes.float() * expected.scales
    step = expected.scales * (1.0 if dtype == torch.int8 else 32.0)
    assert (seen - wanted).abs().le(step * 1.01).all()
    assert (found.codes.float() == expected.codes.float()).float().mean() > 0.99


def test_a_row_that_is_not_finite_spoils_its_own_codes_alone(device: str) -> None:
    x = torch.randn(3, 256, device=device)
    x[1, 7] = float("nan")
    found = rms_norm_quantized(x, torch.ones(256, device=device), 1e-5, torch.int8)
    assert found.scales.isnan().flatten().tolist() == [False, True, False]


@pytest.mark.parametrize(("dtype", "more"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_rows_of_16_bits_are_rounded_before_they_are_quantized(dtype: torch.dtype, more: float, device: str) -> None:
    """So that a fused norm changes no output: 2.5 + 2^-8 is 2.5 in bf16, of which the nearest even integer is 2."""
    x = torch.ones(1, 256, dtype=dtype, device=device)
    weight = torch.full((256,), 1.0, device=device)
    weight[0], weight[1] = 2.5 + more, 127.0
    found = rms_norm_quantized(x, weight, 0.0, torch.int8)
    assert found.codes[0, :2].tolist() == [2, 127]
    assert found.scales.item() == 1.0


def test_no_rows(device: str) -> None:
    empty = torch.empty(0, 64, dtype=torch.bfloat16, device=device)
    assert rms_norm_quantized(empty, empty.new_ones(64), 1e-5, torch.int8).codes.shape == (0, 64)
