"""Products of few rows, with all configs, against products in fp64."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.linear import linear as reference
from quire.compute.kernels.reference.quantized_rows import UnnormedRow
from quire.compute.kernels.triton.linear import linear as linear_module
from quire.compute.kernels.triton.linear.gemm import GemmConfig
from quire.compute.kernels.triton.linear.gemv import GemvConfig, normed_gemv
from quire.compute.kernels.triton.linear.linear import (
    MAX_ROWS,
    LinearConfig,
    dense_configs,
    linear_silu_and_mul,
    linear_with_config,
    tuned_config,
)

UP_TO, PLAIN, GATED = dense_configs().up_to, dense_configs().plain, dense_configs().gated
FEW_ROWS = (
    GemvConfig(1, 64, 1),
    GemvConfig(4, 128, 2),
)
TILES = (
    GemmConfig(16, 64, 64, 1, 4, 3, True),
    GemmConfig(16, 32, 32, 1, 4, 3, False),
    GemmConfig(16, 64, 64, 3, 4, 4, True),
    GemmConfig(32, 32, 32, 2, 4, 2, False),
)
NEAR = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Largest error beside the largest value; the interpreter rounds towards zero."""


def exact(x: Tensor, w: Tensor, bias: Tensor | None, gate: bool) -> Tensor:
    y = F.linear(x.double(), w.double(), None if bias is None else bias.double())
    if gate:
        half = y.shape[1] // 2
        y = F.silu(y[:, :half]) * y[:, half:]
    return y


def close(found: Tensor, expected: Tensor) -> None:
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error < NEAR[found.dtype], f"{error:.2e}"  # false for NaN, too


