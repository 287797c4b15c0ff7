"""Attention of many rows of one token on Hopper, against the reference; whom it serves; and that it compiles."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from quire.compute.kernels.reference import paged_attention as reference
from quire.compute.kernels.reference.attention_inputs import DecodeRows, Mask, PagedKV, PagedRows, Scores
from quire.compute.kernels.reference.rowwise_attention import quantized
from quire.compute.kernels.triton.attention import decode_large_batch, decode_split_kv
from quire.compute.kernels.triton.attention.decode_large_batch import (
    MANY_ROWS,
    MANY_ROWS_8_BIT,
    decode_attention_large_batch,
    serves_large_batch,
    supports_blocks,
)
from quire.compute.kernels.triton.attention.decode_split_kv import (
    MIN_SPLIT_TILES,
    keys_of_tile,
    kv_splits_at_once,
    kv_splits_for,
    plan_kv_splits,
)
from tests.kernels.triton.attention.paged import NAN, Paged, paged, sinks_of
from tests.kernels.triton.not_interpreted import printed_by

AROUND_TILES = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 300, 1000]
LLAMA = (32, 8, 128)
NARROW = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


@dataclass
class Rows:
    """Rows of one token on a card, their contexts, and what attends to them. Before and behind their tokens, and in the
    lines of splits that there are not, is poison.

    Args:
        lengths: Of contexts.
        heads: Query heads, KV heads, their width.
        room: For splits; None: as in serving.
        at_once: The same.
        narrow: 8-bit elements of the cache, with a scale for each head; None: it is of `dtype`.
    """

    lengths: list[int]
    heads: tuple[int, int, int] = LLAMA
    dtype: torch.dtype = torch.bfloat16
    block_size: int = 16
    window: int | None = None
    chunk: int | None = None
    cap: float | None = None
    sinks: bool = False
    room: int | None = None
    at_once: int | None = None
    narrow: torch.dtype | None = None

    def __post_init__(self) -> None:
        query, kv_heads, d = self.heads
        device, rows = torch.device("cuda"), len(self.lengths)
        begins = None if self.chunk is None else [(length - 1) // self.chunk * self.chunk for length in self.lengths]
        self.cache = paged(self.lengths, self.block_size, kv_heads, d, self.dtype, "cuda", self.window, begins)
        self.cache.kv.keys[0] = self.cache.kv.values[0] = NAN
        if self.narrow is not None:
            self.cache = Paged(narrowed(self.cache.kv, self.narrow), self.cache.table)
        self.q = torch.randn((rows + 2, query, d), dtype=self.dtype, device=device)
        if self.cache.kv.scales is not None:
            self.q *= self.cache.kv.scales[0].repeat_interleave(query // kv_heads)[:, None]
        self.q[0] = self.q[-1] = NAN
        self.at_once = self.at_once or kv_splits_at_once(kv_heads, device)
        room = self.room or kv_splits_for(rows, self.at_once)
        self.splits = torch.full((room, reference.KV_SPLIT_COLUMNS), -(2**31), dtype=torch.int32, device=device)
        self.starts = torch.tensor(self.lengths, device=device) - 1
        self.slots = torch.arange(rows, device=device)
        self.partials = reference.new_decode_partials(room, query, kv_heads, d, device)
        self.partials.outputs.fill_(NAN)
        self.partials.sums.fill_(NAN)

    def cut(self) -> None:
        tile, which = keys_of_tile(self.heads[2], 2), torch.arange(len(self.slots), device="cuda")
        assert self.at_once is not None
        rows = PagedRows(self.cache.table, self.slots, self.starts, torch.ones_like(which))
        decode, mask = DecodeRows(which, which + 1), Mask(self.window, self.chunk)
        plan_kv_splits(rows, decode, mask, self.splits, tile, self.at_once, MIN_SPLIT_TILES)

    def attend(self, out: Tensor) -> None:
        """[tokens, heads, d] by the kernel."""
        decode_attention_large_batch(self.q, *self.cache, self.splits, self.partials, self.scores, out)

    def check(self, out: Tensor) -> None:
        """Against the reference."""
        expected = torch.full_like(out, NAN)
        reference.decode_attention(self.q, *self.cache, self.splits, self.partials, self.scores, expected)
        assert out[0].isnan().all()
        assert out[-1].isnan().all()
        off, size = ((x[1:-1].float()).norm(dim=-1) for x in (out.float() - expected.float(), expected))
        assert (off <= 1e-2 * size).all(), "a tile too few, or too many, of a long context is more than that"
        assert not self.partials.arrived.any()

    @property
    def scores(self) -> Scores:
        return Scores(self.heads[2] ** -0.5, self.cap, sinks_of(self.heads[0], "cuda") if self.sinks else None)


def narrowed(kv: PagedKV, dtype: torch.dtype) -> PagedKV:
    """The cache in elements of 8 bits, which fill what these can hold, with scales of heads."""
    most = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    keys, values = (quantized((x.float() * (most / 4)), dtype) for x in (kv.keys, kv.values))
    heads = torch.arange(2 * keys.shape[2], device=keys.device).view(2, -1)
    return PagedKV(keys, values, (1 + heads % 5 / 8) * (4 / most))


def check(rows: Rows) -> None:
    """And once more, with what the first time has left: the same."""
    rows.cut()
    outs = [torch.full_like(rows.q, NAN) for _ in range(2)]
    for out in outs:
        rows.attend(out)
    rows.check(outs[0])
    assert torch.equal(outs[0][1:-1], outs[1][1:-1])


@pytest.mark.gpu
@pytest.mark.parametrize("longest", [1, 33, 190, 5000])
@pytest.mark.parametrize("rows", [1, 7, 16, 33, 300])
def test_any_rows(rows: int, longest: int) -> None:
    """As many programs as the card holds: most have one unit, or several, or some have none."""
    rng = random.Random(rows)
    check(Rows([rng.randint(1, min(longest, 200_000 // rows)) for _ in range(rows)]))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "cap", "dtype"),
    [
        ((4, 4, 64), None, torch.bfloat16),
        ((14, 2, 64), 2.0, torch.float16),
        ((16, 1, 64), None, torch.float16),
        ((8, 8, 128), 30.0, torch.bfloat16),
        ((7, 1, 128), None, torch.float16),
        ((16, 1, 128), 2.0, torch.bfloat16),
        ((4, 4, 256), 2.0, torch.float16),
        ((14, 2, 256), None, torch.bfloat16),
        ((16, 1, 256), None, torch.bfloat16),
    ],
)
def test_sizes_of_heads_and_groups(heads: tuple[int, int, int], cap: float | None, dtype: torch.dtype) -> None:
    for room in (16, 40):
        check(Rows([*AROUND_TILES, 3000], heads, dtype, cap=cap, room=room, at_once=room))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("d", "block_size"),
    [(d, size) for d in (64, 128, 256) for size in (8, 16, 32, 64, 96) if supports_blocks(size, d)],
)
def test_block_sizes_and_windows(d: int, block_size: int) -> None:
    """A window may begin anywhere in a piece, and be shorter than a tile."""
    for window in (None, 1, 7, 16, 40, 100, 700):
        for room in (20, 70):
            check(Rows([*AROUND_TILES, 2000], (4, 2, d), block_size=block_size, window=window, room=room, at_once=room))


@pytest.mark.gpu
@pytest.mark.parametrize("narrow", NARROW, ids=str)
@pytest.mark.parametrize(
    ("heads", "cap", "dtype"),
    [
        (LLAMA, None, torch.bfloat16),
        (LLAMA, 30.0, torch.float16),
        ((14, 2, 64), 2.0, torch.bfloat16),
        ((16, 1, 128), None, torch.bfloat16),
        ((4, 4, 64), None, torch.float16),
    ],
)
def test_elements_of_8_bits(
    heads: tuple[int, int, int], cap: float | None, dtype: torch.dtype, narrow: torch.dtype
) -> None:
    for room in (16, 40):
        check(Rows([*AROUND_TILES, 3000], heads, dtype, cap=cap, room=room, at_once=room, narrow=narrow))
    check(Rows([190] * 300, heads, dtype, cap=cap, narrow=narrow))


@pytest.mark.gpu
@pytest.mark.parametrize("narrow", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize(("window", "chunk"), [(None, None), (128, None), (None, 1000)])
@pytest.mark.parametrize("heads", [(64, 8, 64), (16, 2, 128)])
def test_sinks_and_chunks(
    heads: tuple[int, int, int], window: int | None, chunk: int | None, narrow: torch.dtype | None
) -> None:
    for room in (16, 40):
        rows = Rows([*AROUND_TILES, 3000], heads, window=window, chunk=chunk, sinks=True, room=room, at_once=room)
        check(replace(rows, narrow=narrow))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("d", "block_size"),
    [(d, size) for d in (64, 128) for size in (8, 16, 32, 64, 96) if supports_blocks(size, d)],
)
def test_blocks_and_windows_of_8_bits(d: int, block_size: int) -> None:
    for window in (None, 1, 7, 40, 700):
        rows = [*AROUND_TILES, 2000]
        check(Rows(rows, (4, 2, d), block_size=block_size, window=window, room=70, at_once=70, narrow=NARROW[0]))


@pytest.mark.gpu
@pytest.mark.parametrize("factor", [0.0, 1e-30, 1e-6, 1e6, 1e30])
def test_queries_of_any_size(factor: float) -> None:
    """They become fp16, whose range is smaller than theirs. Rows of other sizes are beside them."""
    rows = Rows([100, 40, 7] * 10, narrow=torch.float8_e4m3fn)
    rows.q[2:-1:3] *= factor
    check(rows)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(32, 8, 128), (16, 1, 128), (3, 3, 64), (16, 2, 256)])
@pytest.mark.parametrize("room", [1, 2, 7, 8, 9, 17, 78])
def test_merging(room: int, heads: tuple[int, int, int]) -> None:
    """One piece to a row; as many as are read at a time, one fewer, one more; many."""
    check(Rows([5000], heads, room=room, at_once=room))


@pytest.mark.gpu
def test_one_long_row_among_many() -> None:
    check(Rows([100_000, *range(150, 213)]))


@pytest.mark.gpu
def test_no_row() -> None:
    rows = Rows([5] * 20)
    rows.splits[:, 6] = 0
    out = torch.full_like(rows.q, NAN)
    rows.attend(out)
    assert out.isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("narrow", [None, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_a_row_that_is_not_a_number_is_alone(narrow: torch.dtype | None) -> None:
    rows = Rows([200] * 40, narrow=narrow)
    rows.cache.kv.values[rows.cache.table[7, 3]] = NAN
    rows.cut()
    out = torch.full_like(rows.q, NAN)
    rows.attend(out)
    assert out[8].isnan().all()
    assert out[1:8].isfinite().all()
    assert out[9:-1].isfinite().all()


@pytest.mark.gpu
def test_replayed_at_any_lengths() -> None:
    """Each kernel of the graph starts while the one before ends. Rows may become shorter than they were recorded."""
    rows = Rows([700] * 60)
    rows.cut()
    out = torch.full_like(rows.q, NAN)
    rows.attend(out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows.cut()
        for _ in range(3):
            out[1:-1].zero_()
            rows.attend(out)
    rng = random.Random(0)
    for longest in (700, 1, 40, 700, 130):
        rows.starts.copy_(torch.tensor([rng.randint(1, longest) - 1 for _ in range(60)]))
        out[1:-1].fill_(NAN)
        graph.replay()
        rows.check(out)


def operands(heads: int = 32, kv_heads: int = 8, d: int = 128, block_size: int = 16) -> tuple[Tensor, Tensor]:
    with torch.device("meta"):
        return (
            torch.empty(2 * MANY_ROWS, heads, d, dtype=torch.bfloat16),
            torch.empty(9, block_size, kv_heads, d, dtype=torch.bfloat16),
        )


def test_what_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    q, keys = operands()
    assert not serves_large_batch(q, keys, len(q)), "on other devices"
    monkeypatch.setattr(decode_large_batch, "is_sm_90", lambda device: True)
    assert serves_large_batch(q, keys, MANY_ROWS)
    assert not serves_large_batch(q, keys, MANY_ROWS - 1)
    assert not serves_large_batch(q.float(), keys.float(), len(q))
    assert serves_large_batch(*operands(16, 1, 256), len(q))
    assert not serves_large_batch(*operands(17, 1), len(q))
    assert not serves_large_batch(*operands(d=80), len(q))
    assert not serves_large_batch(*operands(block_size=4), len(q))
    for narrow in NARROW:
        served = [serves_large_batch(q, keys.to(narrow), rows) for rows in (0, 1, MANY_ROWS_8_BIT - 1, MANY_ROWS_8_BIT)]
        assert served == [True, False, False, True]
        assert not serves_large_batch(q.float(), keys.to(narrow), len(q))
        wide = operands(d=256)
        assert not serves_large_batch(wide[0], wide[1].to(narrow), len(q))


@pytest.mark.parametrize(
    ("d", "sizes"), [(64, [16, 32, 64, 128]), (128, [8, 16, 32, 64, 96, 128]), (256, [8, 16, 32, 48])]
)
def test_tiles_are_whole_blocks_or_lie_within_one(d: int, sizes: list[int]) -> None:
    assert [size for size in (1, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128) if supports_blocks(size, d)][
        : len(sizes)
    ] == sizes


@pytest.mark.parametrize("d", [64, 128, 256])
def test_pieces_begin_where_tiles_do(d: int) -> None:
    assert decode_split_kv.keys_of_tile(d, 2) % (decode_large_batch._TILE // d) == 0


def test_rows_decide_and_not_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step in which other rows have several. Where nobody says, every token is a row."""
    served: list[int] = []
    monkeypatch.setattr(decode_large_batch, "is_sm_90", lambda device: True)
    monkeypatch.setattr(decode_split_kv, "decode_attention_large_batch", lambda q, *rest: served.append(1))
    monkeypatch.setattr(
        decode_split_kv, "_decode_attention_split_kv", {(66 * 8,): lambda *args, **kwargs: served.append(0)}
    )
    q, keys = operands()
    splits = torch.empty((66, reference.KV_SPLIT_COLUMNS), dtype=torch.int32, device="meta")
    partials = reference.new_decode_partials(66, 32, 8, 128, q.device)
    table = torch.empty((len(q), 9), dtype=torch.int64, device="meta")
    for rows in (MANY_ROWS - 1, MANY_ROWS, None):
        decode_split_kv.decode_attention(q, PagedKV(keys, keys), table, splits, partials, Scores(0.1), q, rows)
    assert served == [0, 1, 1]


@pytest.mark.long("engine")
@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a card, other tests compile what they run")
def test_compiles_once_for_all_steps() -> None:
    lines = printed_by("tests.kernels.triton.attention.compile_decode_large_batch").splitlines()
    assert lines
    assert all(line.endswith(" 1") for line in lines)
