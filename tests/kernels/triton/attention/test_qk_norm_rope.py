"""Norm, rotation and storing in one kernel against the reference; and where a step's tokens go."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from quire.compute.kernels.reference import rowwise_attention as reference
from quire.compute.kernels.reference.attention_inputs import CacheWrite, NormRopeForm, PagedKV, QKNormRope
from quire.compute.kernels.reference.paged_attention import compute_slot_mapping as slot_mapping_in_torch
from quire.compute.kernels.triton.attention.qk_norm_rope import qk_mean_squares, qk_norm_rope_and_cache
from quire.compute.kernels.triton.attention.slot_mapping import compute_slot_mapping

NAN = float("nan")
HALVES = NormRopeForm()
DTYPES = [torch.float32, torch.bfloat16]


def assert_near(found: Tensor, expected: Tensor, rounding: float) -> None:
    """The reference rounds once more, between the two products of a rotation, and where these cancel that is the error
    of the larger; `rounding` is the largest product's size."""
    unit = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found, expected, rtol=2 * unit, atol=2 * unit * rounding)


def check(
    tokens: int,
    heads: int,
    kv_heads: int,
    d: int,
    device: str,
    dtype: torch.dtype = torch.float32,
    width: int | None = None,
    norm: torch.dtype | None = None,
    form: NormRopeForm = HALVES,
    *,
    of_all: bool = False,
) -> None:
    """`width` dimensions turn; None: there is no rotation. Where heads are normed together (`of_all`), queries have
    factors too."""
    wide = torch.randn(tokens, heads + 2 * kv_heads + 3, d).to(dtype).to(device)
    qkv = wide[:, : heads + 2 * kv_heads]  # tokens may lie apart
    before = wide.clone()
    weight = None if norm is None else (1 + 0.3 * torch.randn(heads + kv_heads, d)).to(norm).to(device)
    angle = None if width is None else 10 * torch.randn(tokens, width // 2, device=device)
    cos, sin = (None, None) if angle is None else (angle.cos().to(dtype), angle.sin().to(dtype))
    slot_mapping = (
        torch.randperm(24, device=device)[:tokens] + 8 if tokens <= 24 else torch.arange(tokens, device=device)
    )
    blocks = 4 if tokens <= 24 else -(-tokens // 8)
    caches = torch.full((2, 2, blocks, 8, kv_heads, d), NAN, dtype=dtype, device=device)
    found, expected = (torch.full((tokens, heads, d), NAN, dtype=dtype, device=device) for _ in range(2))
    norm_rope = QKNormRope(weight, 1e-3, cos, sin, form=form)
    if form.centered and weight is not None:
        norm_rope = norm_rope._replace(bias=torch.randn_like(weight))
    if of_all:
        sums = torch.empty(tokens, 2, device=device), torch.empty(tokens, 2, device=device)
        qk_mean_squares(qkv, heads, kv_heads, 2, sums[0])
        reference.qk_mean_squares(qkv, heads, kv_heads, 2, sums[1])
        torch.testing.assert_close(*sums)
        factors = torch.rand(tokens, device=device) + 0.5
        norm_rope = norm_rope._replace(mean_squares=sums[1], query_scale=factors)
    qk_norm_rope_and_cache(qkv, norm_rope, CacheWrite(PagedKV(*caches[0]), slot_mapping), found)
    reference.qk_norm_rope_and_cache(qkv, norm_rope, CacheWrite(PagedKV(*caches[1]), slot_mapping), expected)
    assert torch.equal(wide, before)
    assert torch.equal(caches[0].isnan(), caches[1].isnan())  # nothing else is touched
    largest = 1.0 if not tokens else float(expected.float().abs().max())
    assert_near(found, expected, largest)
    assert_near(caches[0, 0].nan_to_num(), caches[1, 0].nan_to_num(), largest)
    assert torch.equal(caches[0, 1].nan_to_num(), caches[1, 1].nan_to_num())  # values are copied, or bounded


FORMS = {
    "interleaved": NormRopeForm(interleaved=True),
    "norm last": NormRopeForm(norm_last=True),
    "layer norm": NormRopeForm(centered=True),
    "clipped": NormRopeForm(clip=0.7),
    "all": NormRopeForm(interleaved=True, centered=True, norm_last=True, clip=1.5),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("d", "width"), [(16, 16), (80, 44), (64, None)])
def test_forms(d: int, width: int | None, form: str, dtype: torch.dtype, device: str) -> None:
    check(3, 4, 2, d, device, dtype, width, dtype, FORMS[form])
    if not FORMS[form].centered:
        check(3, 4, 2, d, device, dtype, width, dtype, FORMS[form], of_all=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("d", "width"), [(16, 16), (80, 44), (64, None)])
@pytest.mark.parametrize(
    "form", [NormRopeForm(values="normed"), NormRopeForm(values="keys"), NormRopeForm(stores=False)], ids=str
)
def test_values_that_are_normed_and_queries_alone(
    form: NormRopeForm, d: int, width: int | None, dtype: torch.dtype, device: str
) -> None:
    heads, kv_heads, tokens = 4, 2, 3
    projected = heads + kv_heads * (0 if not form.stores else 1 if form.values == "keys" else 2)
    qkv, norm = (torch.randn(n, projected, d, device=device, dtype=dtype) for n in (tokens, 1))
    angle = torch.randn(tokens, (width or 2) // 2, device=device)
    cos, sin = (None, None) if width is None else (angle.cos().to(dtype), angle.sin().to(dtype))
    norm_rope = QKNormRope(norm[0, : heads + kv_heads * form.stores], 1e-5, cos, sin, form=form)
    caches = torch.zeros((2, 2, 2, 4, kv_heads, d), dtype=dtype, device=device)
    found, expected = (torch.empty(tokens, heads, d, dtype=dtype, device=device) for _ in range(2))
    places = torch.tensor([5, 1, 6], device=device)
    qk_norm_rope_and_cache(qkv, norm_rope, CacheWrite(PagedKV(*caches[0]), places), found)
    reference.qk_norm_rope_and_cache(qkv, norm_rope, CacheWrite(PagedKV(*caches[1]), places), expected)
    assert bool(caches[1].any()) == form.stores
    assert_near(found, expected, 4.0)
    assert_near(caches[0], caches[1], 4.0)


@pytest.mark.parametrize(("dtype", "tokens"), [*product(DTYPES, (0, 1, 3, 17)), (torch.float16, 3)])
def test_rows(tokens: int, dtype: torch.dtype, device: str) -> None:
    check(tokens, 4, 2, 16, device, dtype, width=16, norm=dtype)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (14, 2), (8, 8), (32, 8)])
@pytest.mark.parametrize("tokens", [2, 40, 70])
def test_heads(tokens: int, heads: int, kv_heads: int, device: str) -> None:
    """A program has more heads where tokens are many."""
    check(tokens, heads, kv_heads, 8, device, width=8, norm=torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("d", "width"), [(48, 48), (64, None), (80, 32), (80, 80), (128, 128), (256, 64)])
def test_widths(d: int, width: int | None, norm: torch.dtype | None, dtype: torch.dtype, device: str) -> None:
    if dtype == torch.float32 and norm == torch.bfloat16:
        norm = torch.float32
    check(3, 3, 1, d, device, dtype, width=width, norm=norm)


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_the_norm_rounds_as_the_reference_does(dtype: torch.dtype, device: str) -> None:
    """Without a rotation the two agree but for the last bit of the mean."""
    qkv, norm = torch.randn(9, 6, 64).to(dtype).to(device), torch.randn(5, 64).to(device)
    for weight in (norm, norm.to(dtype)):
        keys, values = torch.zeros((2, 2, 8, 1, 64), dtype=dtype, device=device)
        found, expected = (torch.empty((9, 4, 64), dtype=dtype, device=device) for _ in range(2))
        slot_mapping = torch.arange(9, device=device)
        norm_rope, write = QKNormRope(weight, 1e-6), CacheWrite(PagedKV(keys, values), slot_mapping)
        qk_norm_rope_and_cache(qkv, norm_rope, write, found)
        reference.qk_norm_rope_and_cache(qkv, norm_rope, write, expected)
        assert (found != expected).float().mean() < 0.01


@pytest.mark.parametrize("block_size", [8, 16, 32, 128])
@pytest.mark.parametrize("tokens", [1, 17, 300])
def test_places_of_tokens(tokens: int, block_size: int, device: str) -> None:
    table = torch.randint(2**33, (5, 40), device=device)
    slots, positions = (
        torch.randint(5, (tokens,), device=device),
        torch.randint(40 * block_size, (tokens,), device=device),
    )
    found, expected = (torch.full((tokens,), -1, device=device) for _ in range(2))
    compute_slot_mapping(table, slots, positions, block_size, found)
    slot_mapping_in_torch(table, slots, positions, block_size, expected)
    assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 129, 8192])
