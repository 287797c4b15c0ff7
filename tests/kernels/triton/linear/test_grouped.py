"""Products with integers in groups, against products in fp64 of what the codes stand for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.compute.kernels.reference import linear as reference
from quire.compute.kernels.triton.linear import grouped
from quire.compute.kernels.triton.linear.grouped import MAX_ROWS, PackedConfig, packed_configs
from quire.compute.kernels.triton.linear.packed_expand import expand_grouped, expand_packed
from quire.compute.kernels.triton.linear.packed_gemm import PackedGemmConfig, packed_gemm
from quire.compute.kernels.triton.linear.packed_gemm_many import PackedGemmManyConfig, packed_gemm_many
from quire.compute.kernels.triton.linear.packed_gemv import PackedGemvConfig, packed_gemv
from quire.compute.kernels.triton.linear.packed_layout import PackedWeight, pack_int4, pairs_of, permute_columns

NEAR = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Beside the largest value."""


def integers(
    rows: int, columns: int, bits: int, group: int, symmetric: bool, device: str
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Codes, scales, zeros and the weight that they stand for, fp64."""
    seeded = torch.Generator().manual_seed(rows * columns + bits)
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=seeded, dtype=torch.uint8)
    scales = (torch.rand(rows, columns // group, generator=seeded) + 0.5).bfloat16().float()
    low, high = (1 << (bits - 2)), 3 << (bits - 2)
    zeros = torch.randint(low, high, scales.shape, generator=seeded, dtype=torch.uint8)
    taken = torch.full_like(zeros, 1 << (bits - 1)) if symmetric else zeros
    weight = (codes.view(rows, -1, group).double() - taken.unsqueeze(-1)) * scales.double().unsqueeze(-1)
    found = (codes.to(device), scales.to(device), None if symmetric else zeros.to(device))
    return *found, weight.view(rows, columns).to(device)


def exact(x: Tensor, weight: Tensor, gate: bool) -> Tensor:
    y = x.double() @ weight.T
    if gate:
        half = y.shape[1] // 2
        y = F.silu(y[:, :half]) * y[:, half:]
    return y


def activations(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Rows for which gated products, too, stay within float16."""
    return (torch.randn(rows, columns, device="cuda") / 8).to(dtype)


def close(found: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
    """`dtype`: That it must be in."""
    assert dtype is None or found.dtype == dtype
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error < NEAR[found.dtype], f"{error:.2e}"


def permuted(x: Tensor) -> Tensor:
    """Columns of 16-bit values in the tensor core's order, by torch."""
    pairs = pairs_of(x).reshape(len(x), -1, 4, 4)  # [rows, of 32 columns, l, s and c]
    return pairs.transpose(2, 3).contiguous().view(len(x), -1).view(x.dtype)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 96), (8, 64)])
