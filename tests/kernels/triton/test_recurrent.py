"""Triton's ops with states equal the reference, in steps of rows of one token, of many, and of none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.compute.kernels.reference import gated_delta as reference_delta
from quire.compute.kernels.reference import gated_norm as reference_norm
from quire.compute.kernels.reference import short_conv as reference_conv
from quire.compute.kernels.reference import ssd_scan as reference_scan
from quire.compute.kernels.reference.state_inputs import StateRows
from quire.compute.kernels.triton.recurrent.gated_delta import gated_delta
from quire.compute.kernels.triton.recurrent.gated_norm import gated_norm
from quire.compute.kernels.triton.recurrent.short_conv import short_conv
from quire.compute.kernels.triton.recurrent.ssd_scan import ssd_scan

DTYPES = [torch.float32, torch.bfloat16]
COUNTS = [(1, 1, 1), (1, 70, 0, 2), (2, 0, 1)]
"""Tokens of each row; in the last, rows are as many as tokens though one row has two."""
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where exponentials overflow as they may


def rows_of(counts: tuple[int, ...], device: str) -> StateRows:
    states, starts = torch.tensor([3, 1, 5, 2])[: len(counts)], torch.tensor([0, *counts]).cumsum(0)
    return StateRows(states.to(device), starts.to(device))


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
    """Is as near as inputs of this dtype allow; None: of the result's. Products of rounded inputs may be in tf32."""
    tolerance = 2e-5 if (dtype or found.dtype) == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("gated", [False, True])
def test_short_conv(counts: tuple[int, ...], dtype: torch.dtype, device: str, *, gated: bool) -> None:
    torch.manual_seed(0)
    rows, k = rows_of(counts, device), 3 if gated else 4
    wide = torch.randn(sum(counts), 3 * 70, device=device).to(dtype)
    x, before, after = wide.split(70, 1)
    gates = {"before": before, "after": after} if gated else {}
    weight, bias = torch.randn(k, 70, device=device).to(dtype), torch.randn(70, device=device).to(dtype)
    state = torch.randn(6, k - 1, 70, device=device).to(dtype)
    other, out, expected = state.clone(), torch.empty_like(x), torch.empty_like(x)
    short_conv(x, weight, None if gated else bias, state, rows, out, silu=not gated, **gates)
    reference_conv.short_conv(x, weight, None if gated else bias, other, rows, expected, silu=not gated, **gates)
    assert_near(out, expected)
    assert torch.equal(state, other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", COUNTS)
def test_ssd_scan(counts: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    heads, groups, n, p = 4, 2, 12, 20
    rows, width = rows_of(counts, device), heads * p + 2 * groups * n
    wide = torch.randn(sum(counts), width + heads + 1, device=device).to(dtype)
    xbc, dt = wide[:, :width], wide[:, width : width + heads]
    decay, skip, bias = -torch.rand(heads, device=device), *torch.randn(2, heads, device=device)
    state = torch.randn(6, heads, n, p, device=device)
    other, (out, expected) = state.clone(), torch.empty(2, len(wide), heads * p, device=device, dtype=dtype)
    ssd_scan(xbc, dt, decay, skip, bias, state, rows, out, dt_bounds=(0.01, 0.9))
    reference_scan.ssd_scan(xbc, dt, decay, skip, bias, other, rows, expected, dt_bounds=(0.01, 0.9))
    assert_near(out, expected)
    assert_near(state, other, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("each", [1, 12])
def test_gated_delta(counts: tuple[int, ...], each: int, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    keys, values, dk, dv = 2, 4, 12, 20
    rows, width = rows_of(counts, device), 2 * keys * dk + values * dv
    wide = torch.randn(sum(counts), width + values * (1 + each), device=device).to(dtype)
    qkv, b, a = wide.split((width, values, values * each), 1)
    decay, bias = -torch.rand(values, device=device), torch.randn(values * each, device=device)
    state = torch.randn(6, values, dk, dv, device=device)
    other, (out, expected) = state.clone(), torch.empty(2, len(wide), values * dv, device=device, dtype=dtype)
    gated_delta(qkv, a, b, decay, bias, state, rows, out)
    reference_delta.gated_delta(qkv, a, b, decay, bias, other, rows, expected)
    assert_near(out, expected)
    assert_near(state, other, dtype)


def test_equal_keys_keep_their_precision(device: str) -> None:
    """Powers of a chunk's system of equations would not fit into fp32."""
    torch.manual_seed(0)
    qkv = torch.randn(1, 16, device=device).repeat(40, 3)
    qkv[:, 32:] = torch.randn(40, 16, device=device)
    a, b = torch.full((40, 1), -9.0, device=device), torch.full((40, 1), 9.0, device=device)
    decay, bias, state = torch.full((1,), -1.0, device=device), torch.zeros(1, device=device), torch.zeros(2, 1, 16, 16)
    rows = StateRows(torch.tensor([1], device=device), torch.tensor([0, 40], device=device))
    own, other = state.to(device), state.to(device).clone()
    out, expected = torch.empty(2, 40, 16, device=device)
    gated_delta(qkv, a, b, decay, bias, own, rows, out)
    reference_delta.gated_delta(qkv, a, b, decay, bias, other, rows, expected)
    assert_near(out, expected)
    assert_near(own, other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("weights", [0, 20, 60])
def test_gated_norm(weights: int, dtype: torch.dtype, device: str, *, norm_first: bool) -> None:
    torch.manual_seed(0)
    wide = torch.randn(7, 90, device=device).to(dtype)
    x, weight = torch.randn(7, 60, device=device).to(dtype), torch.randn(weights, device=device).to(dtype)
    own, activation = weight if weights else None, "sigmoid" if weights == 20 else "silu"
    out, expected = torch.empty_like(x), torch.empty_like(x)
    for op, result in ((gated_norm, out), (reference_norm.gated_norm, expected)):
        op(x, wide[:, 10:70], own, 1e-5, 20, result, norm_first=norm_first, activation=activation)
    assert_near(out, expected)
