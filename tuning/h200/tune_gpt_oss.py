"""Times the experts of gpt-oss-20b in packed mxfp4 with many configs; compiles them in many processes first.

python tuning/h200/tune_gpt_oss.py [TOKENS …]
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch

from quire.compute.kernels.activations import Activation
from quire.compute.kernels.reference.experts import ExpertBiases, coded_experts
from quire.compute.kernels.reference.linear import CODEBOOKS, CodebookWeight
from quire.compute.kernels.triton.experts.mxfp4_few import FewConfig, mxfp4_few
from quire.compute.kernels.triton.experts.mxfp4_layout import pack_mxfp4
from quire.compute.kernels.triton.experts.mxfp4_many import ManyConfig, mxfp4_many

EXPERTS, CHOSEN, HIDDEN = 32, 4, 2880
PROCESSES, SHOWN, SETS = 16, 4, 3
MEMORY = 227 * 1024
"""Bytes of shared memory that a program may have."""
Configs: TypeAlias = "tuple[FewConfig, FewConfig] | tuple[ManyConfig, ManyConfig]"


def in_pairs() -> list[Configs]:
    firsts = ((6, 4), (4, 4), (8, 2), (6, 2), (4, 2), (5, 1))
    seconds = ((15, 4), (9, 4), (5, 4), (3, 4), (4, 8))
    return [(FewConfig(0, *first, 1), FewConfig(0, *second, 1)) for first in firsts for second in seconds]


def in_small_tiles(block_m: int) -> list[Configs]:
    one = ((12, 4), (6, 4), (12, 2), (8, 2), (6, 2), (4, 2), (15, 1), (9, 1), (5, 1), (3, 1))
    cuts = [*((*cut, 1) for cut in one), *((*cut, 2) for cut in ((2, 4), (3, 4), (4, 2), (3, 2), (5, 1), (3, 1)))]
    return [(FewConfig(block_m, *cut),) * 2 for cut in cuts]


def in_tiles(sizes: tuple[int, ...]) -> list[Configs]:
    found = []
    for m, t, b in itertools.product(sizes, (1, 2), (2, 3)):
        if 2 * b * m * 128 <= MEMORY - 2048 and not (m == 256 and t == 1):
            found.append((ManyConfig(m, t, b),) * 2)
    return found


def configs(tokens: int) -> list[Configs]:
    if tokens <= 2:
        return in_pairs()
    if tokens <= 4:
        return [*in_pairs(), *in_small_tiles(8)]
    if tokens <= 8:
        return in_small_tiles(8)
    if tokens <= 16:
        return [*in_small_tiles(8), *in_tiles((16,))]
    if tokens <= 64:
        return [*in_small_tiles(16), *in_tiles((16, 32))]
    if tokens <= 128:
        return in_tiles((16, 32, 64))
    return in_tiles((32, 64, 128)) if tokens <= 256 else in_tiles((64, 128, 256))


def weight(rows: int) -> CodebookWeight:
    packed = torch.randint(0, 256, (EXPERTS, rows, HIDDEN // 2), dtype=torch.uint8, device="cuda")
    exponents = torch.randint(119, 122, (EXPERTS, rows, HIDDEN // 32), dtype=torch.uint8, device="cuda")
    table = torch.tensor(CODEBOOKS["e2m1"], device="cuda")
    return CodebookWeight(packed, exponents.view(torch.float8_e8m0fnu), None, table, 32, "e2m1")


class Inputs:
    """A layer and what goes into it."""

    def __init__(self, tokens: int) -> None:
        self.x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
        self.numbers = torch.rand(tokens, EXPERTS, device="cuda").topk(CHOSEN).indices.int().contiguous()
        self.weights = torch.rand(tokens, CHOSEN, device="cuda").bfloat16()
        biases = ExpertBiases(*(torch.randn(EXPERTS, n, device="cuda").bfloat16() for n in (2 * HIDDEN, HIDDEN)))
        self.terms: dict[str, Any] = {"activation": Activation("swigluoai", 1.702, 7.0), "biases": biases}
        self.plain = weight(2 * HIDDEN), weight(HIDDEN)
        self.packed = pack_mxfp4(self.plain[0], True), pack_mxfp4(self.plain[1], False)
        self.out = torch.full_like(self.x, float("nan"))

    def run(self, config: Configs) -> None:
        op: Any = mxfp4_few if isinstance(config[0], FewConfig) else mxfp4_many
        op(self.x, *self.packed, self.numbers, self.weights, self.out, config, True, **self.terms)

    def error(self, config: Configs) -> float:
        """Return ‖out - reference‖ / ‖reference‖."""
        self.run(config)
        expected = torch.empty(self.out.shape, device="cuda")
        biases = ExpertBiases(*(each.float() for each in self.terms["biases"]))
        terms = self.terms | {"biases": biases}
        coded_experts(self.x.float(), *self.plain, self.numbers.long(), self.weights.float(), expected, **terms)
        return float((self.out.float() - expected).norm() / expected.norm())


def compile_some(every: list[int], number: int) -> None:
    inputs = Inputs(8)
    for config in list(dict.fromkeys(config for tokens in every for config in configs(tokens)))[number::PROCESSES]:
        try:
            inputs.run(config)
        except Exception as error:
            print(f"{config}: {type(error).__name__} {str(error)[:200]}", file=sys.stderr)


def timed(run: Callable[[], object], times: int = 3) -> float:
    """Return the microseconds of one call, within a graph."""
    run()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
    taken = []
    for _ in range(times + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end) * 1e3)
    return sorted(taken[1:])[times // 2]


def stages(run: Callable[[], None]) -> dict[str, float]:
    """Return the microseconds of each kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in profile.events():
        if "kernel" in event.name or "_rows" in event.name:
            found.setdefault(event.name, []).append(event.device_time)
    return {name: round(sum(own) / 3, 1) for name, own in found.items()}


def tune(tokens: int) -> None:
    """Print the best configs, what is off about them, and what their kernels take."""
    sets = [Inputs(tokens) for _ in range(SETS if tokens <= 256 else 1)]
    found = {}
    for config in configs(tokens):

        def run(config: Configs = config) -> None:
            for _ in range(2):
                for each in sets:
                    each.run(config)

        try:
            found[config] = timed(run) / len(sets) / 2
        except Exception as error:
            print(config, type(error).__name__, str(error)[:200])
    best = sorted(found, key=found.__getitem__)
    print(f"== {tokens} tokens, {len(found)} configs", flush=True)
    for number, config in enumerate(best):
        off = f" off by {sets[0].error(config):.2e}" if number < SHOWN else ""
        print(f"  {found[config]:9.1f} us {config}{off}")
    for config in {type(each[0]): each for each in reversed(best)}.values():
        print("  off by", sets[0].error(config), stages(partial(sets[0].run, config)), config, flush=True)


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["compile"]:
        compile_some([int(each) for each in arguments[2:]], int(arguments[1]))
        return
    every = [int(each) for each in arguments] or [1, 8, 128, 512, 8192]
    commands = [[sys.executable, __file__, "compile", str(n), *map(str, every)] for n in range(PROCESSES)]
    for process in [subprocess.Popen(command) for command in commands]:
        process.wait()
    for tokens in every:
        tune(tokens)


if __name__ == "__main__":
    main(sys.argv[1:])