def random(rows: int, outputs: int, columns: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    seeded = torch.Generator().manual_seed(rows * outputs)
    x, w = (torch.randn(n, columns, dtype=torch.float32, generator=seeded) for n in (rows, outputs))
    bias = 10 * torch.randn(outputs, dtype=torch.float32, generator=seeded)
    return x.to(device, dtype), w.to(device, dtype), bias.to(device, dtype)


def poisoned(rows: int, outputs: int, like: Tensor) -> Tensor:
    return torch.full((rows, outputs), float("nan"), dtype=like.dtype, device=like.device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("gate", "biased"), list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("config", FEW_ROWS)
def test_one_row(config: GemvConfig, gate: bool, biased: bool, dtype: torch.dtype, device: str) -> None:
    if gate and config.block_n == 1:
        pytest.skip("a gate and what it gates take two rows of the weight")
    for outputs, columns in ((6, 48), (26, 144)):
        x, w, bias = random(1, outputs, columns, dtype, device)
        y = poisoned(1, outputs // 2 if gate else outputs, x)
        linear_with_config(x, w, bias if biased else None, y, config, gate=gate, overlap=False)
        close(y, exact(x, w, bias if biased else None, gate))


@pytest.mark.parametrize("wide_weight", [False, True])
@pytest.mark.parametrize(("gate", "biased", "added"), [(False, True, True), (True, False, True), (False, False, False)])
def test_a_row_is_normed_within_its_product(
    gate: bool, biased: bool, added: bool, wide_weight: bool, device: str
) -> None:
    for outputs, columns in ((6, 48), (26, 144)):
        x, w, bias = random(1, outputs, columns, torch.bfloat16, device)
        delta, norm = (3 * each for each in random(2, 1, columns, torch.bfloat16, device)[0].split(1))
        norm = norm[0].float() if wide_weight else norm[0]
        row = UnnormedRow(x.clone(), delta if added else None, norm, 1e-5)
        y = poisoned(1, outputs // 2 if gate else outputs, x)
        normed_gemv(row, w, bias if biased else None, y, FEW_ROWS[1], gate, False)
        total = (x.double() + delta.double()).to(x.dtype) if added else x
        exactly = F.rms_norm(total.double(), (columns,), norm.double(), 1e-5)
        close(y, exact(exactly, w, bias if biased else None, gate))
        assert row.normed is not None
        close(row.normed, exactly)
        torch.testing.assert_close(row.stream, total, rtol=1e-2, atol=1e-2)  # the interpreter rounds towards zero
        assert torch.equal(row.x, x)  # all programs read it


def test_who_reads_a_row_next_finds_its_norm(device: str) -> None:
    x, w, _ = random(1, 16, 48, torch.bfloat16, device)
    row = UnnormedRow(x.clone(), x.clone(), torch.ones(48, dtype=x.dtype, device=device), 1e-5)
    stack, normed = torch.cat([w, w]), F.rms_norm(2 * x.double(), (48,), eps=1e-5)
    for _ in range(2):
        close(kernel("linear", "cuda")(row, w, None), exact(normed, w, None, False))
        linear_silu_and_mul(row, stack, None, out := poisoned(1, 16, x))
        close(out, exact(normed, stack, None, True))
        torch.testing.assert_close(row.stream, 2 * x)


@pytest.mark.parametrize("gate", [False, True])
def test_products_of_small_weights_norm_their_row(gate: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no others: a kernel for the norm is faster."""
    monkeypatch.setattr(linear_module, "is_sm_90", lambda device: True)
    x, w, _ = random(1, 32, 48, torch.bfloat16, device)
    expected = exact(F.rms_norm(2 * x.double(), (48,), eps=1e-5), w, None, gate)
    for up_to, is_normed_within in ((32 * 48, True), (32 * 48 - 1, False)):
        monkeypatch.setattr(linear_module, "NORMED_UP_TO", up_to)
        row = UnnormedRow(x.clone(), x.clone(), torch.ones(48, dtype=x.dtype, device=device), 1e-5)
        if gate:
            linear_silu_and_mul(row, w, None, y := poisoned(1, 16, x))
        else:
            y = kernel("linear", "cuda")(row, w, None)
        close(y, expected)
        assert (row.stream is not row.x) == is_normed_within


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("gate", "biased"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("config", TILES)
@pytest.mark.parametrize("rows", [1, 3, 17, 33])
def test_few_rows(rows: int, config: GemmConfig, gate: bool, biased: bool, dtype: torch.dtype, device: str) -> None:
    x, w, bias = random(rows, 70, 144, dtype, device)
    y = poisoned(rows, 35 if gate else 70, x)
    for _ in range(2):  # the second call finds the counters of the first one's splits as they were
        linear_with_config(x, w, bias if biased else None, y.fill_(float("nan")), config, gate=gate, overlap=False)
        close(y, exact(x, w, bias if biased else None, gate))


@pytest.mark.parametrize("config", [FEW_ROWS[1], TILES[0], TILES[2], TILES[-1]])
def test_rows_of_x_may_lie_apart(config: GemvConfig | GemmConfig, device: str) -> None:
    rows = 1 if isinstance(config, GemvConfig) else 3
    x, w, _ = random(rows, 40, 96, torch.float32, device)
    apart = torch.full((rows, 200), float("nan"), device=device)
    apart[:, 80:176] = x
    linear_with_config(apart[:, 80:176], w, None, y := poisoned(rows, 40, x), config, gate=False, overlap=False)
    close(y, exact(x, w, None, False))


def test_more_splits_than_steps(device: str) -> None:
    x, w, _ = random(3, 16, 64, torch.float32, device)
    config = GemmConfig(16, 16, 32, 5, 4, 3, False)
    linear_with_config(x, w, None, y := poisoned(3, 16, x), config, gate=False, overlap=False)
    close(y, exact(x, w, None, False))


def test_a_shape_is_served_like_the_nearest_measured_one() -> None:
    assert UP_TO[-1] == MAX_ROWS
    for table, gate in ((PLAIN, False), (GATED, True)):
        for shape, configs in table.items():
            assert len(configs) == len(UP_TO)
            for config, most, above in zip(configs, UP_TO, (0, *UP_TO), strict=False):
                for rows in (above + 1, most):
                    assert tuned_config(*shape, rows, gate) == config
                if isinstance(config, GemvConfig):
                    assert most == 1
    assert tuned_config(6144 + 16, 4096 - 16, 3, False) == tuned_config(6144, 4096, 3, False)
    assert tuned_config(6144, 4088, 1, False) is None


@pytest.mark.parametrize("rows", [0, 1, 40])
def test_linear_is_the_reference(rows: int, device: str) -> None:
    x, w, bias = random(rows, 24, 32, torch.float32, device)
    op = kernel("linear", "cuda")
    torch.testing.assert_close(op(x, kernel("pack_linear", "cuda")(w), bias), reference(x, w, bias))


ALL = [
    (shape, rows, config, gate)
    for table, gate in ((PLAIN, False), (GATED, True))
    for shape, configs in table.items()
    for config, most, above in zip(configs, UP_TO, (0, *UP_TO), strict=False)
    for rows in {above + 1, most}
]
"""Everything that the table may choose."""


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("shape", "rows", "config", "gate"), ALL)
def test_every_choice_on_a_card(
    shape: tuple[int, int], rows: int, config: LinearConfig, gate: bool, overlap: bool
) -> None:
    if config is None:
        pytest.skip("cuBLAS")
    x, w, bias = random(rows, *shape, torch.bfloat16, "cuda")
    results = []
    for _ in range(3):
        y = poisoned(rows, shape[0] // 2 if gate else shape[0], x)
        linear_with_config(x, w, bias, y, config, gate=gate, overlap=overlap)
        results.append(y)
    close(results[0], exact(x, w, bias, gate))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 16, 40, 64, 100])
def test_chained_products_in_a_graph(rows: int) -> None:
    """Each reads what the one before wrote, which is when starting too early would be seen."""
    weights = [random(1, 512, 512, torch.bfloat16, "cuda")[1] / 23 for _ in range(24)]
    up = random(1, 1024, 512, torch.bfloat16, "cuda")[1] / 23
    x = torch.empty(rows, 512, dtype=torch.bfloat16, device="cuda")
    op = kernel("linear", "cuda")

    def chain() -> Tensor:
        y = x
        for w in weights:
            y = op(y, w, None)
        linear_silu_and_mul(y, up, None, out := torch.empty_like(y))
        return out

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain()
    for _ in range(20):
        x.normal_()
        graph.replay()
        expected = x
        for w in weights:
            expected = F.linear(expected, w)
        close_enough = exact(expected, up, None, True)
        error = (y.double() - close_enough).norm() / close_enough.norm()
        assert error < 0.05
