"""Paged attention, and what comes before it, equal their references on odd shapes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from quire.compute.kernels.cpu.embedding import query_scales
from quire.compute.kernels.cpu.rowwise_attention import paged_attention, qk_mean_squares, qk_norm_rope_and_cache
from quire.compute.kernels.reference import rotary as rotary_reference
from quire.compute.kernels.reference import rowwise_attention as reference
from quire.compute.kernels.reference.attention_inputs import (
    CacheWrite,
    Mask,
    NormRopeForm,
    PagedKV,
    PagedRows,
    QKNormRope,
    Scores,
    visible_range,
)

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}

pytestmark = pytest.mark.usefixtures("instructions")


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    d: int
    block_size: int
    rows: tuple[tuple[int, int], ...]  # tokens before the step and in it
    window: int | None = None
    cap: float | None = None
    chunk: int | None = None
    sinks: bool = False
    slopes: bool = False
    two_sided: bool = False

    @property
    def mask(self) -> Mask:
        return Mask(self.window, self.chunk, self.two_sided)

    @property
    def scores(self) -> Scores:
        """Sinks are from far below to far above all scores."""
        sinks = torch.linspace(-5, 5, self.heads) if self.sinks else None
        slopes = 0.7 ** torch.arange(1, self.heads + 1) if self.slopes else None
        return Scores(self.d**-0.5, self.cap, sinks, slopes)


WHOLE = ((0, 1), (0, 130), (0, 64), (0, 3), (0, 200), (0, 65))
MIXED = ((0, 1), (63, 1), (64, 1), (200, 1), (0, 130), (17, 40), (5, 0), (90, 2))
CASES = [
    Case(8, 8, 64, 16, MIXED),
    Case(4, 2, 32, 8, MIXED),
    Case(6, 2, 96, 32, MIXED, window=50),
    Case(8, 2, 128, 16, MIXED, cap=3.0),
    Case(16, 2, 80, 16, MIXED),
    Case(6, 6, 48, 16, MIXED),
    Case(8, 2, 16, 16, MIXED, window=70),
    Case(5, 1, 40, 8, MIXED, window=7, cap=2.0),
    Case(4, 1, 256, 16, MIXED, window=64),
    Case(2, 2, 112, 16, ((0, 3), (70, 1)), window=1),
    Case(96, 1, 64, 16, ((10, 5), (3, 1))),
    Case(3, 1, 64, 16, ((4999, 1), (4900, 90))),
    Case(2, 1, 64, 32, ((4999, 1), (3000, 70)), window=1000),
    Case(8, 2, 64, 16, MIXED, sinks=True),
    Case(4, 4, 32, 16, MIXED, window=20, cap=3.0, sinks=True),
    Case(16, 2, 80, 16, MIXED, chunk=32, sinks=True),
    Case(6, 2, 96, 16, MIXED, chunk=50),
    Case(8, 8, 64, 16, MIXED, slopes=True),
    Case(6, 2, 80, 16, MIXED, window=50, slopes=True),
    Case(4, 1, 64, 16, ((4999, 1), (3000, 70)), chunk=1024),
    Case(12, 12, 32, 16, WHOLE, two_sided=True),
    Case(6, 2, 80, 16, WHOLE, two_sided=True, window=50, cap=3.0),
    Case(12, 12, 64, 16, ((0, 700), (0, 1)), two_sided=True, window=65),
    Case(4, 4, 64, 32, WHOLE, two_sided=True, window=1, sinks=True),
]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_paged_attention(case: Case, dtype: torch.dtype) -> None:
    """Blocks lie anywhere, and what no token sees is NaN."""
    blocks = [-(-(before + count) // case.block_size) for before, count in case.rows]
    total = sum(blocks) + 1
    shape = (total, case.block_size, case.kv_heads, case.d)
    keys, values = torch.full(shape, float("nan"), dtype=dtype), torch.full(shape, float("nan"), dtype=dtype)
    order = (torch.randperm(total - 1, generator=torch.Generator().manual_seed(0)) + 1).split(blocks)
    table = torch.zeros(len(case.rows), max(blocks) + 2, dtype=torch.int64)
    slots = torch.arange(len(case.rows)).flip(0)
    for slot, own, (before, count) in zip(slots.tolist(), order, case.rows, strict=True):
        table[slot, : len(own)] = own
        first, _ = visible_range(case.mask, before, before + 1, before + count)
        position = torch.arange(first, before + count)
        where = own[position // case.block_size], position % case.block_size
        keys[where] = normal(len(position), case.kv_heads, case.d, seed=slot).to(dtype)
        values[where] = normal(len(position), case.kv_heads, case.d, seed=slot + 100).to(dtype)
    starts, counts = (torch.tensor(column) for column in zip(*case.rows, strict=True))
    q = normal(int(counts.sum()), case.heads, case.d, seed=7).to(dtype)
    out, expected = torch.full_like(q, float("nan")), torch.empty(q.shape)
    rest = (PagedRows(table, slots, starts, counts), case.mask, case.scores)
    paged_attention(q, PagedKV(keys, values), *rest, out)
    reference.paged_attention(q.float(), PagedKV(keys.float(), values.float()), *rest, expected)
    torch.testing.assert_close(out.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("cap", [None, 30.0])
@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_a_nan_in_sight_is_not_hidden(
    dtype: torch.dtype, cap: float | None, heads: int, where: str, instructions: str
) -> None:
    """One head goes over keys where they lie, eight gather them."""
    if instructions == "none":
        pytest.skip("torch's attention may write 0 where all scores are NaN")
    d = 64
    q = normal(1, heads, d, seed=0).to(dtype)
    keys, values = normal(2, 16, 1, d, seed=1).to(dtype), normal(2, 16, 1, d, seed=2).to(dtype)
    if where == "query":
        q[0, :, 3] = float("nan")
    else:
        {"key": keys, "value": values}[where][1, 5, 0] = float("nan")
    rows = PagedRows(torch.tensor([[1, 0]]), torch.tensor([0]), torch.tensor([9]), torch.tensor([1]))
    out = torch.zeros_like(q)
    paged_attention(q, PagedKV(keys, values), rows, Mask(), Scores(d**-0.5, cap), out)
    assert out.isnan().all()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("d", "rotated"), [(64, 64), (80, 32), (40, 40), (128, 0), (256, 256)])
@pytest.mark.parametrize("tokens", [1, 37])
def test_qk_norm_rope_and_cache(dtype: torch.dtype, wide: bool, d: int, rotated: int, tokens: int) -> None:
    """With a norm in x's dtype, in fp32, and without one; all heads or a part of each is rotated."""
    heads, kv_heads = 5, 2
    qkv = normal(tokens, heads + 2 * kv_heads, d, seed=0).to(dtype)
    angle = normal(tokens, rotated // 2, seed=1) * 3
    cos, sin = (angle.cos().to(dtype), angle.sin().to(dtype)) if rotated else (None, None)
    weight = normal(heads + kv_heads, d, seed=2).to(torch.float32 if wide else dtype)
    places = torch.randperm(48, generator=torch.Generator().manual_seed(3))[:tokens]
    for norm in (None, weight):
        found = [torch.zeros(6, 8, kv_heads, d, dtype=dtype) for _ in range(2)]
        expected = [torch.zeros(6, 8, kv_heads, d, dtype=dtype) for _ in range(2)]
        q, expected_q = (torch.empty(tokens, heads, d, dtype=dtype) for _ in range(2))
        norm_rope = QKNormRope(norm, 1e-5, cos, sin)
        qk_norm_rope_and_cache(qkv, norm_rope, CacheWrite(PagedKV(*found), places), q)
        reference.qk_norm_rope_and_cache(qkv, norm_rope, CacheWrite(PagedKV(*expected), places), expected_q)
        for own, other in zip((*found, q), (*expected, expected_q), strict=True):
            torch.testing.assert_close(own, other, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


FORMS = {
    "interleaved": NormRopeForm(interleaved=True),
    "norm last": NormRopeForm(norm_last=True),
    "layer norm": NormRopeForm(centered=True),
    "clipped": NormRopeForm(clip=0.7),
    "all": NormRopeForm(interleaved=True, centered=True, norm_last=True, clip=1.5),
    "normed values": NormRopeForm(values="normed"),
    "values of keys": NormRopeForm(values="keys", clip=1.5),
    "queries alone": NormRopeForm(stores=False),
}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("cache", [None, torch.int8], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("d", "rotated"), [(64, 64), (80, 44), (20, 20), (48, 0)])
def test_forms_of_norm_and_rotation(
    d: int, rotated: int, form: str, cache: torch.dtype | None, dtype: torch.dtype
) -> None:
    """With a bias, mean squares of all heads and factors of queries, where the form has them; tokens lie apart."""
    heads, kv_heads, tokens = 4, 2, 9
    own = FORMS[form]
    projected = heads + kv_heads * (0 if not own.stores else 1 if own.values == "keys" else 2)
    qkv = normal(tokens, heads + 2 * kv_heads + 1, d, seed=0).to(dtype)[:, :projected]
    angle = normal(tokens, rotated // 2, seed=1) * 3
    cos, sin = (angle.cos().to(dtype), angle.sin().to(dtype)) if rotated else (None, None)
    norm, bias = (normal(heads + kv_heads, d, seed=seed).to(dtype) for seed in (2, 3))
    of_all = torch.empty(tokens, 2)
    reference.qk_mean_squares(qkv, heads, kv_heads, 2, of_all)
    by_head = own.centered or own.values != "projected"
    norm_rope = QKNormRope(
        norm[:projected], 1e-5, cos, sin, None, own, bias if own.centered else None, None if by_head else of_all,
        normal(tokens, seed=4).abs() + 0.1,
    )  # fmt: skip
    places = torch.randperm(16, generator=torch.Generator().manual_seed(5))[:tokens]
    scales = torch.tensor([[0.05, 0.04], [0.06, 0.03]]) if cache else None
    found, expected = (
        [torch.zeros(2, 8, kv_heads, d, dtype=cache or dtype) for _ in range(2)]
        + [torch.empty(tokens, heads, d, dtype=dtype)]
        for _ in range(2)
    )
    qk_norm_rope_and_cache(qkv, norm_rope, CacheWrite(PagedKV(*found[:2], scales), places), found[2])
    reference.qk_norm_rope_and_cache(qkv, norm_rope, CacheWrite(PagedKV(*expected[:2], scales), places), expected[2])
    assert own.stores == any(bool(each.any()) for each in found[:2])
    for mine, other in zip(found, expected, strict=True):
        step = 1.0 if mine.dtype == torch.int8 else 0.0  # where a number lies between two
        torch.testing.assert_close(
            mine.float(), other.float(), rtol=2 * TOLERANCE[dtype], atol=step + 4 * TOLERANCE[dtype]
        )


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(4, 2, 64), (3, 1, 20), (8, 8, 128)])
def test_mean_squares_of_queries_and_keys(heads: int, kv_heads: int, d: int, dtype: torch.dtype) -> None:
    qkv = normal(7, heads + 2 * kv_heads + 2, d, seed=0).to(dtype)[:, : heads + 2 * kv_heads]
    found, expected = torch.empty(7, 2), torch.empty(7, 2)
    qk_mean_squares(qkv, heads, kv_heads, 3, found)
    reference.qk_mean_squares(qkv, heads, kv_heads, 3, expected)
    torch.testing.assert_close(found, expected)


def test_factors_of_queries_grow_with_their_positions() -> None:
    positions, found, expected = torch.tensor([0, 6, 7, 8, 15, 900_000]), torch.empty(6), torch.empty(6)
    query_scales(positions, 0.1, 8, 1, found)
    rotary_reference.query_scales(positions, 0.1, 8, 1, expected)
    torch.testing.assert_close(found, expected)
    steps = [0, 0, 1, 1, 2, 112_500]
    torch.testing.assert_close(found, torch.tensor([1 + 0.1 * math.log(1 + step) for step in steps]))


def cached(dtype: torch.dtype, x: Tensor) -> Tensor:
    """To the nearest of the cache's numbers, as torch rounds."""
    if dtype == torch.int8:
        return x.round().clamp(-127, 127).to(dtype)
    return x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)


