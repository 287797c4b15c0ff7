"""Products of 8-bit codes with scales, against products in fp64 of what the codes stand for."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference import linear as reference
from quire.compute.kernels.reference.linear import ScaledWeight
from quire.compute.kernels.triton.linear.gemm import GemmConfig, gemm
from quire.compute.kernels.triton.linear.gemv import GemvConfig, gemv, int8_gemv, supports_int8_gemv
from quire.compute.kernels.triton.linear.scaled import MANY, fitting, scaled_config, scaled_configs, scaled_linear
from quire.compute.kernels.triton.norm import quantize_rows

UP_TO, PLAIN, GATED = scaled_configs().up_to, scaled_configs().plain, scaled_configs().gated
DTYPES = (torch.float8_e4m3fn, torch.int8)
TILES = (GemmConfig(16, 64, 128, 1, 4, 3, True), GemmConfig(16, 32, 128, 2, 4, 2, False))
NEAR = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def random(rows: int, outputs: int, columns: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    seeded = torch.Generator().manual_seed(rows * outputs)
    x, w = (torch.randn(n, columns, generator=seeded) for n in (rows, outputs))
    x *= torch.logspace(-2, 2, rows).unsqueeze(1)  # rows of one scale would hide whose is whose
    return x.to(device, dtype), w.to(device), torch.randn(outputs, generator=seeded).to(device, dtype)


def quantized(w: Tensor, dtype: torch.dtype, blocks: bool) -> ScaledWeight:
    """Scales of outputs, or of blocks of 16 × 128, each its own."""
    outputs, columns = w.shape
    block = (16, 128) if blocks else (1, columns)
    scales = torch.rand(-(-outputs // block[0]), -(-columns // block[1]), device=w.device) * 0.01 + 0.005
    whole = scales.repeat_interleave(block[0], 0)[:outputs].repeat_interleave(block[1], 1)[:, :columns]
    codes = (w / whole).clamp(-127, 127)
    return ScaledWeight((codes.round() if dtype == torch.int8 else codes).to(dtype), scales, block)


def exact(x: Tensor, weight: ScaledWeight, bias: Tensor | None, gate: bool) -> Tensor:
    y = F.linear(x.double(), weight.dense().double(), None if bias is None else bias.double())
    if gate:
        half = y.shape[1] // 2
        y = F.silu(y[:, :half]) * y[:, half:]
    return y


def close(found: Tensor, expected: Tensor, flipped: float = 0.0) -> None:
    """`flipped`: what codes may add that are one apart, where a value lies between two; or what a gate adds, which has
    an error of its own.

    Tensor cores keep 14 bits of a sum of fp8 and cut off the rest: 6e-5 of it at each step of 32 columns, until the
    sum is added in fp32 (5.5e-4 and 6.3e-4 of a row's largest output were seen).
    """
    error = ((found.double() - expected).abs().amax(1) / expected.abs().amax(1)).max()
    near = max(NEAR[found.dtype], flipped, 1e-3 if found.is_cuda else 0)
    assert error < near, f"{error:.2e}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [16, 200])
def test_rows_become_codes(dtype: torch.dtype, group: int, device: str) -> None:
    x, _, _ = random(5, 1, 200, torch.float32, device)
    x[3] = 0
    codes, scales = quantize_rows(x, dtype, group)
    expected, their_scales = reference.quantize_rows(x, dtype, group)
    torch.testing.assert_close(scales, their_scales, rtol=1e-5, atol=0)
    wide = scales.repeat_interleave(group, 1)[:, :200]
    assert not (codes[3].float() != 0).any()
    error = (codes.float() - expected.float()).abs() * wide
    assert (error.amax(1) <= x.abs().amax(1) * (1 / 127 if dtype == torch.int8 else 1 / 14)).all(), "one code apart"
    assert (error > 0).float().mean() < 0.02


@pytest.mark.parametrize("make", [quantize_rows, reference.quantize_rows])
def test_no_rows_become_no_codes(
    make: Callable[[Tensor, torch.dtype, int], tuple[Tensor, Tensor]], device: str
) -> None:
    codes, scales = make(torch.empty(0, 200, device=device), torch.int8, 16)
    assert codes.shape == (0, 200)
    assert scales.shape == (0, 13)


def test_a_row_that_is_not_finite_stays_so(device: str) -> None:
    x = torch.ones(3, 64, device=device)
    x[0, 5], x[1, 7] = float("nan"), float("inf")
    for dtype in DTYPES:
        _, scales = quantize_rows(x, dtype, 64)
        assert scales.isfinite().flatten().tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("blocks", "biased", "gate"), [(False, False, False), (True, True, False), (False, False, True)]
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", [*TILES, GemvConfig(4, 128, 2)])
def test_products(
    config: GemmConfig | GemvConfig, dtype: torch.dtype, blocks: bool, biased: bool, gate: bool, device: str
) -> None:
    one = isinstance(config, GemvConfig)
    outputs, columns = 70, 272
    for rows in (1,) if one else (1, 17):
        x, w, bias = random(rows, outputs, columns, torch.float32, device)
        weight = quantized(w, dtype, blocks)
        y = torch.full((rows, outputs // 2 if gate else outputs), float("nan"), device=device)
        for _ in range(2):  # the second call finds the counters of the first one's splits as they were
            y.fill_(float("nan"))
            if isinstance(config, GemvConfig):
                gemv(x, weight, bias if biased else None, y, config, gate, False)
                seen = x
            else:
                codes, scales = reference.quantize_rows(x, dtype, weight.block[1])
                gemm((codes, scales), weight, bias if biased else None, y, config, gate, False)
                seen = codes.float() * scales.repeat_interleave(weight.block[1], 1)[:, :columns]
            close(y, exact(seen, weight, bias if biased else None, gate), 2e-3 if gate and y.is_cuda else 0.0)


@pytest.mark.parametrize("columns", [272, 16, 1152])
@pytest.mark.parametrize(("biased", "gate"), [(False, False), (True, False), (False, True)])
def test_one_row_of_integers(columns: int, biased: bool, gate: bool, device: str) -> None:
    """Sums of codes are exact, those of the largest codes too."""
    outputs = 70
    x, w, bias = random(1, outputs, columns, torch.float32, device)
    weight = quantized(w, torch.int8, False)
    weight.codes[5], weight.codes[7] = 127, -128
    codes, scales = reference.quantize_rows(x, torch.int8, columns)
    codes[0, ::3] = -127
    seen = codes.float() * scales
    y = torch.full((1, outputs // 2 if gate else outputs), float("nan"), device=device)
    int8_gemv((codes, scales), weight, bias if biased else None, y, GemvConfig(4, 128, 2), gate, False)
    error = (y.double() - exact(seen, weight, bias if biased else None, gate)).abs()
    assert (error <= 1e-5 * y.abs().max()).all()


def test_what_int8_gemv_serves() -> None:
    def weight(columns: int, dtype: torch.dtype = torch.int8, blocks: bool = False) -> ScaledWeight:
        return quantized(torch.randn(32, columns), dtype, blocks)

    assert supports_int8_gemv(weight(256))
    assert not supports_int8_gemv(weight(24))
    assert not supports_int8_gemv(weight(256, blocks=True))
    assert not supports_int8_gemv(weight(256, torch.float8_e4m3fn))


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        *product((1, 2), (torch.bfloat16,)),
        (2, torch.float16),
        *(pytest.param(300, kind, marks=pytest.mark.gpu) for kind in (torch.bfloat16, torch.float16)),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("blocks", [False, True])
def test_the_op_agrees_with_its_reference(
    rows: int, kind: torch.dtype, blocks: bool, dtype: torch.dtype, device: str
) -> None:
    """With rows of this kind; the library's product of many writes fp16 as well."""
    x, w, bias = random(rows, 96, 256, kind, device)
    x /= 64  # gates times ups are within fp16
    weight = quantized(w, dtype, blocks)
    flipped = 0.03 if rows < 300 else 0.06  # one row of many may have several
    close(scaled_linear(x, weight, bias), reference.scaled_linear(x.float(), weight, bias.float()).double(), flipped)
    out, expected = (x.new_empty(rows, 48) for _ in range(2))
    kernel("scaled_linear_silu_and_mul", "cuda")(x, weight, bias, out)
    reference.scaled_linear_silu_and_mul(x, weight, bias, expected)
    close(out, expected.double(), flipped)


def test_tables_have_a_config_for_every_number_of_rows() -> None:
    for table, gate in ((PLAIN, False), (GATED, True)):
        for shape, configs in table.items():
            assert len(configs) == len(UP_TO)
            assert isinstance(scaled_config(*shape, 1, gate), GemvConfig)
            assert isinstance(scaled_config(*shape, 2, gate), GemmConfig)
    assert scaled_config(4096, 4096, UP_TO[-1] + 1, False) is None


def test_smaller_multiprocessors_get_fewer_stages() -> None:
    tables = [MANY, *(c for table in (PLAIN, GATED) for configs in table.values() for c in configs)]
    configs = [config for config in tables if isinstance(config, GemmConfig)]
    for kib in (99, 163, 227):  # sm_89, sm_80, sm_90
        for config in configs:
            found = fitting(config, kib * 1024)
            assert 2 <= found.stages <= config.stages
            assert found.stages * (found.block_m + found.block_n) * found.block_k <= kib * 1024
            assert kib < 227 or found == config
