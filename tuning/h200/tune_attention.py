"""How attention over the paged cache is best cut: keys of a tile, warps, tiles on their way, splits of a context.

    python tuning/h200/tune_attention.py [decode] [prefill] [prefill_dense] [--heads 32/8x128]

Every candidate is compared with the reference on a small step, then timed in graphs. Single tokens are timed as a
decode step has them: layer after layer, each with a cache of its own, and what rotates and stores the tokens before.
Long rows are timed with the gathering of their contexts, on the same cases as tiles. Prints microseconds, and the share
of the GPU's memory speed or its TFLOP/s. In quire/compute/kernels/triton/attention/, the best goes to `_shape`,
`_PROGRAMS` and `MIN_SPLIT_TILES` in decode_split_kv.py, `MANY_ROWS` in decode_large_batch.py, `tile_shape` in
prefill.py and `_shape` in prefill_dense.py; and to `DENSE_MIN_QUERIES` in quire/compute/attention/limits.py.
"""

from __future__ import annotations

import argparse
import faulthandler
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from sweep import CACHES_BYTES, compile_all, graph_seconds
from torch import Tensor

from quire.compute.kernels.reference import paged_attention as reference
from quire.compute.kernels.reference.attention_inputs import (
    CacheWrite,
    GatherChunks,
    Mask,
    PagedKV,
    PagedRows,
    QKNormRope,
    Scores,
)
from quire.compute.kernels.triton.attention import (
    decode_large_batch,
    decode_split_kv,
    prefill,
    prefill_dense,
    qk_norm_rope,
)
from quire.compute.kernels.triton.attention.gather_kv import gather_kv
from quire.tools.bench.kernel_cases import KernelCase, attention

BYTES_PER_S = 4.25e12
MAX_SETS = 24
HANG_S = 120
"""Barriers that wait for each other wait for ever; so long is compiling everything given, and timing one case."""

Shape = tuple[Any, ...]
MANY: Shape = ("decode_large_batch",)
"""The kernel for many rows."""
DECODE: tuple[Shape, ...] = (  # keys, warps, stages
    (32, 1, 3), (32, 2, 3), (32, 2, 4), (32, 4, 3), (64, 2, 2), (64, 2, 3), (64, 4, 2), (64, 4, 3), (128, 4, 2), MANY,
)  # fmt: skip
PROGRAMS = (2, 4, 5, 6)
SPLITS = (64, 96, 128, 192, 256)
"""Positions of a piece where a context has more: `MIN_SPLIT_TILES` tiles."""
CHUNK: tuple[Shape, ...] = (  # rows, keys, warps, stages
    (64, 32, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 5), (64, 128, 4, 2), (128, 64, 8, 2), (128, 64, 8, 3),
)  # fmt: skip
LONG: tuple[Shape, ...] = ((64, 2), (128, 2), (128, 3))  # keys, stages
DECODE_CASES = (  # rows, tokens of a context in the mean
    (256, 190), (128, 190), (64, 190), (32, 190), (8, 190), (1, 190), (256, 600), (832, 600), (200, 560), (1, 130_000),
)  # fmt: skip
SPLIT_CASES = ((128, 190), (64, 190), (32, 190), (8, 190), (1, 190), (32, 1_000), (8, 4_000), (1, 4_000), (1, 130_000))
CHUNK_CASES = (
    (8, 512, 0), (16, 256, 0), (32, 128, 0), (11, 384, 0), (4, 1_024, 0), (8, 512, 2_000), (16, 256, 2_000),
    (1, 512, 0), (1, 2_048, 0), (1, 8_192, 0), (1, 50, 2_000),
)  # fmt: skip
MAX_LAYERS = 128
_NEVER = 2**31
_BLOCK = 16


