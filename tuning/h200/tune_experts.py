"""The best configs of the products of a mixture of experts, by number of tokens.

    python tuning/h200/tune_experts.py --out DIR [--codes fp8] [--tokens 1 32 …] [--tolerance 0.02] [--seconds 110]

For each mixture and number of tokens: with one config of the second product every config of the first is timed, then
the other way round, and the times of all pairs follow by adding. In graphs, over different, uniform choices of experts.
Every config's result is checked against one product a pair in fp32, of quantized activations where configs quantize
them. Prints the best, and what routing and grouping take, and writes

    DIR/experts_table.json   the figures
    DIR/experts_configs.json   the table; copy it to a "16-bit" or with --codes to the "8-bit" table in
                               quire/compute/kernels/triton/experts/configs/

The table names few different kernels, as that of tune_linear.py does.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sweep import compile_all, few_enough, graph_seconds
from torch import Tensor

from quire.compute.kernels.reference.linear import ScaledWeight
from quire.compute.kernels.reference.quantized_rows import quantize_rows as reference_quantize_rows
from quire.compute.kernels.triton.experts.expert_gemms import ExpertConfigs
from quire.compute.kernels.triton.experts.experts import experts_with_configs
from quire.compute.kernels.triton.experts.routing import group_by_expert, route
from quire.compute.kernels.triton.linear.gemm import GemmConfig
from quire.compute.kernels.triton.linear.gemv import GemvConfig
from quire.compute.kernels.triton.norm import quantize_rows

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
BYTES_PER_S = 4.25e12
FLOPS_PER_S = 690e12
INFINITE = float("inf")
SHOWN = 5
CHOICES = 6
"""Different sets of tokens that calls go round."""


@dataclass(frozen=True)
class Mixture:
    """Qwen3-30B-A3B's and Mixtral-8x7B's."""

    experts: int
    chosen: int
    hidden: int
    width: int


Experts = tuple[Tensor, Tensor] | tuple[ScaledWeight, ScaledWeight]
MIXTURES = (Mixture(128, 8, 2048, 768), Mixture(8, 2, 4096, 14336))

_ROWS_FIRST = (
    (2, 2048, 4), (4, 512, 2), (4, 1024, 4), (4, 2048, 8), (8, 256, 2), (8, 512, 4), (8, 1024, 8), (16, 256, 4),
    (16, 512, 8),
)  # fmt: skip
_ROWS_SECOND = (
    (2, 256, 1), (2, 256, 2), (2, 256, 4), (4, 256, 2), (4, 256, 4), (4, 256, 8), (8, 256, 4), (8, 256, 8),
    (1, 256, 2), (2, 128, 2),
)  # fmt: skip
_TILES = {  # block_n, block_k, warps, stages, swapped
    16: (
        (64, 64, 4, 4, True), (64, 64, 4, 6, True), (64, 128, 4, 3, True), (64, 128, 4, 4, True), (64, 256, 4, 3, True),
        (128, 64, 4, 4, True), (128, 64, 4, 6, True), (128, 128, 4, 3, True), (128, 128, 8, 3, True),
        (32, 128, 4, 4, False), (32, 256, 4, 3, False), (64, 128, 4, 4, False),
    ),
    32: (
        (64, 64, 4, 4, True), (64, 64, 4, 6, True), (64, 128, 4, 3, True), (64, 128, 4, 4, True), (128, 64, 4, 4, True),
        (128, 64, 4, 5, True), (128, 128, 8, 3, True), (64, 128, 4, 4, False),
    ),
    64: (
        (64, 64, 4, 4, True), (64, 128, 4, 3, True), (128, 64, 4, 3, True), (128, 64, 4, 4, True),
        (128, 64, 8, 4, True), (128, 64, 4, 4, False), (128, 128, 8, 3, True), (256, 64, 8, 3, True),
        (256, 64, 8, 3, False),
    ),
    128: (
        (128, 64, 4, 3, False), (128, 64, 8, 3, False), (128, 64, 8, 4, False), (128, 64, 8, 3, True),
        (128, 128, 8, 3, False), (256, 64, 8, 3, False), (256, 64, 8, 4, False), (256, 64, 8, 3, True),
    ),
}  # fmt: skip
_CODED_ROWS_FIRST = (
    (8, 1024, 4), (8, 512, 2), (4, 2048, 4), (8, 512, 4), (4, 1024, 2), (16, 512, 4), (16, 1024, 4), (8, 2048, 4),
)  # fmt: skip
_CODED_ROWS_SECOND = (
    (4, 256, 2), (8, 256, 4), (4, 256, 1), (8, 256, 2), (2, 256, 1), (4, 128, 2), (4, 128, 1), (16, 256, 8),
)  # fmt: skip
_CODED_TILES = {  # block_m → (block_n, block_k, warps, stages, swapped) of first products, and of second ones
    16: (
        ((64, 256, 4, 3, True), (64, 256, 4, 4, True), (64, 256, 4, 5, True), (128, 256, 8, 3, True),
         (128, 256, 4, 3, True), (256, 128, 8, 3, True)),
        ((128, 128, 4, 3, True), (128, 128, 4, 4, True), (64, 256, 4, 3, True), (64, 256, 4, 4, True),
         (128, 256, 8, 3, True), (64, 128, 4, 4, True)),
    ),
    32: (
        ((64, 256, 4, 4, True), (128, 256, 8, 3, True), (256, 128, 8, 3, True)),
        ((64, 256, 4, 3, True), (128, 256, 8, 3, True), (128, 128, 4, 4, True)),
    ),
    64: (
        ((256, 128, 8, 3, False), (256, 128, 8, 4, False), (128, 128, 4, 4, False), (128, 256, 8, 3, False)),
        ((128, 128, 4, 3, False), (128, 128, 4, 4, False), (256, 128, 8, 3, False), (256, 128, 8, 4, False),
         (128, 256, 4, 3, False), (256, 256, 8, 2, False)),
    ),
    128: (
        ((128, 128, 8, 4, False), (256, 128, 8, 3, False), (256, 128, 8, 4, False)),
        ((128, 128, 8, 3, False), (128, 128, 8, 4, False), (256, 128, 8, 3, False), (128, 256, 8, 3, False),
         (256, 256, 8, 2, False)),
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--codes", choices=["fp8", "int8"], help="weights of 8 bits with a scale for each output")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--mixtures", type=int, default=len(MIXTURES), help="how many of them")
    parser.add_argument("--tolerance", type=float, default=0.02, help="how much slower than its best a size may be")
    parser.add_argument("--seconds", type=float, default=110, help="sizes that are not begun by then are left out")
    parser.add_argument("--processes", type=int, default=16)
    options = parser.parse_args()
    began = time.perf_counter()
    codes = {None: None, "fp8": torch.float8_e4m3fn, "int8": torch.int8}[options.codes]
    sizes = [(mixture, tokens) for mixture in MIXTURES[: options.mixtures] for tokens in options.tokens]
    jobs = to_compile(sizes, codes)
    broken = compile_all(compile_one, jobs, options.processes)
    for job, text in broken.items():
        print(f"left out: {job}: {text}")
    print(f"compiled {len(jobs)} pairs of kernels in {time.perf_counter() - began:.0f} s", flush=True)
    figures: dict[tuple[Mixture, int], dict[ExpertConfigs, float]] = {}
    for mixture in MIXTURES[: options.mixtures]:
        weights = [random_weights(mixture, codes) for _ in range(2)]
        for tokens in options.tokens:
            if time.perf_counter() - began > options.seconds:
                print(f"no time left for {mixture}, {tokens} tokens")
                break
            sets = [arguments(mixture, tokens, weights[number % 2], number) for number in range(CHOICES)]
            figures[mixture, tokens] = measure(mixture, tokens, sets, {configs for _, _, configs in broken}, codes)
            print(line(mixture, tokens, sets, figures[mixture, tokens]), flush=True)
        del weights
    chosen = choose(figures, options.tolerance)
    for (mixture, tokens), configs in chosen.items():
        seconds = figures[mixture, tokens]
        print(
            f"{mixture} {tokens}: {seconds[configs] * 1e6:.1f} µs, "
            f"{seconds[configs] / min(seconds.values()) - 1:.1%} more"
        )
    print_overlap(figures, codes)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "experts_table.json").write_text(json.dumps(as_json(figures, chosen), indent=1))
    (options.out / "experts_configs.json").write_text(as_table(chosen))
    print(f"{len(set(chosen.values()))} pairs of kernels, {time.perf_counter() - began:.0f} s")


# --- candidates -----------------------------------------------------------------------------------------------------


def candidates(
    mixture: Mixture, tokens: int, codes: torch.dtype | None
) -> Iterator[tuple[list[GemvConfig] | list[GemmConfig], list[GemvConfig] | list[GemmConfig]]]:
    """ExpertConfigs of the first product and of the second that go together."""
    if tokens <= 16 and codes != torch.int8:
        firsts, seconds = (_ROWS_FIRST, _ROWS_SECOND) if codes is None else (_CODED_ROWS_FIRST, _CODED_ROWS_SECOND)
        yield [GemvConfig(*config) for config in firsts], [GemvConfig(*config) for config in seconds]
    each = tokens * mixture.chosen / mixture.experts
    for block_m, least, most in ((16, 0, 24), (32, 3, 64), (64, 12, 300), (128, 24, float("inf"))):
        if (tokens > 1 or codes == torch.int8) and least <= each <= most:
            if codes is None:
                configs = [GemmConfig(block_m, *config[:2], 1, *config[2:]) for config in _TILES[block_m]]
                yield configs, configs
                continue
            firsts, seconds = (
                [GemmConfig(block_m, *config[:2], 1, *config[2:]) for config in product_]
                for product_ in _CODED_TILES[block_m]
            )
            for block_n in sorted({first.block_n for first in firsts}):
                alike = [first for first in firsts if first.block_n == block_n]
                for at_once in (True, False):  # whether the first product quantizes what it makes
                    fitting = [second for second in seconds if (block_n // 2 % second.block_k == 0) == at_once]
                    if fitting:
                        yield alike, fitting


Job = tuple[Mixture, torch.dtype | None, ExpertConfigs]


def to_compile(sizes: list[tuple[Mixture, int]], codes: torch.dtype | None) -> list[Job]:
    """Every config of the first product once, with one of the second, and the other way round."""
    jobs: dict[Job, None] = {}
    for mixture, tokens in sizes:
        for firsts, seconds in candidates(mixture, tokens, codes):
            for number in range(max(len(firsts), len(seconds))):
                configs = firsts[number % len(firsts)], seconds[number % len(seconds)]
                jobs[mixture, codes, configs] = None  # type: ignore[index]
    return list(jobs)


def compile_one(job: Job) -> None:
    """By running it on a mixture of no more experts than a token has."""
    mixture, codes, configs = job
    small = Mixture(mixture.chosen, mixture.chosen, mixture.hidden, mixture.width)
    *inputs, out = arguments(small, 2, random_weights(small, codes), 0)
    experts_with_configs(*inputs, out, configs, overlap=True)


# --- measurement ----------------------------------------------------------------------------------------------------


def random_weights(mixture: Mixture, codes: torch.dtype | None) -> Experts:
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    gate_up = torch.randn(mixture.experts, 2 * mixture.width, mixture.hidden, **options).div_(mixture.hidden**0.5)
    down = torch.randn(mixture.experts, mixture.hidden, mixture.width, **options).div_(mixture.width**0.5)
    return (gate_up, down) if codes is None else (_quantized(gate_up, codes), _quantized(down, codes))


def _quantized(weight: Tensor, dtype: torch.dtype) -> ScaledWeight:
    experts, rows, columns = weight.shape
    codes, scales = quantize_rows(weight.flatten(0, 1), dtype, columns)
    return ScaledWeight(codes.view(experts, rows, columns), scales.view(experts, rows, 1), (1, columns))


def arguments(mixture: Mixture, tokens: int, weights_: Experts, seed: int) -> tuple[Any, ...]:
    generator = torch.Generator("cuda").manual_seed(seed)
    options = {"dtype": torch.bfloat16, "device": "cuda", "generator": generator}
    x = torch.randn(tokens, mixture.hidden, **options)
    weights, numbers = route(torch.randn(tokens, mixture.experts, **options), mixture.chosen, True)
    return x, *weights_, numbers, weights, torch.empty_like(x)


def measure(
    mixture: Mixture,
    tokens: int,
    sets: list[tuple[Any, ...]],
    broken: set[ExpertConfigs],
    codes: torch.dtype | None,
) -> dict[ExpertConfigs, float]:
    """Seconds of every pair of configs that go together; some by adding."""
    found: dict[ExpertConfigs, float] = {}
    for firsts, seconds in candidates(mixture, tokens, codes):
        expected = exact(*sets[0][:-1], codes and _of_scale(firsts[0], seconds[0], mixture.width))
        pairs = product(firsts, seconds)
        base = next((pair for pair in pairs if pair not in broken and time_one(sets, pair, expected) < INFINITE), None)
        if base is None:
            continue
        by_first = {first: time_one(sets, (first, base[1]), expected) for first in firsts}
        by_second = {second: time_one(sets, (base[0], second), expected) for second in seconds}
        for first, one in by_first.items():
            for second, other in by_second.items():
                found[first, second] = one + other - by_first[base[0]]
    return found


def time_one(sets: list[tuple[Any, ...]], configs: ExpertConfigs, expected: Tensor) -> float:
    """Infinite for what does not run or is wrong."""
    *inputs, out = sets[0]
    out.fill_(float("nan"))
    try:
        experts_with_configs(*inputs, out, configs, overlap=True)
    except Exception as error:
        print(f"left out: {configs}: {error}".splitlines()[0])
        return INFINITE
    error = float((out[: len(expected)].float() - expected).abs().max() / expected.abs().max())
    if not error < (0.02 if isinstance(inputs[1], Tensor) else 0.03):
        print(f"WRONG: {configs} of {len(out)} tokens: {error:.1e}")
        return INFINITE
    guess = max(1e-5, (len(out) * inputs[3].shape[1] * 6 * _width(inputs[2]) * len(out[0])) / 4e14)
    return graph_seconds(calls(sets, configs, True), guess)


def calls(sets: list[tuple[Any, ...]], configs: ExpertConfigs, overlap: bool) -> list[Callable[[], None]]:
    return [lambda own=own: experts_with_configs(*own, configs, overlap=overlap) for own in sets]


def _width(down: Tensor | ScaledWeight) -> int:
    return (down if isinstance(down, Tensor) else down.codes).shape[2]


def _of_scale(first: GemvConfig | GemmConfig, second: GemvConfig | GemmConfig, width: int) -> int | None:
    """Columns of the second product that share a scale; None: its rows are not quantized."""
    if isinstance(first, GemvConfig):
        return None
    return width if first.block_n // 2 % second.block_k else first.block_n // 2


def exact(
    x: Tensor,
    gate_up: Tensor | ScaledWeight,
    down: Tensor | ScaledWeight,
    numbers: Tensor,
    weights: Tensor,
    of_scale: int | None,
) -> Tensor:
    """The first tokens in fp32, pair by pair; with of_scale, of quantized activations, as many of which share a scale
    in the second product."""
    out = torch.zeros((min(len(x), 40), x.shape[1]), device=x.device)
    for token, own in enumerate(numbers[: len(out)].tolist()):
        for expert, weight in zip(own, weights[token].float(), strict=True):
            row = _seen(x[token].float(), gate_up, x.shape[1], of_scale)
            gate, up = (_dense(gate_up, expert) @ row).chunk(2)
            out[token] += weight * (_dense(down, expert) @ _seen(F.silu(gate) * up, down, of_scale, of_scale))
    return out


def _dense(weight: Tensor | ScaledWeight, expert: int) -> Tensor:
    if isinstance(weight, Tensor):
        return weight[expert].float()
    return ScaledWeight(weight.codes[expert], weight.scales[expert], weight.block).dense()


def _seen(row: Tensor, weight: Tensor | ScaledWeight, group: int | None, of_scale: int | None) -> Tensor:
    """A row as a product with the weight sees it."""
    if of_scale is None or group is None or isinstance(weight, Tensor):
        return row
    if of_scale == len(row):
        row = row.bfloat16().float()
    codes, scales = reference_quantize_rows(row[None], weight.codes.dtype, group)
    return (codes.float() * scales.repeat_interleave(group, 1)[:, : len(row)])[0]


def line(mixture: Mixture, tokens: int, sets: list[tuple[Any, ...]], seconds: dict[ExpertConfigs, float]) -> str:
    touched = sum(int(own[3].unique().numel()) for own in sets) / len(sets)
    item = 2 if isinstance(sets[0][1], Tensor) else 1
    moved = touched * 3 * item * mixture.hidden * mixture.width
    flops = tokens * mixture.chosen * 6 * mixture.hidden * mixture.width
    limit = max(moved / BYTES_PER_S, flops * item / 2 / FLOPS_PER_S)
    best = sorted(seconds, key=seconds.__getitem__)[:SHOWN]
    logits = torch.randn(tokens, mixture.experts, dtype=torch.bfloat16, device="cuda")
    routing = graph_seconds([lambda: route(logits, mixture.chosen, True)], 3e-6)
    grouping = graph_seconds([lambda own=own: group_by_expert(own[3], mixture.experts, 16) for own in sets], 3e-6)
    return (
        f"{astuple(mixture)} {tokens:4} tokens, {touched:.1f} experts: {seconds[best[0]] * 1e6:8.1f} µs, "
        f"limit {limit * 1e6:8.1f} ({limit / seconds[best[0]]:.0%}), {moved / seconds[best[0]] / 1e12:.2f} TB/s, "
        f"{flops / seconds[best[0]] / 1e12:3.0f} TFLOP/s; routing {routing * 1e6:.1f}, grouping {grouping * 1e6:.1f}; "
        + "; ".join(f"{source(configs)} {seconds[configs] * 1e6:.1f}" for configs in best)
    )


def print_overlap(figures: dict[tuple[Mixture, int], dict[ExpertConfigs, float]], codes: torch.dtype | None) -> None:
    """What starting early gains at a few sizes."""
    mixture = MIXTURES[0]
    weights = random_weights(mixture, codes)
    for tokens in (1, 32, 128):
        if (mixture, tokens) not in figures:
            continue
        sets = [arguments(mixture, tokens, weights, number) for number in range(CHOICES)]
        configs = min(figures[mixture, tokens], key=figures[mixture, tokens].__getitem__)
        early, late = (graph_seconds(calls(sets, configs, overlap), 5e-5) for overlap in (True, False))
        print(
            f"{tokens} tokens, started while the kernel before ends: {early * 1e6:.1f} µs, after it: {late * 1e6:.1f}"
        )


# --- choice and results ---------------------------------------------------------------------------------------------


def choose(
    figures: dict[tuple[Mixture, int], dict[ExpertConfigs, float]], tolerance: float
) -> dict[tuple[Mixture, int], ExpertConfigs]:
    """The fastest pair of each size among the few that keep all within the tolerance."""
    kept = few_enough(
        {
            size: [configs for configs, s in seconds.items() if s <= min(seconds.values()) * (1 + tolerance)]
            for size, seconds in figures.items()
        }
    )
    return {
        size: min((configs for configs in seconds if configs in kept), key=seconds.__getitem__)
        for size, seconds in figures.items()
    }


def source(configs: ExpertConfigs) -> str:
    return (
        "(" + ", ".join(f"{type(config).__name__}({', '.join(map(str, astuple(config)))})" for config in configs) + ")"
    )


def as_json(
    figures: dict[tuple[Mixture, int], dict[ExpertConfigs, float]], chosen: dict[tuple[Mixture, int], ExpertConfigs]
) -> object:
    return [
        {
            "mixture": astuple(mixture),
            "tokens": tokens,
            "chosen": source(chosen[mixture, tokens]),
            "microseconds": {
                source(configs): round(s * 1e6, 3)
                for configs, s in sorted(seconds.items(), key=lambda item: item[1])
                if s < INFINITE
            },
        }
        for (mixture, tokens), seconds in figures.items()
    ]


def as_table(chosen: dict[tuple[Mixture, int], ExpertConfigs]) -> str:
    """The table as the JSON of configs/: by mixture, and by the largest number of tokens."""
    names = {GemvConfig: "gemv", GemmConfig: "gemm"}
    table: dict[str, dict[str, list[dict[str, object]]]] = {}
    for mixture in dict.fromkeys(mixture for mixture, _ in chosen):
        sizes = sorted(tokens for own, tokens in chosen if own == mixture)
        rows = table[",".join(f"{name}={value}" for name, value in asdict(mixture).items())] = {}
        for tokens, following in zip(sizes, [*sizes[1:], None], strict=True):
            configs = chosen[mixture, tokens]
            if following is None or chosen[mixture, following] != configs:
                most = "inf" if following is None else str(tokens)
                rows[most] = [{"kernel": names[type(each)], **asdict(each)} for each in configs]
    return json.dumps(table, indent=2)


if __name__ == "__main__":
    main()
