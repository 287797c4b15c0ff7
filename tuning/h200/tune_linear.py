"""Which kernel multiplies few rows fastest, for each shape of weight and number of rows.

    python tuning/h200/tune_linear.py [--out DIR] [--figures FILE] [--tolerance 0.015] [--seconds 140]

Times cuBLAS and every candidate in graphs, over weights that outgrow the GPU's cache together, and checks each result
against a product in fp64. Prints the best of each shape and number of rows, and writes this GPU's table of bf16 to
quire/compute/kernels/triton/linear/configs/, or to DIR; all figures to FILE.

A table that names few different kernels starts faster, since each is compiled at the first start on a machine. So it
names as few as keep every product within the tolerance of its best; cuBLAS, which needs no compiling, comes first.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
from sweep import compile_all, copies, few_enough, graph_seconds
from torch import Tensor

from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.triton.linear.gemm import GemmConfig
from quire.compute.kernels.triton.linear.gemv import GemvConfig
from quire.compute.kernels.triton.linear.linear import KERNELS, LinearConfig, linear_with_config
from quire.compute.kernels.triton.linear.tuned_configs import CONFIGS, TunedConfigs, configs_path, write_configs

C = TypeVar("C")

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
BYTES_PER_S = 4.25e12
FEWEST_PROGRAMS, MAX_PROGRAMS = 110, 900
"""That a product is cut into by cutting its columns."""
FINALISTS = 6


@dataclass(frozen=True)
class Weight:
    """A weight's shape; where `gate`, silu of its first half of outputs is multiplied with the second."""

    outputs: int
    columns: int
    gate: bool = False

    @property
    def made(self) -> int:
        return self.outputs // 2 if self.gate else self.outputs


LLAMA_8B = (Weight(6144, 4096), Weight(4096, 4096), Weight(28672, 4096, True), Weight(4096, 14336))
WEIGHTS = (
    *LLAMA_8B,
    Weight(28672, 4096),
    Weight(128256, 4096),
    Weight(4096, 1024),
    Weight(1024, 2048),
    Weight(6144, 1024, True),
    Weight(1024, 3072),
    Weight(151936, 1024),
    Weight(6144, 1024),
    Weight(5120, 2048),  # Qwen3-30B-A3B: queries, keys and values
    Weight(2048, 4096),
    Weight(128, 2048),
    Weight(151936, 2048),
    Weight(5120, 2880),  # gpt-oss-20b: queries, keys and values
    Weight(2880, 4096),
    Weight(32, 2880),
)