def main() -> None:
    """Compile, compare, time and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ops", nargs="*", default=["decode", "prefill", "prefill_dense"])
    parser.add_argument("--heads", default="32/8x128", help="query heads / KV heads x width")
    parser.add_argument("--processes", type=int, default=12)
    options = parser.parse_args()
    query, rest = options.heads.split("/")
    heads = attention._Heads(int(query), *map(int, rest.split("x")))
    jobs = [(op, shape, heads) for op in options.ops for shape in _SHAPES[op]]
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    failed = compile_all(_check, jobs, options.processes)
    for (op, shape, _), text in failed.items():
        print(f"{op} {shape}: {text}")
    with torch.inference_mode():
        for op in options.ops:
            shapes = [shape for shape in _SHAPES[op] if (op, shape, heads) not in failed]
            _SECTIONS[op](shapes, heads)


def _check(job: tuple[str, Shape, attention._Heads]) -> None:
    """Compile one candidate, and compare what it says with the reference."""
    op, shape, heads = job
    torch.manual_seed(0)
    case = {"decode": attention._decode, "prefill": attention._prefill, "prefill_dense": attention._dense}[op]
    sizes = (3, 700) if op == "decode" else (2, 300, 333)
    with torch.inference_mode(), _patched(op, shape):
        args, _ = case(*sizes, heads).make(torch.device("cuda"))
        outs = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.shape == args[0].shape][1:]
        call = {
            "decode": decode_split_kv.decode_attention,
            "prefill": prefill.prefill_attention,
            "prefill_dense": prefill_dense.prefill_attention_dense,
        }[op]
        outs[-1].fill_(float("nan"))
        call(*args)
        found = outs[-1].clone()
        getattr(reference, call.__name__)(*args)
        expected = outs[-1].float()
        error = ((found.float() - expected).norm() / expected.norm()).item()
        assert error < 5e-3, f"relative error {error:.2e}"


@contextmanager
def _patched(op: str, shape: Shape) -> Iterator[None]:
    """The op's kernel cut in another way than the file says."""
    with ExitStack() as stack:
        for module, name, value in _patches(op, shape):
            stack.enter_context(patch.object(module, name, value))
        yield


def _patches(op: str, shape: Shape) -> list[tuple[ModuleType, str, Any]]:
    if op == "prefill":
        return [(prefill, "tile_shape", lambda *_: prefill.TileShape(*shape))]
    if op == "prefill_dense":
        return [(prefill_dense, "_shape", lambda *_: shape)]
    if shape == MANY:
        return [(decode_large_batch, "MANY_ROWS", 1)]
    return [
        (decode_large_batch, "MANY_ROWS", _NEVER),
        (decode_split_kv, "_shape", lambda *_: decode_split_kv._Shape(*shape)),
    ]


