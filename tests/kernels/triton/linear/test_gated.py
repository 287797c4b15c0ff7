"""Gated products of many rows against products in fp64, which products they serve; and that the kernel compiles."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.compute.kernels.reference.linear import ScaledWeight
from quire.compute.kernels.reference.quantized_rows import QuantizedRows, quantize_rows
from quire.compute.kernels.triton.linear import linear, scaled
from quire.compute.kernels.triton.linear.gated import (
    gated_gemm,
    supports_gated_gemm,
)
from quire.compute.kernels.triton.linear.linear import LARGE_WEIGHT, MANY_ROWS, prefers_gated_gemm
from tests.kernels.triton.linear.test_linear import close, exact, poisoned, random
from tests.kernels.triton.not_interpreted import printed_by


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 63, 129, 255, 256, 257, 1000, 2100])
def test_many_rows(rows: int, dtype: torch.dtype, overlap: bool) -> None:
    """Nothing is a multiple of a tile; one product has fewer steps than are under way at the same time."""
    for outputs, columns in ((1000, 520), (264, 4096), (8, 8), (2056, 136)):
        x, w, _ = random(rows, 2 * outputs, columns, dtype, "cuda")
        y = poisoned(rows, outputs, x)
        gated_gemm(x, w, y, overlap)
        close(y, exact(x, w, None, True))


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("rows", [1, 63, 129, 300, 1000])
def test_many_rows_of_fp8(rows: int, overlap: bool) -> None:
    """Scales of rows and outputs differ a hundredfold; nothing is a multiple of a tile."""
    for outputs, columns in ((1000, 528), (264, 4096), (8, 16), (2056, 144)):
        x, w, _ = random(rows, 2 * outputs, columns, torch.bfloat16, "cuda")
        x, w = x * torch.logspace(0, 2, rows).cuda().bfloat16()[:, None], w * torch.rand(len(w), 1).cuda().bfloat16()
        codes, of_w = quantize_rows(x, torch.float8_e4m3fn, columns), quantize_rows(w, torch.float8_e4m3fn, columns)
        y = poisoned(rows, outputs, x)
        assert supports_gated_gemm(codes[0], of_w[0], y)
        gated_gemm(codes[0], of_w[0], y, overlap, (codes[1], of_w[1]))
        seen = ScaledWeight(*of_w, (1, columns)).dense()
        expected = exact(codes[0].double() * codes[1].double(), seen.double(), None, True)
        relative = (y.double() - expected).abs().amax(1) / expected.abs().amax(1)
        assert relative.max() < 2e-2, relative.max()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [128, 256, 2100])
def test_large_products_of_fp8_are_one_kernel(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of dense rows, and of quantized ones; the library's product and the gate are not asked."""
    weight = ScaledWeight(*quantize_rows(torch.randn(28672, 512, device="cuda"), torch.float8_e4m3fn, 512), (1, 512))
    x = torch.randn(rows, 512, dtype=torch.bfloat16, device="cuda")
    quantized = QuantizedRows(*quantize_rows(x, torch.float8_e4m3fn, 512), x.dtype)
    expected = torch.empty(rows, 14336, dtype=x.dtype, device="cuda")
    scaled.silu_and_mul(scaled.scaled_linear(quantized, weight, None), expected)
    monkeypatch.setattr(scaled, "silu_and_mul", None)
    for given in (x, quantized):
        y = poisoned(rows, 14336, x)
        scaled.scaled_linear_silu_and_mul(given, weight, None, y)
        error = torch.linalg.vector_norm(y.double() - expected.double()) / torch.linalg.vector_norm(expected.double())
        assert error < 2e-2, f"{error:.2e}"


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1024, 2100, 4460])
def test_real_sizes_give_the_same_every_time(rows: int) -> None:
    x = torch.randn(rows, 4096, dtype=torch.bfloat16, device="cuda")
    w = torch.randn(28672, 4096, dtype=torch.bfloat16, device="cuda").div_(64)
    ys = [poisoned(rows, 14336, x) for _ in range(5)]
    for y in ys:
        linear.linear_silu_and_mul(x, w, None, y)
    close(ys[0], exact(x, w, None, True))
    assert all(torch.equal(ys[0], y) for y in ys[1:])


