"""The torch references against the formulas in their docstrings, written out in float64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from quire.compute.kernels.dispatch import KERNELS, kernel
from quire.compute.kernels.reference.activation import gelu, gelu_and_mul, silu_and_mul, soft_cap
from quire.compute.kernels.reference.attention_inputs import CacheWrite, Mask, PagedKV, PagedRows, QKNormRope, Scores
from quire.compute.kernels.reference.experts import experts, pack_experts, route
from quire.compute.kernels.reference.norm import layer_norm, rms_norm
from quire.compute.kernels.reference.rotary import rotary
from quire.compute.kernels.reference.rowwise_attention import paged_attention, qk_norm_rope_and_cache
from quire.compute.kernels.routing import Routing

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
DTYPES = list(TOLERANCE)


def near(found: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("op", [op for op, device in KERNELS if device == "cpu"])
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


def test_qk_norm_rope_and_cache_touches_its_places_only() -> None:
    keys, values = torch.zeros(4, 8, 2, 4), torch.zeros(4, 8, 2, 4)
    qkv, q = normal(3, 5 + 4, 4), torch.empty(3, 5, 4)
    write = CacheWrite(PagedKV(keys, values), torch.tensor([8 + 7, 2 * 8, 3 * 8 + 1]))
    qk_norm_rope_and_cache(qkv, QKNormRope(), write, q)
    assert torch.equal(q, qkv[:, :5])
    for i, (block, offset) in enumerate([(1, 7), (2, 0), (3, 1)]):
        assert torch.equal(keys[block, offset], qkv[i, 5:7])
        assert torch.equal(values[block, offset], qkv[i, 7:])
    assert (keys != 0).sum() == (values != 0).sum() == 24


def test_qk_norm_rope_and_cache_norms_then_turns_queries_and_keys_but_no_values() -> None:
    qkv, norm, q = normal(3, 3 + 4, 8), normal(5, 8, seed=1), torch.empty(3, 3, 8)
    angle = normal(3, 4, seed=2)
    keys, values = torch.zeros(1, 8, 2, 8), torch.zeros(1, 8, 2, 8)
    write = CacheWrite(PagedKV(keys, values), torch.arange(3))
    qk_norm_rope_and_cache(qkv, QKNormRope(norm, 1e-3, angle.cos(), angle.sin()), write, q)
    normed, turned = torch.empty(3, 5, 8), torch.empty(3, 5, 8)
    rms_norm(qkv[:, :5], norm, 1e-3, normed)
    rotary(normed, angle.cos(), angle.sin(), turned)
    assert torch.equal(torch.cat((q, keys[0, :3]), 1), turned)
    assert torch.equal(values[0, :3], qkv[:, 5:])


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    cap: float | None = None,
    window: int | None = None,
    chunk: int | None = None,
    two_sided: bool = False,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """Attention, one head at a time, in float64: q [n, heads, d], k and v [length, kv_heads, d].

    It is lower-right causal, or two-sided.
    """
    (n, heads, d), (length, kv_heads, _) = q.shape, k.shape
    out = torch.empty(n, heads, d, dtype=torch.float64)
    for head in range(heads):
        own = head // (heads // kv_heads)
        for i in range(n):
            seen = length - n + i + 1
            first = 0 if window is None else max(0, seen - window)
            first = first if chunk is None else (seen - 1) // chunk * chunk
            if two_sided:
                seen = length if window is None else min(length, seen - 1 + window)
            scores = k[first:seen, own].double() @ q[i, head].double() * (scale or d**-0.5)
            scores -= 0 if slopes is None else slopes[head].double() * torch.arange(len(scores)).flip(0)
            weights = (scores if cap is None else cap * (scores / cap).tanh()).exp()
            total = weights.sum() + (0 if sinks is None else sinks[head].double().exp())
            out[i, head] = weights / total @ v[first:seen, own].double()
    return out


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_applies_an_fp32_weight_before_it_rounds(dtype: torch.dtype) -> None:
    """Several heads at once, each with its weight; in bf16 within half a unit of the exact product."""
    x, weight = normal(5, 3, 16, dtype=dtype), normal(3, 16, seed=1)
    out = torch.empty_like(x)
    rms_norm(x, weight, 1e-3, out)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()
    torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(dtype).eps * 0.51 + 1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm(dtype: torch.dtype) -> None:
    x, weight, bias, delta = (normal(*s, dtype=dtype, seed=i) for i, s in enumerate([(6, 24), (24,), (24,), (6, 24)]))
    total = (x + delta).double()
    layer_norm(x, weight, bias, 1e-3, out := torch.empty_like(x), delta)
    assert torch.equal(x.double(), total)
    centred = total - total.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    near(out, scaled * weight.double() + bias.double())


def tanh_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + ((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)).tanh())


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelus(dtype: torch.dtype) -> None:
    x = normal(5, 24, dtype=dtype)
    gelu(x, whole := torch.empty_like(x))
    near(whole, tanh_gelu(x.double()))
    gelu_and_mul(x, out := torch.empty(5, 12, dtype=dtype))
    near(out, tanh_gelu(x[:, :12].double()) * x[:, 12:].double())


def test_soft_cap_bounds() -> None:
    x = torch.tensor([-1e6, -3.0, 0.0, 0.01, 50.0])
    exact = 7 * (x.double() / 7).tanh()
    soft_cap(x, 7.0)
    near(x, exact)


def test_rotary_keeps_what_is_beyond_its_width() -> None:
    x = normal(4, 2, 10)
    angle = normal(4, 3, seed=1)
    rotary(x, angle.cos(), angle.sin(), out := torch.empty_like(x))
    rotary(x[..., :6], angle.cos(), angle.sin(), part := torch.empty(4, 2, 6))
    assert torch.equal(out[..., :6], part)
    assert torch.equal(out[..., 6:], x[..., 6:])


@pytest.mark.parametrize("renormalise", [False, True])
def test_route_takes_the_likeliest(renormalise: bool) -> None:
    logits = normal(9, 6)
    weights, numbers = route(logits, Routing(3, renormalise))
    exact = logits.double().softmax(-1)
    for row, (own, chosen) in enumerate(zip(weights, numbers, strict=True)):
        assert chosen.tolist() == exact[row].argsort(descending=True)[:3].tolist()
        expected = exact[row, chosen] / (exact[row, chosen].sum() if renormalise else 1)
        near(own, expected)


@pytest.mark.parametrize("tokens", [1, 11])
def test_experts_are_their_mlps_summed_by_weight(tokens: int) -> None:
    x, gate_up, down = normal(tokens, 8), normal(5, 12, 8, seed=1), normal(5, 8, 6, seed=2)
    weights, numbers = route(normal(tokens, 5, seed=3), Routing(2))
    experts(x, pack_experts(gate_up), pack_experts(down), numbers, weights, out := torch.empty_like(x))
    expected = torch.zeros(tokens, 8, dtype=torch.float64)
    for token in range(tokens):
        for weight, number in zip(weights[token].double(), numbers[token], strict=True):
            gate, up = (gate_up[number].double() @ x[token].double()).chunk(2)
            expected[token] += weight * (down[number].double() @ (gate / (1 + (-gate).exp()) * up))
    near(out, expected)
    kernel("experts", "cpu")(x, *map(kernel("pack_experts", "cpu"), (gate_up, down)), numbers, weights, out)
    near(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", [Mask(two_sided=True), Mask(5, two_sided=True), Mask(40, two_sided=True)], ids=str)
@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("sinks", [False, True])
def test_two_sided_attention_of_whole_rows(dtype: torch.dtype, mask: Mask, cap: float | None, sinks: bool) -> None:
    counts = torch.tensor([1, 19, 7, 24])
    keys, values = normal(16, 8, 2, 16, dtype=dtype), normal(16, 8, 2, 16, dtype=dtype, seed=1)
    q = normal(51, 6, 16, dtype=dtype, seed=2)
    table = (torch.randperm(15, generator=torch.Generator().manual_seed(3)) + 1)[:12].view(4, 3)
    slots, out = torch.tensor([2, 0, 3, 1]), torch.full_like(q, float("nan"))
    own_sinks = torch.linspace(-3, 3, 6) if sinks else None
    rows = PagedRows(table, slots, torch.zeros_like(counts), counts)
    paged_attention(q, PagedKV(keys, values), rows, mask, Scores(0.4, cap, own_sinks), out)
    for row, (first, end) in enumerate(pairwise([0, *counts.cumsum(0).tolist()])):
        k, v = (x[table[slots[row]]].flatten(0, 1)[: end - first] for x in (keys, values))
        near(out[first:end], attention(q[first:end], k, v, 0.4, cap, *mask, own_sinks))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", [Mask(), Mask(5), Mask(40), Mask(chunk=6)], ids=str)
@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("more", ["", "sinks", "slopes"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
def test_paged_attention(
    dtype: torch.dtype, mask: Mask, cap: float | None, more: str, heads: int, kv_heads: int
) -> None:
    """Rows of one token and of many, with a past and without."""
    starts, counts = torch.tensor([20, 0, 3, 0, 15]), torch.tensor([1, 1, 19, 7, 2])
    keys, values = normal(16, 8, kv_heads, 16, dtype=dtype), normal(16, 8, kv_heads, 16, dtype=dtype, seed=1)
    q = normal(30, heads, 16, dtype=dtype, seed=2)
    table = (torch.randperm(15, generator=torch.Generator().manual_seed(3)) + 1).view(5, 3)
    slots, out = torch.tensor([2, 4, 0, 3, 1]), torch.full_like(q, float("nan"))
    rows = PagedRows(table, slots, starts, counts)
    sinks = torch.linspace(-3, 3, heads) if more == "sinks" else None
    slopes = torch.linspace(0.1, 1.5, heads) if more == "slopes" and cap is None else None
    paged_attention(q, PagedKV(keys, values), rows, mask, Scores(0.4, cap, sinks, slopes), out)
    for row, (first, end) in enumerate(pairwise([0, *counts.cumsum(0).tolist()])):
        length = int(starts[row] + counts[row])
        k, v = (x[table[slots[row]]].flatten(0, 1)[:length] for x in (keys, values))
        near(out[first:end], attention(q[first:end], k, v, 0.4, cap, *mask, sinks, slopes))