QUANTIZED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("cache", QUANTIZED, ids=str)
@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[4], CASES[7], CASES[8]], ids=str)
def test_a_quantized_cache_is_read_as_what_it_stands_for(case: Case, cache: torch.dtype, dtype: torch.dtype) -> None:
    """Each head has scales of its own. Queries, already multiplied with those of keys, meet the stored numbers."""
    lengths = [before + count for before, count in case.rows]
    blocks = [-(-length // case.block_size) for length in lengths]
    shape = (sum(blocks) + 1, case.block_size, case.kv_heads, case.d)
    of_keys, of_values = scales = 0.01 + normal(2, case.kv_heads, seed=5).abs() / 40
    keys, values = (
        cached(cache, normal(*shape, seed=seed) / own[:, None]) for seed, own in ((1, of_keys), (2, of_values))
    )
    table = torch.zeros(len(case.rows), max(blocks), dtype=torch.int64)
    for row, own in enumerate((torch.arange(sum(blocks)) + 1).split(blocks)):
        table[row, : len(own)] = own
    starts, counts = (torch.tensor(column) for column in zip(*case.rows, strict=True))
    q = normal(int(counts.sum()), case.heads, case.d, seed=7)
    group = case.heads // case.kv_heads
    scaled = (q * of_keys.repeat_interleave(group)[:, None]).to(dtype)
    rows = PagedRows(table, torch.arange(len(case.rows)), starts, counts)
    mask, scores = case.mask, case.scores
    out, expected = torch.full_like(scaled, float("nan")), torch.empty(q.shape)
    paged_attention(scaled, PagedKV(keys, values, scales), rows, mask, scores, out)
    meant = PagedKV(keys.float() * of_keys[:, None], values.float() * of_values[:, None])
    exact = scaled.float() / of_keys.repeat_interleave(group)[:, None]
    reference.paged_attention(exact, meant, rows, mask, scores, expected)
    torch.testing.assert_close(out.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_small_weights_of_a_long_context_add_up(dtype: torch.dtype) -> None:
    """Each is smaller than a 16-bit step of the largest one; an int8 cache's weights are rounded to such steps."""
    length, d, far = 8_192, 64, 12.0
    keys, values = torch.zeros(2, length // 16, 16, 1, d, dtype=torch.int8).unbind()
    keys[0, 0] = 100
    values[:] = 100
    values[0, 0] = 0
    q = torch.full((1, 2, d), far / (100 * d), dtype=dtype)
    table = torch.arange(length // 16)[None]
    rows = PagedRows(table, torch.tensor([0]), torch.tensor([length - 1]), torch.tensor([1]))
    out = torch.empty_like(q)
    paged_attention(q, PagedKV(keys, values, torch.ones(2, 1)), rows, Mask(), Scores(1.0), out)
    others = (length - 1) * math.exp(-float(q[0, 0, 0]) * 100 * d)
    torch.testing.assert_close(out.float(), torch.full(q.shape, 100 * others / (1 + others)), rtol=0.02, atol=0.0)


@pytest.mark.parametrize("count", [1, 40])
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_broken_query_of_an_int8_cache_breaks_its_own_head_alone(broken: float, count: int) -> None:
    heads, d = 4, 64
    keys, values = normal(2, 4, 16, 2, d, seed=1).mul(40).round().clamp(-127, 127).to(torch.int8).unbind()
    q = normal(count, heads, d, seed=2).bfloat16()
    q[0, 1, 5] = broken
    rows = PagedRows(torch.arange(4)[None], torch.tensor([0]), torch.tensor([64 - count]), torch.tensor([count]))
    out = torch.empty_like(q)
    paged_attention(q, PagedKV(keys, values, torch.full((2, 2), 0.02)), rows, Mask(), Scores(d**-0.5), out)
    assert out[0, 1].isnan().all()
    assert out[0, [0, 2, 3]].isfinite().all()
    assert out[1:].isfinite().all()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("cache", QUANTIZED, ids=str)
@pytest.mark.parametrize("rotated", [64, 32, 0])
def test_keys_and_values_are_stored_divided_by_their_scales(
    cache: torch.dtype, rotated: int, dtype: torch.dtype
) -> None:
    """As torch rounds, too large and too small ones too; queries come out multiplied."""
    heads, kv_heads, d, tokens = 6, 2, 64, 9
    qkv = normal(tokens, heads + 2 * kv_heads, d, seed=0)
    qkv[0, heads:] *= 1e6
    qkv[1, heads:] *= 1e-4
    qkv = qkv.to(dtype)
    angle = normal(tokens, rotated // 2, seed=1) * 3
    cos, sin = (angle.cos().to(dtype), angle.sin().to(dtype)) if rotated else (None, None)
    places = torch.randperm(16, generator=torch.Generator().manual_seed(3))[:tokens]
    scales = torch.tensor([[0.25, 0.01], [0.5, 0.03]])
    dense = [torch.zeros(2, 8, kv_heads, d, dtype=dtype) for _ in range(2)]
    found = [torch.zeros(2, 8, kv_heads, d, dtype=cache) for _ in range(2)]
    plain, q = (torch.empty(tokens, heads, d, dtype=dtype) for _ in range(2))
    norm_rope = QKNormRope(cos=cos, sin=sin)
    reference.qk_norm_rope_and_cache(qkv, norm_rope, CacheWrite(PagedKV(*dense), places), plain)
    qk_norm_rope_and_cache(qkv, norm_rope, CacheWrite(PagedKV(*found, scales), places), q)
    of_queries = scales[0].repeat_interleave(3)[:, None]
    torch.testing.assert_close(q.float(), plain.float() * of_queries, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] / 4)
    for own, other, scale in zip(found, dense, scales, strict=True):
        expected = cached(cache, other.float() / scale[:, None])
        bits, meant = own.view(torch.uint8), expected.view(torch.uint8)
        assert (bits == meant).float().mean() > (0.97 if rotated and dtype == torch.bfloat16 else 0.999)
        torch.testing.assert_close(own.float(), expected.float(), rtol=0.26, atol=1.0)


def test_every_number_that_a_cache_can_hold_is_widened_exactly() -> None:
    """One key for each byte: its score with a query of ones in one place is the number itself."""
    for cache in QUANTIZED:
        numbers = torch.arange(256, dtype=torch.uint8).view(cache)
        finite = numbers[numbers.float().isfinite()].clone()
        values = finite.repeat_interleave(16).view(1, len(finite), 1, 16)
        keys = torch.zeros(values.shape, dtype=torch.uint8).view(cache)
        out = torch.empty(1, 1, 16)
        rows = PagedRows(torch.tensor([[0]]), torch.tensor([0]), torch.tensor([0]), torch.tensor([1]))
        for at in range(len(finite)):
            one = values[:, at : at + 1].contiguous()
            kv = PagedKV(keys[:, :1].contiguous(), one, torch.ones(2, 1))
            paged_attention(torch.zeros(1, 1, 16), kv, rows, Mask(), Scores(1.0), out)
            assert torch.equal(out, finite[at].float().expand(1, 1, 16))
