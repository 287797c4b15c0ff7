"""How many threads and elements a program of norms and activations should have.

    python tuning/h200/tune_small.py

Times every candidate in graphs, on tensors that outgrow the GPU's cache together where they are large, and prints
microseconds by rows and width; the best of each column is marked. What is best over all goes to the constants at the
top of quire/compute/kernels/triton/norm.py and activation.py: one choice for all numbers of rows, so that none is
compiled in the middle of serving.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from sweep import CACHES_BYTES, graph_seconds

from quire.compute.kernels.triton import activation, norm

ROWS = (1, 32, 256, 2_048, 8_192)
PER_THREAD = (2, 4, 8, 16, 32)
PROGRAMS = ((512, 2), (512, 4), (1_024, 2), (1_024, 4), (1_024, 8), (2_048, 4), (2_048, 8), (4_096, 8))
MAX_SETS = 24


def main() -> None:
    """Time and print everything."""
    for title, make in (
        ("rms_norm after += by elements a thread", _rms),
        ("layer_norm after += by elements a thread", _layer),
    ):
        for width in (1_024, 2_048, 4_096, 8_192, 16_384):
            _table(f"{title}, width {width}", {str(n): partial(_of_norm, n, make, width) for n in PER_THREAD})
    heads = {f"{tile} / {n}": partial(_of_heads, tile, n) for tile in (512, 1_024, 2_048, 4_096) for n in (4, 8, 16)}
    _table("rms_norm of 40 heads of 128 by elements a program / a thread", heads)
    for op in ("silu_and_mul", "gelu_and_mul"):
        for width in (3_072, 14_336):
            choices = {f"{block} / {warps}": partial(_of_gate, block, warps, op, width) for block, warps in PROGRAMS}
            _table(f"{op} by elements / warps of a program, width {width}", choices)


def _table(title: str, choices: dict[str, Callable[[int], Callable[[], object]]]) -> None:
    figures = {name: [_microseconds(choice, rows) for rows in ROWS] for name, choice in choices.items()}
    best = [min(column) for column in zip(*figures.values(), strict=True)]
    print(f"\n{title}\n{'rows':>14}" + "".join(f"{rows:>10}" for rows in ROWS))
    for name, row in figures.items():
        cells = (f"{value:>9.2f}{'*' if value == low else ' '}" for value, low in zip(row, best, strict=True))
        print(f"{name:>14}" + "".join(cells), flush=True)


def _microseconds(choice: Callable[[int], Callable[[], object]], rows: int) -> float:
    calls = list(_sets(choice, rows))
    for call in calls:
        call()
    torch.cuda.synchronize()
    return graph_seconds(calls, 5e-6) * 1e6


def _sets(choice: Callable[[int], Callable[[], object]], rows: int) -> Iterator[Callable[[], object]]:
    before = torch.cuda.memory_allocated()
    first = choice(rows)
    yield first
    held = max(1, torch.cuda.memory_allocated() - before)
    for _ in range(min(MAX_SETS, CACHES_BYTES // held) - 1):
        yield choice(rows)


def _of_norm(per_thread: int, make: Callable[[int, int], Callable[[], object]], width: int, rows: int) -> partial[None]:
    return partial(_with, norm, {"PER_THREAD": per_thread}, make(rows, width))


def _of_heads(tile: int, per_thread: int, rows: int) -> partial[None]:
    x, weight = _normal(rows, 40, 128), _normal(40, 128)
    call = partial(norm.rms_norm, x, weight, 1e-6, torch.empty_like(x))
    return partial(_with, norm, {"TILE": tile, "PER_THREAD": per_thread}, call)


def _of_gate(block: int, warps: int, op: str, width: int, rows: int) -> partial[None]:
    x = _normal(rows, 2 * width)
    call = partial(getattr(activation, op), x, torch.empty(rows, width, dtype=x.dtype, device="cuda"))
    return partial(_with, activation, {"BLOCK": block, "WARPS": warps}, call)


def _rms(rows: int, width: int) -> Callable[[], object]:
    x, weight, delta = _normal(rows, width), _normal(width), _normal(rows, width)
    return partial(norm.rms_norm, x, weight, 1e-5, torch.empty_like(x), delta)


def _layer(rows: int, width: int) -> Callable[[], object]:
    x, weight, bias, delta = _normal(rows, width), _normal(width), _normal(width), _normal(rows, width)
    return partial(norm.layer_norm, x, weight, bias, 1e-5, torch.empty_like(x), delta)


def _with(module: object, constants: dict[str, int], call: Callable[[], object]) -> None:
    """The call with other constants than those in the file."""
    for name, value in constants.items():
        setattr(module, name, value)
    call()


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
