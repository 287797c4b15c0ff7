"""Times the experts of gpt-oss-20b in mxfp4 with many configs; compiles them in many processes first.

python tuning/h200/tune_gpt_oss.py [TOKENS …]
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import torch

from quire.compute.kernels.activations import Activation
from quire.compute.kernels.reference.experts import ExpertBiases, coded_experts
from quire.compute.kernels.reference.linear import CODEBOOKS, CodebookWeight
from quire.compute.kernels.triton.experts.expert_gemms import ExpertConfigs
from quire.compute.kernels.triton.experts.experts import experts_with_configs
from quire.compute.kernels.triton.linear.gemm import GemmConfig
from quire.compute.kernels.triton.linear.gemv import GemvConfig

EXPERTS, CHOSEN, HIDDEN = 32, 4, 2880
PROCESSES, SHOWN, SETS = 16, 4, 3


def by_pair() -> list[ExpertConfigs]:
    grid = itertools.product((8, 16, 32), (512, 1024), (1, 2, 4))
    return [(GemvConfig(n, k, warps), GemvConfig(max(4, n // 2), k, warps)) for n, k, warps in grid]


def by_expert(tokens: int) -> list[ExpertConfigs]:
    if tokens <= 8:
        tiles = itertools.product((16,), (64, 128), (64, 128), (4,), (3, 4))
    elif tokens <= 256:
        tiles = itertools.product((16, 32), (64, 128), (64, 128), (4, 8), (3, 4))
    else:
        tiles = itertools.product((64, 128, 256), (128,), (64, 128), (4, 8), (3, 4))
    found = [GemmConfig(m, n, k, 1, warps, stages, True) for m, n, k, warps, stages in tiles]
    return [(each, each) for each in found if each.block_m * each.block_n // (32 * each.warps) <= 128]


def configs(tokens: int) -> list[ExpertConfigs]:
    return [*(by_pair() if tokens <= 8 else ()), *(by_expert(tokens) if tokens > 1 else ())]


def weight(rows: int) -> CodebookWeight:
    packed = torch.randint(0, 256, (EXPERTS, rows, HIDDEN // 2), dtype=torch.uint8, device="cuda")
    exponents = torch.randint(119, 122, (EXPERTS, rows, HIDDEN // 32), dtype=torch.uint8, device="cuda")
    table = torch.tensor(CODEBOOKS["e2m1"], device="cuda")
    return CodebookWeight(packed, exponents.view(torch.float8_e8m0fnu), None, table, 32, "e2m1")


def inputs(tokens: int) -> Callable[..., None]:
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    numbers = torch.rand(tokens, EXPERTS, device="cuda").topk(CHOSEN).indices.int().contiguous()
    weights = torch.rand(tokens, CHOSEN, device="cuda").bfloat16()
    biases = ExpertBiases(*(torch.randn(EXPERTS, n, device="cuda").bfloat16() for n in (2 * HIDDEN, HIDDEN)))
    terms = {"activation": Activation("swigluoai", 1.702, 7.0), "biases": biases}
    arguments = (x, weight(2 * HIDDEN), weight(HIDDEN), numbers, weights, torch.empty_like(x))
    return partial(experts_with_configs, *arguments, overlap=True, **terms)


def check(tokens: int, config: ExpertConfigs) -> float:
    """Return ‖out - reference‖ / ‖reference‖."""
    run = inputs(tokens)
    run(configs=config)
    x, gate_up, down, numbers, weights, out = run.args  # type: ignore[attr-defined]
    terms = {name: run.keywords[name] for name in ("activation", "biases")}  # type: ignore[attr-defined]
    expected = torch.empty(out.shape, device="cuda")
    wide = ExpertBiases(*(each.float() for each in terms["biases"]))
    coded_experts(
        x.float(), gate_up, down, numbers.long(), weights.float(), expected, 0, None, terms["activation"], wide
    )
    return float((out.float() - expected).norm() / expected.norm())


def compile_some(every: list[int], number: int) -> None:
    run = inputs(8)
    for config in list(dict.fromkeys(config for tokens in every for config in configs(tokens)))[number::PROCESSES]:
        try:
            run(configs=config)
        except Exception as error:
            print(f"{config}: {type(error).__name__}", file=sys.stderr)


def timed(run: Callable[[], object], times: int = 2) -> float:
    """Return the microseconds of one call, within a graph of several."""
    run()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(SETS):
                run()
    taken = []
    for _ in range(times + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end) * 1e3 / SETS)
    return sorted(taken[1:])[times // 2]


def stages(run: Callable[..., None], config: ExpertConfigs) -> dict[str, float]:
    """Return the microseconds of each kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            run(configs=config)
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in profile.events():
        if "kernel" in event.name:
            found.setdefault(event.name, []).append(event.device_time)
    return {name: round(sum(own) / 5, 1) for name, own in found.items()}


def tune(tokens: int) -> dict[ExpertConfigs, float]:
    """Print the best configs; return the microseconds of all."""
    sets = [inputs(tokens) for _ in range(SETS if tokens <= 256 else 1)]
    found = {}
    for config in configs(tokens):

        def run(config: ExpertConfigs = config) -> None:
            for each in sets:
                each(configs=config)

        try:
            found[config] = timed(run) / len(sets)
        except Exception as error:
            print(config, type(error).__name__)
    best = sorted(found, key=found.__getitem__)
    print(f"== {tokens} tokens, {len(found)} configs")
    for config in best[:SHOWN]:
        print(f"  {found[config]:9.1f} us {config}", flush=True)
    for config in {type(each[0]): each for each in reversed(best)}.values():
        print("  off by", check(min(tokens, 512), config), stages(sets[0], config), config, flush=True)
    return found


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
