"""Which kernel multiplies 8-bit codes with scales fastest, for each shape of Llama-3.1-8B and number of rows.

    python tuning/h200/tune_scaled.py [--dtype fp8|int8] [--shapes 5120x2048 …] [--seconds 100] [--out DIR]

Times every candidate in graphs, over weights that outgrow the GPU's cache together, and checks each result against a
product in fp64 of what the codes stand for. The kernel that quantizes x is timed too, by itself, and torch's product
for comparison. Prints the best of each shape and number of rows, and writes this GPU's table of fp8, or that of single
rows of int8, to quire/compute/kernels/triton/linear/configs/, or to DIR. Where shapes are given, they are added to the
table.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
from pathlib import Path

import torch
from sweep import compile_all, copies, graph_seconds
from torch import Tensor
from tune_linear import LLAMA_8B, Weight, error, gated, table_of

from quire.compute.kernels.reference.linear import ScaledWeight
from quire.compute.kernels.triton.activation import silu_and_mul
from quire.compute.kernels.triton.linear.gemm import GemmConfig, gemm
from quire.compute.kernels.triton.linear.gemv import GemvConfig, gemv, int8_gemv
from quire.compute.kernels.triton.linear.linear import KERNELS, LinearConfig
from quire.compute.kernels.triton.linear.tuned_configs import CONFIGS, configs_path, read_configs, write_configs
from quire.compute.kernels.triton.norm import quantize_rows

ROWS = (1, 16, 32, 64, 128, 256)
WEIGHTS = (*LLAMA_8B, Weight(28672, 4096))
DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
_ONE_ROW = (
    (1, 4096, 4), (2, 1024, 2), (2, 2048, 4), (2, 4096, 8), (4, 1024, 4), (4, 2048, 8), (8, 512, 4), (4, 512, 2),
)  # fmt: skip
_TILES = {  # block_n, block_k, warps, stages, swapped
    16: (
        (64, 128, 4, 6, True),
        (64, 128, 4, 8, True),
        (64, 256, 4, 4, True),
        (64, 256, 4, 5, True),
        (128, 128, 8, 5, True),
    ),
    32: (
        (64, 128, 4, 6, True),
        (64, 128, 4, 8, True),
        (64, 256, 4, 4, True),
        (128, 128, 8, 5, True),
        (128, 128, 4, 5, True),
    ),
    64: (
        (32, 256, 4, 5, False),
        (32, 128, 4, 6, False),
        (64, 128, 4, 6, True),
        (64, 256, 4, 4, True),
        (128, 128, 4, 5, True),
        (128, 128, 8, 4, True),
    ),
    128: ((64, 128, 4, 5, True), (128, 128, 4, 5, True), (128, 128, 8, 5, True), (128, 128, 8, 5, False)),
}
_BLOCKS = {1: (16,), 16: (16,), 32: (32, 64), 64: (64,), 128: (64, 128), 256: (128,)}
MAX_PROGRAMS = 900


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=DTYPES, default="fp8")
    parser.add_argument("--shapes", nargs="+", default=[], help="outputs x columns of weights, in place of Llama's")
    parser.add_argument("--seconds", type=float, default=100, help="shapes that are not begun by then are left out")
    parser.add_argument("--out", type=Path, default=CONFIGS, help="the directory that the table goes to")
    options = parser.parse_args()
    began, dtype = time.perf_counter(), DTYPES[options.dtype]
    shapes = [Weight(*map(int, shape.split("x"))) for shape in options.shapes] or WEIGHTS
    jobs = list({(least(c), w.columns, w.gate, dtype): 0 for w in shapes for r in ROWS for c in candidates(w, r)})
    for job, text in compile_all(compile_one, jobs, 16).items():
        print(f"left out: {job}: {text}")
    print(f"compiled {len(jobs)} kernels in {time.perf_counter() - began:.0f} s", flush=True)
    sums: dict[int, float] = {}
    chosen: dict[tuple[Weight, int], LinearConfig] = {}
    for weight in shapes:
        if time.perf_counter() - began > options.seconds:
            print(f"no time left for {weight}")
            continue
        for rows, config, best in measure(weight, dtype):
            chosen[weight, rows] = config
            if weight in LLAMA_8B:
                sums[rows] = sums.get(rows, 0.0) + best
    for rows, seconds in sums.items():
        print(f"32 layers, {rows} rows: {32e3 * seconds:.3f} ms")
    form, in_table = ("fp8_w8a8", ROWS) if options.dtype == "fp8" else ("int8_w8a8", ROWS[:1])
    table = table_of(chosen, in_table, read_configs(form, KERNELS) if options.shapes else None)
    write_configs(configs_path(options.out, torch.cuda.get_device_name(), form), table, KERNELS)


def candidates(weight: Weight, rows: int) -> Iterator[GemvConfig | GemmConfig]:
    """Every config worth a try."""
    if rows == 1:
        yield from (
            GemvConfig(*one) for one in _ONE_ROW if one[1] <= weight.columns and (one[0] > 1 or not weight.gate)
        )
    for block_m in _BLOCKS[rows]:
        for block_n, block_k, warps, stages, swapped in _TILES[block_m]:
            tiles, steps = -(-weight.outputs // block_n) * -(-rows // block_m), -(-weight.columns // block_k)
            splits = [n for n in (1, 2, 3, 4, 6, 8) if n == 1 or (2 * n <= steps and tiles * n <= MAX_PROGRAMS)]
            enough = [n for n in splits if tiles * n >= 60] or splits[-1:]
            yield from (GemmConfig(block_m, block_n, block_k, n, warps, stages, swapped) for n in enough)


def least(config: GemvConfig | GemmConfig) -> GemvConfig | GemmConfig:
    """The same kernel, launched as small as can be."""
    return replace(config, splits=min(config.splits, 2)) if isinstance(config, GemmConfig) else config


def compile_one(job: tuple[GemvConfig | GemmConfig, int, bool, torch.dtype]) -> None:
    """By running it."""
    config, columns, gate, dtype = job
    weight = make(256, columns, dtype)
    x, y = torch.randn(1, columns, dtype=torch.bfloat16, device="cuda"), torch.empty(1, 128 if gate else 256).cuda()
    run(config, x, weight, y.bfloat16(), gate)


def make(outputs: int, columns: int, dtype: torch.dtype) -> ScaledWeight:
    dense = torch.randn(outputs, columns, dtype=torch.bfloat16, device="cuda").div_(columns**0.5)
    return ScaledWeight(*quantize_rows(dense, dtype, columns), (1, columns))


def run(config: GemvConfig | GemmConfig, x: Tensor, weight: ScaledWeight, y: Tensor, gate: bool) -> None:
    if isinstance(config, GemvConfig) and weight.codes.dtype != torch.int8:
        gemv(x, weight, None, y, config, gate, True)
        return
    codes = quantize_rows(x, weight.codes.dtype, x.shape[1])
    if isinstance(config, GemvConfig):
        int8_gemv(codes, weight, None, y, config, gate, True)
    else:
        gemm(codes, weight, None, y, config, gate, True)


def measure(weight: Weight, dtype: torch.dtype) -> Iterator[tuple[int, LinearConfig, float]]:
    """For each number of rows the best config, None where torch's product is faster, and the config's seconds.

    Prints the three best. Times include quantizing x.
    """
    weights = [make(weight.outputs, weight.columns, dtype) for _ in range(copies(weight.outputs * weight.columns))]
    exact = weights[0].dense().double()
    for rows in ROWS:
        x = torch.randn(rows, weight.columns, dtype=torch.bfloat16, device="cuda")
        y = torch.empty(rows, weight.made, dtype=x.dtype, device="cuda")
        expected = gated(x.double() @ exact.T) if weight.gate else x.double() @ exact.T
        quantizing = graph_seconds([lambda x=x: quantize_rows(x, dtype, weight.columns)] * 10, 3e-6)
        times: dict[GemvConfig | GemmConfig, float] = {}
        for config in dict.fromkeys(candidates(weight, rows)):
            try:
                run(config, x, weights[0], y.fill_(float("nan")), weight.gate)
            except Exception as failure:
                print(f"FAILED {config}: {str(failure).splitlines()[0]}")
                continue
            if not error(y, expected) < 0.06:
                print(f"WRONG {weight} {rows} {config}: {error(y, expected):.1e}")
                continue
            calls = [lambda w=w, c=config, x=x, y=y: run(c, x, w, y, weight.gate) for w in weights]
            times[config] = graph_seconds(calls, 2e-5)
        best = sorted(times, key=times.__getitem__)[:3]
        library = float("inf")
        if dtype == torch.float8_e4m3fn and rows > 1:
            library = graph_seconds([torch_product(x, w, y, weight.gate) for w in weights], 2e-5)
        print(
            f"{weight.outputs} × {weight.columns}{' gate' if weight.gate else ''} rows {rows}: quantize "
            f"{quantizing * 1e6:.2f} µs, library {library * 1e6:.2f}; "
            + "; ".join(f"{type(c).__name__}{astuple(c)} {times[c] * 1e6:.2f}" for c in best),
            flush=True,
        )
        yield rows, None if library < times[best[0]] else best[0], times[best[0]]


def torch_product(x: Tensor, w: ScaledWeight, y: Tensor, gate: bool) -> Callable[[], object]:
    def call() -> object:
        codes, scales = quantize_rows(x, w.codes.dtype, x.shape[1])
        made = torch._scaled_mm(codes, w.codes.T, scales, w.scales.T, out_dtype=x.dtype, use_fast_accum=True)
        return silu_and_mul(made, y) if gate else made

    return call


if __name__ == "__main__":
    main()