_ONE_ROW = (
    (1, 2048, 4), (1, 4096, 4), (2, 512, 2), (2, 1024, 4), (2, 2048, 4), (2, 2048, 8), (2, 4096, 8), (4, 256, 1),
    (4, 512, 2), (4, 1024, 4), (4, 2048, 8), (8, 256, 4), (8, 512, 4), (16, 256, 4), (16, 256, 8), (8, 1024, 8),
)  # fmt: skip
_TILES = {  # block_n, block_k, warps, stages, swapped
    8: ((64, 128, 4, 4, True), (32, 256, 4, 4, True)),
    16: (
        (64, 64, 4, 6, True), (64, 128, 4, 3, True), (64, 128, 4, 4, True), (64, 128, 4, 6, True),
        (64, 256, 4, 4, True), (128, 128, 8, 4, True), (32, 256, 4, 4, False), (64, 128, 4, 4, False),
    ),
    32: (
        (64, 64, 4, 6, True), (64, 128, 4, 3, True), (64, 128, 4, 4, True), (64, 128, 4, 5, True),
        (64, 128, 4, 6, True), (64, 256, 4, 3, True), (128, 128, 8, 4, True), (128, 128, 4, 4, True),
    ),
    64: (
        (64, 64, 4, 6, True), (64, 128, 4, 3, True), (64, 128, 4, 4, True), (64, 128, 4, 5, True),
        (128, 64, 4, 4, True), (128, 64, 4, 6, True),
    ),
    128: ((128, 64, 8, 5, False), (128, 128, 8, 3, True), (256, 64, 8, 4, False)),
}  # fmt: skip
_BLOCKS = {1: (8, 16), 2: (8, 16), 4: (8, 16), 8: (8, 16), 16: (16,), 32: (32,), 64: (64,), 128: (128,)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=CONFIGS, help="the directory that the table goes to")
    parser.add_argument("--figures", type=Path, help="the file that all figures go to")
    parser.add_argument("--tolerance", type=float, default=0.015, help="how much slower than its best a product may be")
    parser.add_argument("--seconds", type=float, default=140, help="shapes that are not begun by then are left out")
    parser.add_argument("--processes", type=int, default=16)
    options = parser.parse_args()
    began = time.perf_counter()
    broken = compile_all(compile_one, to_compile(), options.processes)
    for job, text in broken.items():
        print(f"left out: {job}: {text}")
    print(f"compiled {len(to_compile())} kernels in {time.perf_counter() - began:.0f} s", flush=True)
    figures: dict[tuple[Weight, int], dict[LinearConfig, float]] = {}
    for weight in WEIGHTS:
        if time.perf_counter() - began > options.seconds:
            print(f"no time left for {weight}")
            continue
        for rows, seconds in measure(weight, {config for config, _ in broken}):
            figures[weight, rows] = seconds
            print(line(weight, rows, seconds), flush=True)
    print_overlap(figures)
    chosen = choose(figures, options.tolerance)
    print_sums(figures, chosen)
    if options.figures is not None:
        options.figures.write_text(json.dumps(as_json(figures, chosen), indent=1))
    write_configs(configs_path(options.out, torch.cuda.get_device_name(), "bf16"), table_of(chosen, ROWS), KERNELS)
    print(f"{len({compiled(c, w) for (w, _), c in chosen.items()})} kernels, {time.perf_counter() - began:.0f} s")


# --- candidates -----------------------------------------------------------------------------------------------------


