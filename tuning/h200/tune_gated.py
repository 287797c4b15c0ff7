"""From how many rows, and for which weights, a gated product is fastest as one kernel.

    python tuning/h200/tune_gated.py --out DIR

Times cuBLAS with a kernel for the gate, and the kernel for many rows, in graphs over weights that outgrow the GPU's
cache together: a few calls at a time, as when a single prompt arrives, and so many that the GPU lowers its clock.
Checks the results against a product in fp64. Prints a line for each weight and number of rows, and writes

    DIR/gated.json   all figures

Where the kernel is the faster one in both, `MANY_ROWS` and `LARGE_WEIGHT` in
quire/compute/kernels/triton/linear/linear.py should admit it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from sweep import GRAPH_S, copies, graph_seconds
from torch import Tensor
from tune_linear import Weight, arguments, cublas, error, gated

from quire.compute.kernels.triton.linear.gated import gated_gemm
from quire.compute.kernels.triton.linear.linear import prefers_gated_gemm

ROWS = (1024, 2048, 8192)
WEIGHTS = {
    "Llama-3.1-8B": Weight(28672, 4096, True),
    "Qwen3-0.6B": Weight(6144, 1024, True),
    "half of Llama-3.1-70B": Weight(28672, 8192, True),
    "a width of 6144": Weight(12288, 4096, True),
    "Qwen3-8B": Weight(24576, 4096, True),
}
SUSTAINED_S = 0.03
"""A graph of so many calls holds about this much work."""
TURNS = 2
"""Both are timed this often in turn, since the GPU's clock goes by what it did before."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    began = time.perf_counter()
    figures: list[dict[str, object]] = []
    for model, weight in WEIGHTS.items():
        x, weights, y = arguments(weight, max(ROWS), copies(2 * weight.outputs * weight.columns))
        exact = weights[0].double()
        for rows in ROWS:
            own_x, own_y = x[:rows], y[:rows]
            own_y.fill_(float("nan"))
            gated_gemm(own_x, weights[0], own_y, True)
            expected = gated(own_x[:1024].double() @ exact.T)
            wrong = error(own_y[:1024], expected)
            assert wrong < 1e-2, f"{model}, {rows} rows: {wrong:.1e}"
            del expected
            took = measure(own_x, weights, own_y)
            figures.append({"model": model, "shape": (weight.outputs, weight.columns), "rows": rows, **took})
            print(line(model, weight, rows, took), flush=True)
    print(f"launching takes the host {host_seconds(x, weights, y) * 1e6:.0f} µs")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gated.json").write_text(json.dumps(figures, indent=1))
    print(f"{time.perf_counter() - began:.0f} s")


def measure(x: Tensor, weights: list[Tensor], y: Tensor) -> dict[str, float]:
    """Microseconds of both, a few calls at a time and many."""
    outputs, columns = weights[0].shape
    guess = 2 * len(x) * outputs * columns / 7e14
    ops: dict[str, Callable[[Tensor, Tensor, Tensor], None]] = {
        "cublas": cublas(True),
        "own": lambda x, w, y: gated_gemm(x, w, y, True),
    }
    seconds: dict[str, list[float]] = {}
    for _ in range(TURNS):
        for name, op in ops.items():
            calls = [lambda w=w, op=op: op(x, w, y) for w in weights]
            calls[0]()
            torch.cuda.synchronize()
            time.sleep(0.01)  # the GPU rests
            seconds.setdefault(name, []).append(graph_seconds(calls, guess))
            seconds.setdefault(f"{name}_sustained", []).append(graph_seconds(calls, guess * GRAPH_S / SUSTAINED_S))
    return {name: round(statistics.median(each) * 1e6, 2) for name, each in seconds.items()}


def host_seconds(x: Tensor, weights: list[Tensor], y: Tensor, calls: int = 50) -> float:
    """Of a launch."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        gated_gemm(x[:128], weights[0], y[:128], True)
    return (time.perf_counter() - began) / calls


def line(model: str, weight: Weight, rows: int, took: dict[str, float]) -> str:
    tera = 2 * rows * weight.outputs * weight.columns / 1e6
    served = "one kernel" if prefers_gated_gemm(rows, weight.outputs, weight.columns) else "cuBLAS"
    parts = [
        f"cuBLAS and gate {took[f'cublas{kind}']:8.1f} µs, own {took[f'own{kind}']:8.1f} "
        f"({tera / took[f'own{kind}']:3.0f} TFLOP/s, {took[f'own{kind}'] / took[f'cublas{kind}'] - 1:+.1%})"
        for kind in ("", "_sustained")
    ]
    return (
        f"{model:22} {weight.outputs:6} × {weight.columns:5}, {rows:5} rows: "
        f"{parts[0]}; sustained {parts[1]}; served by {served}"
    )


if __name__ == "__main__":
    main()