@pytest.mark.gpu
def test_each_waits_for_what_the_one_before_wrote() -> None:
    """In a graph, each product starting while the one before ends."""
    up = [random(1, 4096, 2048, torch.bfloat16, "cuda")[1] / 45 for _ in range(2)]
    x, y, z = (torch.zeros(1500, 2048, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    gated_gemm(x, up[0], y, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            gated_gemm(x, up[0], y, True)
            gated_gemm(y, up[1], z, True)
            x.copy_(F.rms_norm(z, (2048,)))
    for _ in range(10):
        x.normal_()
        expected = x.clone()
        for _ in range(3):
            expected = exact(exact(expected, up[0], None, True).to(x.dtype), up[1], None, True).to(x.dtype)
            expected = F.rms_norm(expected, (2048,))
        graph.replay()
        assert (x.double() - expected.double()).norm() / expected.double().norm() < 0.1


@pytest.mark.gpu
def test_rows_may_lie_apart() -> None:
    x, w, _ = random(300, 272, 72, torch.bfloat16, "cuda")
    apart = torch.full((300, 200), float("nan"), dtype=x.dtype, device="cuda")
    apart[:, 80:152] = x
    out = poisoned(300, 200, x)
    assert supports_gated_gemm(apart[:, 80:152], w, out[:, 16:152])
    gated_gemm(apart[:, 80:152], w, out[:, 16:152], False)
    close(out[:, 16:152], exact(x, w, None, True))
    assert out[:, :16].isnan().all()
    assert out[:, 152:].isnan().all()


def test_what_the_copy_engine_cannot_take_is_left_to_others() -> None:
    def operands(rows: int, outputs: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
        x, w, _ = random(rows, 2 * outputs, columns, torch.bfloat16, "cpu")
        return x, w, poisoned(rows, outputs, x)

    x, w, y = operands(3, 16, 24)
    assert supports_gated_gemm(x, w, y)
    assert not supports_gated_gemm(x.float(), w.float(), y.float())
    assert not supports_gated_gemm(x[:, 4:20], w[:, :16].contiguous(), y)  # not where 16 bytes begin
    assert not supports_gated_gemm(x, w, poisoned(3, 20, x)[:, :16])  # rows begin elsewhere
    assert not supports_gated_gemm(*operands(3, 12, 24))  # eight gates, then their ups
    assert not supports_gated_gemm(*operands(3, 16, 20))


def test_it_serves_many_rows_of_large_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """And of these, none with a bias."""
    served: list[tuple[int, ...]] = []
    monkeypatch.setattr(linear, "is_sm_90", lambda device: True)
    monkeypatch.setattr(linear, "gated_gemm", lambda x, w, y, overlap: served.append(tuple(x.shape)))
    monkeypatch.setattr(linear, "silu_and_mul", lambda x, out: None)
    monkeypatch.setattr(linear, "LARGE_WEIGHT", (32, 16))
    monkeypatch.setattr(linear, "MANY_ROWS", 300)
    for rows, outputs, columns, biased in (
        (299, 16, 16, False),
        (300, 16, 16, False),
        (300, 8, 16, False),
        (300, 16, 8, False),
        (301, 24, 32, True),
        (302, 24, 32, False),
    ):
        x, w, bias = random(rows, 2 * outputs, columns, torch.bfloat16, "cpu")
        linear.linear_silu_and_mul(x, w, bias if biased else None, poisoned(rows, outputs, x))
    assert served == [(300, 16), (302, 32)]


def test_few_rows_and_small_weights_are_served_as_before() -> None:
    assert prefers_gated_gemm(MANY_ROWS, *LARGE_WEIGHT)
    assert not prefers_gated_gemm(MANY_ROWS - 1, *LARGE_WEIGHT)
    assert not prefers_gated_gemm(8 * MANY_ROWS, LARGE_WEIGHT[0] - 1, LARGE_WEIGHT[1])
    assert not prefers_gated_gemm(8 * MANY_ROWS, LARGE_WEIGHT[0], LARGE_WEIGHT[1] - 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a card, other tests compile what they run")
def test_compiles_once_for_all_shapes() -> None:
    assert printed_by("tests.kernels.triton.linear.compile_gated").splitlines() == [
        "torch.bfloat16 1",
        "torch.float16 1",
    ]