def candidates(weight: Weight, rows: int) -> Iterator[GemvConfig | GemmConfig]:
    """Every config worth a try."""
    if rows == 1:
        yield from (
            GemvConfig(*config)
            for config in _ONE_ROW
            if config[1] < 2 * weight.columns and (config[0] > 1 or not weight.gate)
        )
    for block_m in _BLOCKS[rows]:
        for block_n, block_k, warps, stages, swapped in _TILES[block_m]:
            tiles = -(-weight.outputs // block_n) * -(-rows // block_m)
            steps = -(-weight.columns // block_k)
            splits = [n for n in (1, 2, 3, 4, 6, 8, 12) if n == 1 or (2 * n <= steps and tiles * n <= MAX_PROGRAMS)]
            enough = [n for n in splits if tiles * n >= FEWEST_PROGRAMS] or splits[-1:]
            yield from (GemmConfig(block_m, block_n, block_k, n, warps, stages, swapped) for n in enough)


def least(config: GemvConfig | GemmConfig) -> GemvConfig | GemmConfig:
    """The same kernel, launched as small as can be."""
    return replace(config, splits=min(config.splits, 2)) if isinstance(config, GemmConfig) else config


def compiled(config: LinearConfig, weight: Weight) -> tuple[object, ...] | None:
    """What makes a kernel one of its own; None for cuBLAS."""
    if config is None:
        return None
    if isinstance(config, GemvConfig):
        return (*astuple(config), weight.columns, weight.gate)
    return (type(config), *astuple(least(config)), weight.columns % config.block_k == 0, weight.gate)


def to_compile() -> list[tuple[GemvConfig | GemmConfig, Weight]]:
    """One job a kernel, each with a small weight of a shape that it serves."""
    jobs = {}
    for weight in WEIGHTS:
        for rows in ROWS:
            for config in candidates(weight, rows):
                small = Weight(256, weight.columns, weight.gate)
                jobs.setdefault(compiled(config, weight), (least(config), small))
    return list(jobs.values())


def compile_one(job: tuple[GemvConfig | GemmConfig, Weight]) -> None:
    """By running it."""
    config, weight = job
    x, w, y = arguments(weight, 1, 1)
    linear_with_config(x, w[0], None, y, config, gate=weight.gate, overlap=True)


# --- measurement ----------------------------------------------------------------------------------------------------


def arguments(weight: Weight, rows: int, count: int) -> tuple[Tensor, list[Tensor], Tensor]:
    """x, some weights, and room for y: bf16 on the GPU."""
    generator = torch.Generator("cuda").manual_seed(0)
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    shape = (weight.outputs, weight.columns)
    x = torch.randn(rows, weight.columns, generator=generator, **options)
    w = [torch.randn(shape, generator=generator, **options).div_(weight.columns**0.5) for _ in range(count)]
    return x, w, torch.empty(rows, weight.made, **options)


def measure(weight: Weight, broken: set[GemvConfig | GemmConfig]) -> Iterator[tuple[int, dict[LinearConfig, float]]]:
    """For each number of rows the seconds of every config; only the best of 16 rows are tried with 2 to 8."""
    count = copies(2 * weight.outputs * weight.columns)
    x, weights, _ = arguments(weight, max(ROWS), count)
    exact = weights[0].double()
    finalists: set[LinearConfig] = set()
    for rows in (16, *(rows for rows in ROWS if rows != 16)):
        own = x[:rows].contiguous()
        y = torch.empty(rows, weight.made, dtype=own.dtype, device=own.device)
        expected = gated(own.double() @ exact.T) if weight.gate else own.double() @ exact.T
        seconds: dict[LinearConfig, float] = {None: time_one(own, weights, y, cublas(weight.gate), 1e-4)}
        accepted = 2 * error(y, expected) + 1e-3
        for config in candidates(weight, rows):
            known = not isinstance(config, GemvConfig) and config.block_m == 16 and rows < 16
            if (known and config not in finalists) or least(config) in broken:
                continue
            y.fill_(float("nan"))
            linear_with_config(own, weights[0], None, y, config, gate=weight.gate, overlap=True)
            if not error(y, expected) < accepted:
                print(f"WRONG: {weight} {rows} {config}: {error(y, expected):.1e}, accepted {accepted:.1e}")
                continue
            seconds[config] = time_one(own, weights, y, with_cut(config, weight.gate, True), seconds[None])
        if rows == 16:
            finalists = set(sorted(seconds, key=seconds.__getitem__)[:FINALISTS])
        yield rows, seconds


def time_one(x: Tensor, weights: list[Tensor], y: Tensor, op: Callable[..., None], guess: float) -> float:
    op(x, weights[0], y)
    return graph_seconds([lambda w=w: op(x, w, y) for w in weights], guess)


def with_cut(config: GemvConfig | GemmConfig, gate: bool, overlap: bool) -> Callable[[Tensor, Tensor, Tensor], None]:
    return lambda x, w, y: linear_with_config(x, w, None, y, config, gate=gate, overlap=overlap)


def cublas(gate: bool) -> Callable[[Tensor, Tensor, Tensor], None]:
    silu_and_mul = kernel("silu_and_mul", "cuda")
    if gate:
        return lambda x, w, y: silu_and_mul(F.linear(x, w), y)
    return lambda x, w, y: torch.mm(x, w.T, out=y)


def gated(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, dim=1)
    return F.silu(gate) * up


def error(y: Tensor, expected: Tensor) -> float:
    """Largest, beside the largest value."""
    return float((y.double() - expected).abs().max() / expected.abs().max())


def print_overlap(figures: dict[tuple[Weight, int], dict[LinearConfig, float]]) -> None:
    """What starting early gains, over Llama-8B's best configs at a few rows."""
    early, late = 0.0, 0.0
    for (weight, rows), seconds in figures.items():
        config = min((config for config in seconds if config is not None), key=seconds.__getitem__)
        if weight in LLAMA_8B and rows in (1, 16, 64):
            x, weights, y = arguments(weight, rows, copies(2 * weight.outputs * weight.columns))
            early += time_one(x, weights, y, with_cut(config, weight.gate, True), seconds[config])
            late += time_one(x, weights, y, with_cut(config, weight.gate, False), seconds[config])
    print(f"starting while the kernel before ends: {early * 1e6:.0f} µs, after it: {late * 1e6:.0f} µs")


# --- choice ---------------------------------------------------------------------------------------------------------


def choose(
    figures: dict[tuple[Weight, int], dict[LinearConfig, float]], tolerance: float
) -> dict[tuple[Weight, int], LinearConfig]:
    """The fastest config of each product among the few kernels that keep all within the tolerance."""
    good = {
        product: {
            compiled(config, product[0])
            for config, s in seconds.items()
            if s <= min(seconds.values()) * (1 + tolerance)
        }
        for product, seconds in figures.items()
    }
    kept = few_enough(good, free={None})
    return {
        (weight, rows): min((c for c in seconds if compiled(c, weight) in kept), key=seconds.__getitem__)
        for (weight, rows), seconds in figures.items()
    }


def line(weight: Weight, rows: int, seconds: dict[LinearConfig, float]) -> str:
    best = sorted((config for config in seconds if config is not None), key=seconds.__getitem__)[:3]
    moved = 2 * (weight.outputs * weight.columns + rows * (weight.columns + weight.made))
    return (
        f"{weight.outputs:6} × {weight.columns:5}{' gate' if weight.gate else '     '} rows {rows:3}: "
        f"cuBLAS {seconds[None] * 1e6:7.2f} µs {moved / seconds[None] / 1e12:.2f} TB/s, "
        f"own {seconds[best[0]] * 1e6:7.2f} µs {moved / seconds[best[0]] / 1e12:.2f} TB/s  "
        + "; ".join(f"{type(config).__name__}{astuple(config)} {seconds[config] * 1e6:.2f}" for config in best)
    )


def print_sums(
    figures: dict[tuple[Weight, int], dict[LinearConfig, float]], chosen: dict[tuple[Weight, int], LinearConfig]
) -> None:
    """32 layers of Llama-8B."""
    limit = 32 * sum(2 * w.outputs * w.columns for w in LLAMA_8B) / BYTES_PER_S
    for rows in ROWS:
        products = [(weight, rows) for weight in LLAMA_8B]
        if all(product in figures for product in products):
            sums = [
                32e3 * sum(pick(product) for product in products)
                for pick in (
                    lambda product: figures[product][None],
                    lambda product: min(figures[product].values()),
                    lambda product: figures[product][chosen[product]],
                )
            ]
            print(
                f"Llama-8B, 32 layers, rows {rows:3}: cuBLAS and gate {sums[0]:.3f} ms, best {sums[1]:.3f}, "
                f"chosen {sums[2]:.3f}, limit {limit * 1e3:.3f}"
            )


# --- results --------------------------------------------------------------------------------------------------------


def as_json(
    figures: dict[tuple[Weight, int], dict[LinearConfig, float]], chosen: dict[tuple[Weight, int], LinearConfig]
) -> object:
    return [
        {
            "outputs": weight.outputs,
            "columns": weight.columns,
            "gate": weight.gate,
            "rows": rows,
            "chosen": source(chosen[weight, rows]),
            "microseconds": {
                source(config): round(s * 1e6, 3) for config, s in sorted(seconds.items(), key=lambda item: item[1])
            },
        }
        for (weight, rows), seconds in figures.items()
    ]


def source(config: LinearConfig) -> str:
    return "None" if config is None else f"{type(config).__name__}({', '.join(map(str, astuple(config)))})"


def table_of(
    chosen: Mapping[tuple[Weight, int], C | None], rows: Sequence[int], before: TunedConfigs[C] | None = None
) -> TunedConfigs[C]:
    """The configs that were chosen for each weight and each of these numbers of rows, in the table that was before."""

    def by_shape(gate: bool) -> dict[tuple[int, int], tuple[C | None, ...]]:
        weights = dict.fromkeys(weight for weight, _ in chosen if weight.gate == gate)
        return {(w.outputs, w.columns): tuple(chosen[w, count] for count in rows) for w in weights}

    plain, gated = ({}, {}) if before is None else (before.plain, before.gated)
    return TunedConfigs(tuple(rows), {**plain, **by_shape(False)}, {**gated, **by_shape(True)})


if __name__ == "__main__":
    main()