@pytest.mark.parametrize(("heads", "kv_heads", "norm"), [(32, 8, None), (16, 8, torch.bfloat16), (8, 4, torch.float32)])
def test_real_sizes(tokens: int, heads: int, kv_heads: int, norm: torch.dtype | None) -> None:
    check(tokens, heads, kv_heads, 128, "cuda", torch.bfloat16, width=128, norm=norm)


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_that_are_values_too_are_stored_once(dtype: torch.dtype, device: str) -> None:
    tokens, heads, d = 7, 5, 40
    qk = torch.randn(tokens, heads + 1, d).to(dtype).to(device)
    angle = 10 * torch.randn(tokens, 4, device=device)
    norm_rope = QKNormRope(cos=angle.cos().to(dtype), sin=angle.sin().to(dtype), form=NormRopeForm(interleaved=True))
    slot_mapping, stored, queries = torch.randperm(24, device=device)[:tokens], [], []
    for op in (qk_norm_rope_and_cache, reference.qk_norm_rope_and_cache):
        cache = torch.zeros((3, 8, 1, d), dtype=dtype, device=device)
        q = torch.empty((tokens, heads, d), dtype=dtype, device=device)
        op(qk, norm_rope, CacheWrite(PagedKV(cache, cache), slot_mapping), q)
        stored.append(cache)
        queries.append(q)
    assert_near(stored[0], stored[1], 4.0)
    assert_near(queries[0], queries[1], 4.0)
    assert torch.equal(stored[0].flatten(0, 2)[slot_mapping, 8:], qk[:, heads, 8:])