def test_plain_codes_are_expanded(bits: int, group: int, symmetric: bool, device: str) -> None:
    codes, scales, zeros, weight = integers(6, 1152, bits, group, symmetric, device)
    packed = reference.pack_grouped(codes, scales, zeros, bits, group, None)
    torch.testing.assert_close(packed.dense().double(), weight)
    torch.testing.assert_close(expand_grouped(packed, torch.float32).double(), weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_packed_codes_are_expanded(gated: bool, symmetric: bool, dtype: torch.dtype, device: str) -> None:
    """Packed for products in either dtype."""
    codes, scales, zeros, weight = integers(64, 384, 4, 128, symmetric, device)
    packed = pack_int4(codes, scales, zeros, gated, None, dtype)
    assert packed.words.shape == (4, 3, 256)
    assert packed.scales.dtype == dtype
    torch.testing.assert_close(expand_packed(packed, torch.float32).double(), weight)


def test_a_permuted_row_has_its_columns_where_the_tensor_core_counts_them() -> None:
    x = torch.arange(64, dtype=torch.int16).view(1, 64)
    place = permuted(x)[0].tolist()
    for number, column in enumerate(place[:32]):
        s, c, l_, e = number >> 4, number >> 3 & 1, number >> 1 & 3, number & 1
        assert column == l_ << 3 | s << 2 | c << 1 | e
    assert place[32:] == [32 + column for column in place[:32]]


@pytest.mark.parametrize(("rows", "columns"), [(1, 128), (3, 4224)])
def test_columns_are_permuted(rows: int, columns: int, device: str) -> None:
    x = torch.randn(rows, columns, device=device).bfloat16()
    assert torch.equal(permute_columns(x), permuted(x))
    apart = torch.randn(rows, columns + 7, device=device).bfloat16()[:, 2 : columns + 2]
    assert torch.equal(permute_columns(apart), permuted(apart.contiguous()))


@pytest.mark.parametrize("bits", [4, 8])
def test_the_op_agrees_with_its_reference(bits: int, device: str) -> None:
    codes, scales, zeros, weight = integers(32, 256, bits, 64, False, device)
    order = torch.randperm(256, generator=torch.Generator().manual_seed(0)).to(device)
    packed = grouped.pack_grouped(codes, scales, zeros, bits, 64, order, gated=True)
    dtype = torch.bfloat16 if bits == 4 else torch.float16
    x = (torch.randn(5, 256, device=device) / (1 << bits - 2)).to(dtype)  # gates times ups are within fp16
    bias = torch.randn(32, device=device).to(dtype)
    close(grouped.grouped_linear(x, packed, bias), exact(x[:, order], weight, False) + bias.double())
    out = x.new_empty(5, 16)
    grouped.grouped_linear_silu_and_mul(x, packed, None, out)
    close(out, exact(x[:, order], weight, True))


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "overlap"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, True)])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        PackedGemvConfig(8, 1, 4, 1),
        PackedGemvConfig(8, 2, 2, 2, 1, False),
        PackedGemvConfig(8, 1, 4, 1, 2),
        PackedGemvConfig(16, 4, 8, 1),
        PackedGemmConfig(32, 1, 4, 1),
        PackedGemmConfig(64, 2, 4, 3),
        PackedGemmConfig(128, 1, 4, 2),
        PackedGemmManyConfig(32, 1, 2, 1, 2),
        PackedGemmManyConfig(64, 1, 2, 3, 3),
        PackedGemmManyConfig(128, 2, 2, 2, 2),
        PackedGemmManyConfig(256, 2, 1, 1, 3),
    ],
)
def test_kernels(config: PackedConfig, gated: bool, symmetric: bool, dtype: torch.dtype, overlap: bool) -> None:
    """Of columns that a program's warps do not share evenly, and rows that do not fill a tile."""
    for outputs, columns in ((256, 640), (384, 2048)):
        codes, scales, zeros, weight = integers(outputs, columns, 4, 128, symmetric, "cuda")
        packed = pack_int4(codes, scales, zeros, gated, None, dtype)
        many = not isinstance(config, PackedGemvConfig)
        for rows in (1, 3, config.block_m, *((config.block_m + 5,) if many else ())):
            x = activations(rows, columns, dtype)
            y = torch.full((rows, outputs // 2 if gated else outputs), float("nan"), device="cuda", dtype=dtype)
            for _ in range(2):  # the second call finds the counters of the first one's splits as they were
                if isinstance(config, PackedGemmConfig):
                    packed_gemm(permuted(x), packed, y.fill_(float("nan")), config, overlap)
                elif isinstance(config, PackedGemmManyConfig):
                    packed_gemm_many(permuted(x), packed, y.fill_(float("nan")), config, overlap)
                else:
                    packed_gemv(x, packed, y.fill_(float("nan")), config, overlap)
                close(y, exact(x, weight, gated), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 33, 65, 129, 257, 600, 4100])
def test_every_number_of_rows(rows: int, gated: bool, dtype: torch.dtype) -> None:
    codes, scales, zeros, weight = integers(1024, 1024, 4, 512, False, "cuda")
    packed = grouped.pack_grouped(codes, scales, zeros, 4, 512, None, gated, dtype)
    assert isinstance(packed, PackedWeight)
    x = activations(rows, 1024, dtype)
    if gated:
        out = x.new_empty(rows, 512)
        grouped.grouped_linear_silu_and_mul(x, packed, None, out)
    else:
        out = grouped.grouped_linear(x, packed, None)
    close(out, exact(x, weight, gated), dtype)


def test_tables_have_a_config_for_every_number_of_rows() -> None:
    table = packed_configs()
    assert table.up_to[-1] == MAX_ROWS
    for (outputs, _), configs in table.plain.items():
        for most, config in zip(table.up_to, configs, strict=True):
            assert config is not None
            gemv = isinstance(config, PackedGemvConfig)
            assert config.block_m >= most if gemv else config.block_m % 32 == 0
            assert gemv or outputs % (64 * config.warpgroups) == 0
            assert outputs % 128 == 0
