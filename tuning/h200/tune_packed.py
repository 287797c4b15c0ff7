"""Which kernel multiplies a packed 4-bit weight fastest, for each shape of Llama-3.1-8B and number of rows.

    python tuning/h200/tune_packed.py [--seconds 100] [--zeros] [--out DIR]

As tune_scaled.py; times of the gemm include bringing the columns of x into its order. Prints the best of each shape and
number of rows, and writes this GPU's table of int4 to quire/compute/kernels/triton/linear/configs/, or to DIR.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import astuple, replace
from itertools import product
from pathlib import Path

import torch
from sweep import compile_all, copies, graph_seconds
from torch import Tensor
from tune_linear import LLAMA_8B, Weight, error, gated, table_of

from quire.compute.kernels.triton.linear.grouped import KERNELS, MAX_ROWS, PackedConfig
from quire.compute.kernels.triton.linear.packed_expand import expand_packed
from quire.compute.kernels.triton.linear.packed_gemm import PackedGemmConfig, packed_gemm
from quire.compute.kernels.triton.linear.packed_gemm_many import PackedGemmManyConfig, packed_gemm_many
from quire.compute.kernels.triton.linear.packed_gemv import PackedGemvConfig, packed_gemv
from quire.compute.kernels.triton.linear.packed_layout import PackedWeight, pack_int4, permute_columns
from quire.compute.kernels.triton.linear.tuned_configs import CONFIGS, configs_path, write_configs

ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 2048)
_BLOCKS = {32: (32,), 64: (64,), 128: (64, 128), 256: (128, 256), 512: (128, 256), 2048: (256,)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=100, help="shapes that are not begun by then are left out")
    parser.add_argument("--zeros", action="store_true", help="each group has a zero of its own")
    parser.add_argument("--out", type=Path, default=CONFIGS, help="the directory that the table goes to")
    options = parser.parse_args()
    began = time.perf_counter()
    jobs = list(
        {(least(c), w.columns, w.gate, options.zeros): 0 for w in LLAMA_8B for r in ROWS for c in candidates(w, r)}
    )
    broken = compile_all(compile_one, jobs, 16)
    for job, text in broken.items():
        print(f"left out: {job}: {text}")
    print(f"compiled {len(jobs)} kernels in {time.perf_counter() - began:.0f} s", flush=True)
    sums: dict[int, float] = {}
    chosen: dict[tuple[Weight, int], PackedConfig | None] = {}
    for weight in LLAMA_8B:
        if time.perf_counter() - began > options.seconds:
            print(f"no time left for {weight}")
            continue
        for rows, config, best in measure(weight, options.zeros, {job[0] for job in broken}):
            chosen[replace(weight, gate=False), MAX_ROWS if rows == ROWS[-1] else rows] = config  # a table for both
            sums[rows] = sums.get(rows, 0.0) + best
    for rows, seconds in sums.items():
        print(f"32 layers, {rows} rows: {32e3 * seconds:.3f} ms")
    path = configs_path(options.out, torch.cuda.get_device_name(), "int4_w4a16")
    write_configs(path, table_of(chosen, (*ROWS[:-1], MAX_ROWS)), KERNELS)


def candidates(weight: Weight, rows: int) -> Iterator[PackedConfig]:
    """Every config worth a try."""
    if rows <= 16:
        yield from _few_rows(weight, 8 if rows <= 8 else 16)
    steps = weight.columns // 128
    for block_m in _BLOCKS.get(rows, ()):
        for groups in (1, 2):
            tiles = weight.outputs // (64 * groups) * -(-rows // block_m)
            for splits in (1, 2, 4, 6, 8):
                if splits > 1 and (3 * splits > steps or tiles * splits > 700):
                    continue
                if block_m <= 64:
                    yield PackedGemmConfig(block_m, groups, 4, splits)
                for ahead, ring in ((2, 2), (2, 3), (1, 3)):
                    if block_m * 256 * ahead * ring <= 200_000 and (block_m < 256 or groups > 1):
                        yield PackedGemmManyConfig(block_m, groups, ahead, splits, ring)


def _few_rows(weight: Weight, block_m: int) -> Iterator[PackedGemvConfig]:
    for groups, warps, tiles, depth, x_ahead in product((1, 2, 4), (2, 4, 8), (1, 2), (1, 2), (True, False)):
        steps = -(-weight.columns // (128 * warps * groups))
        if groups * tiles * depth <= 4 and depth <= steps and (x_ahead or (depth == 1 and groups * tiles > 1)):
            yield PackedGemvConfig(block_m, groups, warps, tiles, depth, x_ahead)


def least(config: PackedConfig) -> PackedConfig:
    """The same kernel, launched as small as can be."""
    return config if isinstance(config, PackedGemvConfig) else replace(config, splits=min(config.splits, 2))


def compile_one(job: tuple[PackedConfig, int, bool, bool]) -> None:
    """By running it."""
    config, columns, gate, zeros = job
    weight = make(256, columns, gate, zeros)
    x = torch.randn(1, columns, dtype=torch.bfloat16, device="cuda")
    run(config, x, weight, x.new_empty(1, 128 if gate else 256))


def make(outputs: int, columns: int, gate: bool, zeros: bool) -> PackedWeight:
    codes = torch.randint(0, 16, (outputs, columns), dtype=torch.uint8, device="cuda")
    scales = (torch.rand(outputs, columns // 128, device="cuda") + 0.5) / columns**0.5 / 8
    of_groups = torch.randint(6, 10, scales.shape, dtype=torch.uint8, device="cuda") if zeros else None
    return pack_int4(codes, scales, of_groups, gate, None)


def run(config: PackedConfig, x: Tensor, weight: PackedWeight, y: Tensor) -> None:
    if isinstance(config, PackedGemvConfig):
        packed_gemv(x, weight, y, config, True)
    elif isinstance(config, PackedGemmConfig):
        packed_gemm(permute_columns(x), weight, y, config, True)
    else:
        packed_gemm_many(permute_columns(x), weight, y, config, True)


def measure(weight: Weight, zeros: bool, broken: set[PackedConfig]) -> Iterator[tuple[int, PackedConfig, float]]:
    """For each number of rows the best config and its seconds; prints the three best."""
    count = copies(weight.outputs * weight.columns // 2)
    weights = [make(weight.outputs, weight.columns, weight.gate, zeros) for _ in range(count)]
    exact = expand_packed(weights[0], torch.float32).double()
    for rows in ROWS:
        x = torch.randn(rows, weight.columns, dtype=torch.bfloat16, device="cuda")
        y = torch.empty(rows, weight.made, dtype=x.dtype, device="cuda")
        expected = gated(x.double() @ exact.T) if weight.gate else x.double() @ exact.T
        times: dict[PackedConfig, float] = {}
        for config in candidates(weight, rows):
            if least(config) in broken:
                continue
            run(config, x, weights[0], y.fill_(float("nan")))
            if not error(y, expected) < 0.01:
                print(f"WRONG {weight} {rows} {config}: {error(y, expected):.1e}")
                continue
            calls = [lambda w=w, c=config, x=x, y=y: run(c, x, w, y) for w in weights]
            times[config] = graph_seconds(calls, 2e-5)
        best = sorted(times, key=times.__getitem__)[:3]
        print(
            f"{weight.outputs} × {weight.columns}{' gate' if weight.gate else ''} rows {rows}: "
            + "; ".join(f"{type(c).__name__}{astuple(c)} {times[c] * 1e6:.2f}" for c in best),
            flush=True,
        )
        yield rows, best[0], times[best[0]]


if __name__ == "__main__":
    main()
