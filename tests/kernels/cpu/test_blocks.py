"""Products in the types of GGUF files: those of the dequantized weights, within the rounding of fp32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from quire.compute.gguf.tensor_types import QUANTIZED
from quire.compute.kernels.cpu import blocks as kernels
from quire.compute.kernels.cpu.library import library
from quire.compute.kernels.reference.gguf_blocks import BlockWeight, dequantize
from tests.gguf import made

ROUNDING = 5e-7
"""Rows of fp32 are rounded to 32 bits, those of bf16 to 16."""


def weight_of(name: str, rows: int, columns: int, seed: int = 0) -> tuple[BlockWeight, torch.Tensor]:
    stored = torch.from_numpy(made.random_blocks(name, rows, columns, seed))
    packed = BlockWeight(kernels.pack_blocks(stored, name), name, rows, columns)
    return packed, dequantize(stored, name)


def rows_of(tokens: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    x = torch.randn((tokens, columns), generator=torch.Generator().manual_seed(seed))
    return (x * torch.logspace(-2, 1, columns)).to(dtype)


def assert_close(ours: torch.Tensor, exact: torch.Tensor, bound: float) -> None:
    error = torch.linalg.vector_norm(ours.double() - exact) / torch.linalg.vector_norm(exact)
    assert float(error) < bound


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize(("tokens", "rows"), [(1, 40), (2, 16), (3, 33), (4, 64), (7, 16), (21, 50)])
def test_products_are_those_of_the_dequantized_weights(name: str, tokens: int, rows: int, instructions: str) -> None:
    weight, dense = weight_of(name, rows, 512)
    x, bias = rows_of(tokens, 512), torch.linspace(-3, 3, rows)
    y = torch.full((tokens, rows + 5), 7.0)
    kernels.block_linear(x, weight, bias, y[:, 2 : rows + 2])
    assert_close(y[:, 2 : rows + 2], F.linear(x.double(), dense.double(), bias.double()), ROUNDING)
    assert (y[:, :2] == 7).all()
    assert (y[:, rows + 2 :] == 7).all()


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_row_has_the_same_bits_beside_any_others(name: str, instructions: str) -> None:
    """Few rows and many are multiplied in different ways."""
    columns = 256 + 2 * QUANTIZED[name].block  # in the middle of what is widened at once
    weight, dense = weight_of(name, 48, columns)
    x = rows_of(205, columns)
    y = torch.empty((205, 48))
    kernels.block_linear(x, weight, None, y)
    assert_close(y, F.linear(x.double(), dense.double()), ROUNDING)
    for first, last in ((0, 1), (5, 7), (20, 24), (40, 48), (60, 69), (82, 83), (190, 205)):
        alone = torch.empty((last - first, 48))
        kernels.block_linear(x[first:last], weight, None, alone)
        if instructions != "none":
            assert torch.equal(alone, y[first:last])


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0", "IQ4_XS"])
@pytest.mark.parametrize("width", [16, 24, 48])
def test_gated_products(name: str, width: int, instructions: str) -> None:
    weight, dense = weight_of(name, 2 * width, 256)
    x, bias = rows_of(5, 256), torch.linspace(-1, 1, 2 * width)
    out = torch.empty((5, width))
    kernels.block_linear_silu_and_mul(x, weight, bias, out)
    gate, up = F.linear(x.double(), dense.double(), bias.double()).chunk(2, 1)
    assert_close(out, F.silu(gate) * up, 2 * ROUNDING)


@pytest.mark.parametrize("name", ["Q4_K", "Q8_0"])
def test_bfloat16_rows(name: str, instructions: str) -> None:
    weight, dense = weight_of(name, 96, 768)
    x, bias = rows_of(9, 768, torch.bfloat16), torch.linspace(-1, 1, 96).bfloat16()
    y = torch.empty((9, 96), dtype=torch.bfloat16)
    kernels.block_linear(x, weight, bias, y)
    assert_close(y, F.linear(x.double(), dense.double(), bias.double()), 3e-3)


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_are_the_dequantized_rows(name: str, dtype: torch.dtype, instructions: str) -> None:
    weight, dense = weight_of(name, 37, 256)
    tokens = torch.tensor([0, 36, 15, 16, 16])
    out = torch.empty((5, 256), dtype=dtype)
    kernels.block_embed(tokens, weight, None, out)
    torch.testing.assert_close(out, dense[tokens].to(dtype), rtol=1e-6 if dtype == torch.float32 else 8e-3, atol=1e-6)
    kernels.block_embed(tokens, weight, 3.0, out)
    torch.testing.assert_close(
        out, dense[tokens].to(dtype) * 3, rtol=1e-6 if dtype == torch.float32 else 8e-3, atol=1e-6
    )


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_stays_so_and_harms_no_other(wrong: float, instructions: str) -> None:
    weight, dense = weight_of("Q4_K", 32, 512)
    x = rows_of(3, 512)
    x[1, 100] = wrong
    y = torch.empty((3, 32))
    kernels.block_linear(x, weight, None, y)
    assert not y[1].isfinite().any()
    assert_close(y[[0, 2]], F.linear(x[[0, 2]].double(), dense.double()), ROUNDING)


def test_zeros_and_very_small_rows(instructions: str) -> None:
    weight, _ = weight_of("Q6_K", 16, 256)
    y = torch.full((2, 16), 9.0)
    kernels.block_linear(torch.stack((torch.zeros(256), torch.full((256,), 1e-36))), weight, None, y)
    assert (y.abs() < 1e-30).all()


def test_a_large_product_is_shared_between_threads(instructions: str) -> None:
    weight, dense = weight_of("Q4_K", 1000, 1024)
    x = rows_of(70, 1024)
    y = torch.empty((70, 1000))
    kernels.block_linear(x, weight, None, y)
    assert_close(y, F.linear(x.double(), dense.double()), ROUNDING)


def test_packed_weights_take_what_the_plan_of_memory_says(instructions: str) -> None:
    if library() is None:
        pytest.skip("nothing is packed")
    for name, form in QUANTIZED.items():
        weight, _ = weight_of(name, 40, 512)
        assert weight.data.nbytes == form.packed_bytes(40, 512)
