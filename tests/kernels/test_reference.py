"""The torch references against the formulas in their docstrings, written out in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels.reference.activation import silu_and_mul
from quire.kernels.reference.norm import rms_norm
from quire.kernels.reference.paged import attend_chunk, attend_tokens, kv_write
from quire.kernels.reference.rotary import rotary
from quire.kernels.table import KERNELS, kernel

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
DTYPES = list(TOLERANCE)


def near(found: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("op", [op for op, _ in KERNELS])
def test_every_entry_of_the_table_exists(op: str) -> None:
    assert callable(kernel(op, "cpu"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_rms_norm(dtype: torch.dtype, tokens: int) -> None:
    x, weight, delta = normal(tokens, 48, dtype=dtype), normal(48, dtype=dtype, seed=1), normal(tokens, 48, dtype=dtype)
    wide = x.double()
    out = torch.empty_like(x)
    rms_norm(x, weight, 1e-3, out)
    near(out, wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double())
    assert torch.equal(x.double(), wide)
    total = (x + delta).double()
    rms_norm(x, weight, 1e-3, x_out := torch.empty_like(x), delta)
    assert torch.equal(x.double(), total)
    near(x_out, total / (total.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double())


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul(dtype: torch.dtype) -> None:
    x = normal(5, 24, dtype=dtype)
    out = torch.empty(5, 12, dtype=dtype)
    silu_and_mul(x, out)
    gate, up = x[:, :12].double(), x[:, 12:].double()
    near(out, gate / (1 + (-gate).exp()) * up)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_turns_pairs(dtype: torch.dtype) -> None:
    """As multiplication of complex numbers; the input may be a slice of something wider."""
    x = normal(6, 5, 16, dtype=dtype)[:, :3]
    angle = torch.arange(6).unsqueeze(1) * torch.tensor([1.0, 0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3, 3e-4])
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    out = torch.empty(6, 3, 16, dtype=dtype)
    rotary(x, cos, sin, out)
    turned = torch.complex(x[..., :8].double(), x[..., 8:].double()) * torch.polar(
        torch.ones(6, 1, 8, dtype=torch.float64), angle.double().unsqueeze(1)
    )
    near(out, torch.cat((turned.real, turned.imag), -1))


def test_kv_write_touches_its_places_only() -> None:
    keys, values = torch.zeros(4, 8, 2, 3), torch.zeros(4, 8, 2, 3)
    k, v = normal(3, 2, 3), normal(3, 2, 3, seed=1)
    kv_write(k, v, keys, values, torch.tensor([8 + 7, 2 * 8, 3 * 8 + 1]))
    for i, (block, offset) in enumerate([(1, 7), (2, 0), (3, 1)]):
        assert torch.equal(keys[block, offset], k[i])
        assert torch.equal(values[block, offset], v[i])
    assert (keys != 0).sum() == (values != 0).sum() == 18


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Lower-right causal attention, one head at a time, in float64: q [n, heads, d], k and v [length, kv_heads, d]."""
    (n, heads, d), (length, kv_heads, _) = q.shape, k.shape
    out = torch.empty(n, heads, d, dtype=torch.float64)
    for head in range(heads):
        own = head // (heads // kv_heads)
        for i in range(n):
            seen = length - n + i + 1
            weights = (k[:seen, own].double() @ q[i, head].double() / d**0.5).softmax(-1)
            out[i, head] = weights @ v[:seen, own].double()
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
def test_attend_tokens(dtype: torch.dtype, heads: int, kv_heads: int) -> None:
    keys, values = normal(7, 8, kv_heads, 16, dtype=dtype), normal(7, 8, kv_heads, 16, dtype=dtype, seed=1)
    q = normal(3, heads, 16, dtype=dtype, seed=2)
    blocks = torch.tensor([[3, 0, 0], [1, 6, 2], [5, 4, 0]])
    lengths = [2, 21, 16]
    mask = torch.zeros(3, 1, 1, 21, dtype=dtype)
    for row, length in enumerate(lengths):
        mask[row, ..., length:] = -float("inf")
    out = torch.empty(3, heads, 16, dtype=dtype)
    attend_tokens(q, keys, values, blocks, 21, mask, out, 0.25)
    for row, length in enumerate(lengths):
        k, v = (x[blocks[row]].flatten(0, 1)[:length] for x in (keys, values))
        near(out[row : row + 1], attention(q[row : row + 1], k, v))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "length"), [(2, 2), (19, 19), (5, 23), (2, 17)])
def test_attend_chunk(dtype: torch.dtype, n: int, length: int) -> None:
    keys, values = normal(7, 8, 2, 16, dtype=dtype), normal(7, 8, 2, 16, dtype=dtype, seed=1)
    q, blocks = normal(n, 6, 16, dtype=dtype, seed=2), torch.tensor([6, 2, 4])
    mask = None
    if n < length:
        mask = torch.zeros(n, length, dtype=dtype)
        mask.masked_fill_(torch.ones(n, length, dtype=torch.bool).triu(length - n + 1), -float("inf"))
    out = torch.empty(n, 6, 16, dtype=dtype)
    attend_chunk(q, keys, values, blocks, mask, out, 0.25)
    k, v = (x[blocks].flatten(0, 1)[:length] for x in (keys, values))
    near(out, attention(q, k, v))
