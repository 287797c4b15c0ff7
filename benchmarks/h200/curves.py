"""What a decode step costs by the number of its rows and by the length of their contexts, beside the least it can cost.

    python curves.py measure --model DIR --out curves.json
    python curves.py draw curves.json --out curves.svg         (needs matplotlib)

Random weights. The least is the cost model's roofline without overhead: weights and contexts read once at the GPU's
copy bandwidth, or products at its sustained throughput, whichever takes longer; see
quire/planning/costmodel/hardware.py.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512)
ROWS_CONTEXT = 192
"""Context of each row in the middle of the timed steps of `ROWS`, in tokens."""
CONTEXTS = {1: (1_024, 4_096, 16_384, 65_536, 130_000), 8: (1_024, 4_096, 16_384), 64: (1_024, 4_096)}
"""Rows → tokens of each one's context; what fits the cache and a minute."""
STEPS = 128


def measure(model: str, out: Path) -> None:
    """Milliseconds a step by rows and context, one JSON object a point."""
    from offline import Engine
    from serving import vocabulary
    from workloads import Workloads

    from quire.models.spec import read_spec
    from quire.planning.costmodel.hardware import gpu
    from quire.planning.costmodel.roofline import Roofline
    from quire.planning.machine import this_machine

    card = this_machine().gpu
    if card is None:
        raise SystemExit("curves.py measures a GPU, and there is none here")
    hardware = gpu(card.name)
    roofline = Roofline(read_spec(Path(model)), "bfloat16", hardware, 16)
    engine = Engine(model, {})
    workloads = Workloads(engine, vocabulary(Path(model)), seed=time.time_ns())
    workloads.warm_up()
    points: list[dict[str, Any]] = []

    def point(rows: int, context: int, milliseconds: float) -> None:
        least = roofline.step_ms(rows, rows * context) - hardware.overhead_ms
        points.append({"rows": rows, "context": context, "ms": milliseconds, "least_ms": least})
        print(json.dumps(points[-1]), flush=True)

    for rows in ROWS:
        point(rows, ROWS_CONTEXT, workloads.decode(rows)[f"decode b={rows}"])
    for rows, contexts in CONTEXTS.items():
        for context in contexts:
            prompts = [workloads.prompt(context) for _ in range(rows)]
            engine(prompts, [1] * rows)  # from here on they are cached
            first, last = (engine(prompts, [n] * rows) for n in (1, STEPS + 1))
            point(rows, context, (last - first) / STEPS * 1e3)
    out.write_text(json.dumps({"card": card.name, "model": Path(model).name, "points": points}, indent=1) + "\n")


def draw(measured: Path, out: Path) -> None:
    """Both curves and their roofline as one picture."""
    from matplotlib import pyplot  # type: ignore[import-not-found,unused-ignore]

    facts = json.loads(measured.read_text())
    by_rows = [point for point in facts["points"] if point["context"] == ROWS_CONTEXT]
    by_context = defaultdict(list)
    for point in facts["points"]:
        if point["context"] != ROWS_CONTEXT:
            by_context[point["rows"]].append(point)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=False)
    _curve(left, by_rows, "rows", "C0")
    for number, (rows, points) in enumerate(by_context.items()):
        _curve(right, points, "context", f"C{number}", f"{rows} row{'s' * (rows > 1)}")
    _label(left, f"rows, {ROWS_CONTEXT} tokens of context", [1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
    _label(right, "tokens of context", sorted({point["context"] for points in by_context.values() for point in points}))
    figure.suptitle(f"A decode step of {facts['model']} on one {facts['card']}, bf16; dashed: roofline")
    figure.tight_layout()
    figure.savefig(out)


def _curve(axes: Any, points: list[dict[str, Any]], by: str, color: str, name: str = "measured") -> None:
    where = [point[by] for point in points]
    axes.plot(where, [point["ms"] for point in points], "o-", color=color, label=name)
    axes.plot(where, [point["least_ms"] for point in points], "--", color=color)


def _label(axes: Any, label: str, where: list[int]) -> None:
    axes.set(xscale="log", yscale="log", xlabel=label, ylabel="milliseconds")
    axes.set_xticks(where, [f"{n:,}" for n in where], rotation=45)
    axes.set_yticks([4, 5, 6, 8, 10, 15], ["4", "5", "6", "8", "10", "15"])
    axes.minorticks_off()
    axes.legend()
    axes.grid(visible=True, alpha=0.3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--model", required=True)
    drawing = commands.add_parser("draw")
    drawing.add_argument("measured", type=Path)
    for command in (measuring, drawing):
        command.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.command == "measure":
        measure(arguments.model, arguments.out)
    else:
        draw(arguments.measured, arguments.out)


if __name__ == "__main__":
    main()
