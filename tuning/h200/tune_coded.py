"""Times the products that expand codes as they multiply, with many configs, beside torch's of dense weights.

    python tuning/h200/tune_coded.py

In microseconds, medians of single launches with a cold cache; what launching costs is in those of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.nn.functional as F

from quire.compute.kernels.reference.experts import stack_weights
from quire.compute.kernels.triton.experts.experts import experts_with_configs
from quire.compute.kernels.triton.linear.coded_gemm import CodedConfig, coded_gemm
from quire.compute.kernels.triton.linear.gemm import GemmConfig
from quire.compute.kernels.triton.linear.packed_expand import expand_codebook
from tests.kernels.triton.linear.coded_weights import CODED

SHAPES = ((4096, 4096), (14336, 4096))
FEW = [CodedConfig(16, n, k, w, s) for n in (16, 32, 64) for k in (64, 128, 256) for w in (2, 4) for s in (2, 4)]
MANY = [CodedConfig(m, n, k, w, 3) for m in (16, 32, 64) for n in (64, 128) for k in (64, 128) for w in (4, 8)]
SHOWN = 4


def main() -> None:
    for name in ("4 bits, groups of 32", "8 bits, groups of 64", "mxfp4", "nf4, groups of 64"):
        for outputs, columns in SHAPES:
            _dense(name, 1, outputs, columns, FEW)
    for rows in (32, 64):
        _dense("nf4, groups of 64", rows, *SHAPES[1], MANY)
    for name in ("4 bits, groups of 32", "mxfp4"):
        _experts(name, 128, 8, 2048, 768)


def _dense(name: str, rows: int, outputs: int, columns: int, configs: Iterable[CodedConfig]) -> None:
    weight = CODED[name](outputs, columns, 1, "cuda")
    x = torch.randn(rows, columns, device="cuda").bfloat16()
    y, dense = x.new_empty(rows, outputs), x.new_empty(outputs, columns)
    found = {config: _timed(lambda c=config: coded_gemm(x, weight, None, y, c, False, False)) for config in configs}
    before = _timed(lambda: F.linear(x, expand_codebook(weight, x.dtype))) if hasattr(weight, "table") else None  # type: ignore[arg-type]
    print(name, rows, outputs, columns, "bf16", _timed(lambda: F.linear(x, dense)), "expanded before", before)
    _show(found)


def _experts(name: str, count: int, chosen: int, hidden: int, width: int) -> None:
    gate_up = stack_weights(count, lambda number: CODED[name](2 * width, hidden, number, "cuda"))
    down = stack_weights(count, lambda number: CODED[name](hidden, width, number, "cuda"))
    for tokens in (1, 32, 256, 2048):
        x = torch.randn(tokens, hidden, device="cuda").bfloat16()
        numbers = torch.rand(tokens, count, device="cuda").topk(chosen).indices.int().contiguous()
        weights, out = torch.rand(tokens, chosen, device="cuda").bfloat16(), torch.empty_like(x)
        run = partial(experts_with_configs, x, gate_up, down, numbers, weights, out, overlap=False)
        tiles = {
            config: GemmConfig(config.block_m, config.block_n, config.block_k, 1, config.warps, 3, True)
            for config in MANY
        }
        found = {config: _timed(partial(run, configs=(tile, tile))) for config, tile in tiles.items()}
        print("experts", name, tokens)
        _show(found)


def _show(found: dict[CodedConfig, float]) -> None:
    for config in sorted(found, key=found.__getitem__)[:SHOWN]:
        print(f"  {found[config]:8.1f} {config}", flush=True)


def _timed(run: Callable[[], object], times: int = 7) -> float:
    cold = torch.empty(1 << 28, dtype=torch.int8, device="cuda")
    for _ in range(3):
        run()
    taken = []
    for _ in range(times):
        cold.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end) * 1e3)
    return sorted(taken)[times // 2]


if __name__ == "__main__":
    main()