def _tune_decode(shapes: Sequence[Shape], heads: attention._Heads) -> None:
    figures: dict[Shape, list[float]] = {shape: [] for shape in shapes}
    for rows, length in DECODE_CASES:
        layers = _Layers(rows, length, heads)
        for shape in shapes:
            figures[shape].append(layers.seconds(shape))
    names = [f"{rows} x {length:,}" for rows, length in DECODE_CASES]
    rates = [_Layers.bytes_of(rows, length, heads) for rows, length in DECODE_CASES]
    _print_layers("qk_norm_rope_and_cache and decode_attention by keys, warps, stages", names, rates, figures)
    for shape in _best({shape: row for shape, row in figures.items() if shape != MANY}, 2):
        by_split: dict[Shape, list[float]] = {}
        before = decode_split_kv._PROGRAMS, decode_split_kv.MIN_SPLIT_TILES
        for rows, length in SPLIT_CASES:
            layers = _Layers(rows, length, heads)
            for programs in PROGRAMS:
                for split in SPLITS:
                    decode_split_kv._PROGRAMS, decode_split_kv.MIN_SPLIT_TILES = programs, max(1, split // shape[0])
                    by_split.setdefault((programs, split), []).append(layers.seconds(shape))
        decode_split_kv._PROGRAMS, decode_split_kv.MIN_SPLIT_TILES = before
        names = [f"{rows} x {length:,}" for rows, length in SPLIT_CASES]
        rates = [_Layers.bytes_of(rows, length, heads) for rows, length in SPLIT_CASES]
        _print_layers(f"{shape} by programs of a multiprocessor, positions of a piece", names, rates, by_split)


class _Layers:
    """A decode step's attention: as many layers with caches of their own as the GPU's cache does not hold.

    Args:
        rows, length: Contexts are between two and four thirds of the length.
    """

    def __init__(self, rows: int, length: int, heads: attention._Heads) -> None:
        device = torch.device("cuda")
        self._heads, self._rows = heads, rows
        spread = torch.linspace(2 / 3, 4 / 3, rows) if rows > 1 else torch.ones(1)
        lengths = (length * spread).round().long()[torch.randperm(rows)]
        each = -(-int(lengths.max()) // _BLOCK)
        self._starts, self._slots = (lengths - 1).to(device), torch.arange(rows, device=device)
        self._table = torch.randperm(rows * each, device=device).view(rows, each)
        last = self._starts[:, None] // _BLOCK
        self._places = self._table.gather(1, last)[:, 0] * _BLOCK + self._starts % _BLOCK
        one = self.bytes_of(rows, length, heads)
        number = max(2, min(MAX_LAYERS, -(-CACHES_BYTES // one)))
        shape = (number, 2, rows * each, _BLOCK, heads.kv, heads.width)
        self._caches = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        both = (rows, heads.query + 2 * heads.kv, heads.width)
        self._qkv = torch.randn(both, dtype=torch.bfloat16, device=device)
        self._cos, self._sin = (torch.randn(rows, heads.width // 2, device=device) for _ in range(2))
        self._q, self._out = (torch.empty_like(self._qkv[:, : heads.query]).contiguous() for _ in range(2))
        self._guess = one / 3e12 + 5e-6

    @staticmethod
    def bytes_of(rows: int, length: int, heads: attention._Heads) -> int:
        """Keys and values of a layer."""
        return 4 * rows * length * heads.kv * heads.width

    def seconds(self, shape: Shape) -> float:
        """Of a layer, where kernels are cut like this."""
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        heads, device = self._heads, self._table.device
        with _patched("decode", shape):
            at_once = decode_split_kv.kv_splits_at_once(heads.kv, device)
            room = decode_split_kv.kv_splits_for(self._rows, at_once)
            splits = torch.empty((room, reference.KV_SPLIT_COLUMNS), dtype=torch.int32, device=device)
            rows = PagedRows(self._table, self._slots, self._starts, torch.ones_like(self._slots))
            tile = decode_split_kv.keys_of_tile(heads.width, 2)
            decode_split_kv.plan_kv_splits(rows, None, Mask(), splits, tile, at_once, decode_split_kv.MIN_SPLIT_TILES)
            partials = reference.new_decode_partials(room, heads.query, heads.kv, heads.width, device)
            torch.cuda.synchronize()
            calls = [partial(self._layer, PagedKV(*cache), splits, partials) for cache in self._caches]
            calls[0]()
            return graph_seconds(calls, self._guess)

    def _layer(self, kv: PagedKV, splits: Tensor, partials: reference.DecodePartials) -> None:
        norm_rope = QKNormRope(cos=self._cos, sin=self._sin)
        qk_norm_rope.qk_norm_rope_and_cache(self._qkv, norm_rope, CacheWrite(kv, self._places), self._q)
        decode_split_kv.decode_attention(self._q, kv, self._table, splits, partials, Scores(0.1), self._out)


def _best(figures: dict[Shape, list[float]], number: int) -> list[Shape]:
    """By the sum of what is lost to the best of each case."""
    low = [min(column) for column in _columns(figures)]
    return sorted(figures, key=lambda shape: sum(s / c for s, c in zip(figures[shape], low, strict=True)))[:number]


def _print_layers(title: str, names: Sequence[str], moved: Sequence[int], figures: dict[Shape, list[float]]) -> None:
    low = [min(column) for column in _columns(figures)]
    print(f"\n{title}\n{'':>32}" + "".join(f"{name:>15}" for name in names))
    for shape, row in figures.items():
        cells = [
            f"{seconds * 1e6:>9.1f} {size / seconds / BYTES_PER_S:>3.0%}{'*' if seconds == best else ' '}"
            for seconds, size, best in zip(row, moved, low, strict=True)
        ]
        print(f"{', '.join(map(str, shape)):>32}" + "".join(f"{cell:>15}" for cell in cells), flush=True)


def _tune_chunk(shapes: Sequence[Shape], heads: attention._Heads) -> None:
    cases = [attention._prefill(*sizes, heads) for sizes in CHUNK_CASES]
    figures = {}
    for shape in shapes:
        with _patched("prefill", shape):
            figures[str(shape)] = [_seconds(case, prefill.prefill_attention) for case in cases]
    _print("prefill_attention by rows, keys, warps, stages", cases, figures)


def _tune_long(shapes: Sequence[Shape], heads: attention._Heads) -> None:
    cases = [attention._dense(*sizes, heads) for sizes in CHUNK_CASES]
    figures = {}
    for shape in shapes:
        with _patched("prefill_dense", shape):
            figures[str(shape)] = [_seconds(case, prefill_dense.prefill_attention_dense) for case in cases]
    gathers = [_gather(rows, tokens + before, heads) for rows, tokens, before in CHUNK_CASES]
    gathering = [_seconds(case, gather_kv) for case in gathers]
    figures |= {f"{name} + gather": [sum(s) for s in zip(row, gathering, strict=True)] for name, row in figures.items()}
    _print("prefill_attention_dense by keys, stages", cases, figures)


def _gather(rows: int, length: int, heads: attention._Heads) -> KernelCase:
    """The contexts of several rows; see the case of one row."""

    def make(device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
        kv, table = attention._caches(rows, length, heads, device)
        offsets = torch.arange(0, length, attention._GATHER_CHUNK)
        of_pack = torch.arange(rows).repeat_interleave(len(offsets))
        offsets = offsets.repeat(rows)
        columns = (of_pack, offsets, (length - offsets).clamp(max=attention._GATHER_CHUNK))
        shape = (len(offsets) * attention._GATHER_CHUNK, heads.kv, heads.width)
        k, v = (torch.empty(shape, dtype=kv.keys.dtype, device=device) for _ in range(2))
        slots = torch.arange(rows, device=device)
        return (kv, table, slots, GatherChunks(*(column.to(device) for column in columns)), k, v), {}

    return KernelCase("gather_kv", f"{rows} x {length:,}", make, 8 * rows * length * heads.kv * heads.width)


def _seconds(case: KernelCase, function: Callable[..., Any]) -> float:
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    torch.manual_seed(0)
    sets = max(1, min(MAX_SETS, CACHES_BYTES // max(case.bytes, 1)))
    calls = [partial(function, *case.make(torch.device("cuda"))[0]) for _ in range(sets)]
    for call in calls:
        call()
    torch.cuda.synchronize()
    return graph_seconds(calls, max(case.bytes / 3e12, case.flops / 4e14, 5e-6))


def _print(title: str, cases: Sequence[KernelCase], figures: dict[str, list[float]]) -> None:
    best = [min(column) for column in _columns(figures)]
    print(f"\n{title}\n{'':>18}" + "".join(f"{case.name.rpartition(', ')[0]:>24}" for case in cases))
    for name, row in figures.items():
        cells = [
            f"{seconds * 1e6:>10.1f} {_rate(case, seconds):>11}{'*' if seconds == low else ' '} "
            for case, seconds, low in zip(cases, row, best, strict=True)
        ]
        print(f"{name:>18}" + "".join(cells), flush=True)


def _rate(case: KernelCase, seconds: float) -> str:
    if case.flops:
        return f"{case.flops / seconds / 1e12:.0f} TF"
    return f"{case.bytes / seconds / BYTES_PER_S:.0%}"


def _columns(figures: dict[Any, list[float]]) -> list[tuple[float, ...]]:
    return list(zip(*figures.values(), strict=True))


_SHAPES = {"decode": DECODE, "prefill": CHUNK, "prefill_dense": LONG}
_SECTIONS = {"decode": _tune_decode, "prefill": _tune_chunk, "prefill_dense": _tune_long}

if __name__ == "__main__":
    main()
