"""How attention over the paged cache is best cut: keys of a tile, warps, tiles on their way, pieces of a context.

    python benchmarks/h200/tune_attention.py [decode] [chunk] [long] [--heads 32/8x128]

For each op every candidate is compared with the reference on a small step, then timed in graphs on the cases of `quire
bench kernels`. Prints microseconds, and the share of the card's memory speed or its TFLOP/s. The best goes to `_shape`
in decode.py and long.py in quire/kernels/triton/attention/, and to `tile_shape` in chunk.py there.
"""

from __future__ import annotations

import argparse
import faulthandler
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from tuning import CACHES_BYTES, compile_all, graph_seconds

from quire.bench.kernel_cases import KernelCase, attention
from quire.kernels.reference import paged_rows as reference
from quire.kernels.triton.attention import chunk, decode, long

BYTES_PER_S = 4.25e12
MOST_SETS = 24
HANG_S = 120
"""Barriers that wait for each other wait for ever; so long is compiling everything given, and timing one case."""

Shape = tuple[int, ...]
DECODE: tuple[Shape, ...] = (  # keys, warps, stages; stages count the table's loads too
    (32, 1, 3), (32, 1, 5), (32, 2, 3), (32, 2, 5), (32, 4, 3), (32, 4, 5), (64, 1, 3), (64, 2, 3), (64, 2, 5),
    (64, 4, 3), (64, 4, 5), (128, 2, 3), (128, 4, 3), (128, 4, 5),
)  # fmt: skip
PROGRAMS = (1, 2, 4, 6)
FEWEST = (1, 2, 4)
CHUNK: tuple[Shape, ...] = (  # rows, keys, warps, stages
    (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 5), (128, 32, 8, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 5),
    (128, 128, 8, 2), (128, 128, 8, 3),
)  # fmt: skip
LONG: tuple[Shape, ...] = ((64, 2), (64, 3), (64, 4), (128, 2), (128, 3))  # keys, stages
DECODE_CASES = ((1, 200), (1, 1_000), (1, 130_000), (32, 200), (32, 1_024), (128, 200), (256, 200), (256, 1_024))
CHUNK_CASES = (
    (1, 128, 0), (1, 512, 0), (16, 512, 0), (1, 2_048, 0), (1, 8_192, 0), (1, 32_000, 0), (1, 50, 2_000),
    (1, 2_048, 30_000),
)  # fmt: skip


def main() -> None:
    """Compile, compare, time and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ops", nargs="*", default=["decode", "chunk", "long"])
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
    case = {"decode": attention._decode, "chunk": attention._chunk, "long": attention._long}[op]
    sizes = (3, 700) if op == "decode" else (2, 300, 333)
    with torch.inference_mode(), _patched(op, shape):
        args, _ = case(*sizes, heads).make(torch.device("cuda"))
        outs = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.shape == args[0].shape][1:]
        call = {
            "decode": decode.attend_pieces,
            "chunk": chunk.attend_tiles,
            "long": long.attend_long,
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
    module: ModuleType
    module, name, value = {
        "decode": lambda: (decode, "_shape", decode._Shape(*shape)),
        "chunk": lambda: (chunk, "tile_shape", chunk.TileShape(*shape)),
        "long": lambda: (long, "_shape", shape),
    }[op]()
    before = getattr(module, name)
    setattr(module, name, lambda *_: value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _tune_decode(shapes: Sequence[Shape], heads: attention._Heads) -> None:
    cases = [attention._decode(rows, length, heads) for rows, length in DECODE_CASES]
    figures: dict[str, list[float]] = {}
    for shape in shapes:
        with _patched("decode", shape):
            figures[str(shape)] = [_seconds(case, decode.attend_pieces) for case in cases]
    _print("attend_pieces by keys, warps, stages", cases, figures)
    best = min(figures, key=lambda name: sum(s / min(c) for s, c in zip(figures[name], _columns(figures), strict=True)))
    for name, values in (("_PROGRAMS", PROGRAMS), ("FEWEST", FEWEST)):
        figures, before = {}, getattr(decode, name)
        for value in values:
            setattr(decode, name, value)
            with _patched("decode", next(shape for shape in shapes if str(shape) == best)):
                fresh = [attention._decode(rows, length, heads) for rows, length in DECODE_CASES]
                figures[str(value)] = [_seconds(case, decode.attend_pieces) for case in fresh]
        setattr(decode, name, before)
        _print(f"attend_pieces {best} by {name}", cases, figures)


def _tune_chunk(shapes: Sequence[Shape], heads: attention._Heads) -> None:
    cases = [attention._chunk(*sizes, heads) for sizes in CHUNK_CASES]
    figures = {}
    for shape in shapes:
        with _patched("chunk", shape):
            figures[str(shape)] = [_seconds(case, chunk.attend_tiles) for case in cases]
    _print("attend_tiles by rows, keys, warps, stages", cases, figures)


def _tune_long(shapes: Sequence[Shape], heads: attention._Heads) -> None:
    from quire.kernels.triton.attention.contexts import gather_contexts

    cases = [attention._long(*sizes, heads) for sizes in CHUNK_CASES]
    figures = {}
    for shape in shapes:
        with _patched("long", shape):
            figures[str(shape)] = [_seconds(case, long.attend_long) for case in cases]
    _print("attend_long by keys, stages", cases, figures)
    gathers = [attention._gather(length, heads) for length in (512, 2_048, 8_192, 32_000)]
    _print("gather_contexts", gathers, {"": [_seconds(case, gather_contexts) for case in gathers]})


def _seconds(case: KernelCase, function: Callable[..., Any]) -> float:
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    torch.manual_seed(0)
    sets = max(1, min(MOST_SETS, CACHES_BYTES // max(case.bytes, 1)))
    calls = [partial(function, *case.make(torch.device("cuda"))[0]) for _ in range(sets)]
    for call in calls:
        call()
    torch.cuda.synchronize()
    return graph_seconds(calls, max(case.bytes / 3e12, case.flops / 4e14, 5e-6))


def _print(title: str, cases: Sequence[KernelCase], figures: dict[str, list[float]]) -> None:
    best = [min(column) for column in _columns(figures)]
    print(f"\n{title}\n{'':>18}" + "".join(f"{case.name.split(',  ')[0][:22]:>24}" for case in cases))
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


def _columns(figures: dict[str, list[float]]) -> list[tuple[float, ...]]:
    return list(zip(*figures.values(), strict=True))


_SHAPES = {"decode": DECODE, "chunk": CHUNK, "long": LONG}
_SECTIONS = {"decode": _tune_decode, "chunk": _tune_chunk, "long": _tune_long}

if __name__ == "__main__":
    main()
