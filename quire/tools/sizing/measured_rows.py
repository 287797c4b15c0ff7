"""Predictions beside what was measured on an H200: the rows of docs/performance.md that take time on the device.

Rows that no step bounds (starts, ratios of two runs, experts that are touched) are not predicted.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from quire.foundation.config import Config
from quire.models.spec import read_spec
from quire.planning.costmodel.cards import card
from quire.tools.simulation.deployment import Deployment, deploy
from quire.tools.simulation.engine import SimulatedRun, simulate
from quire.tools.simulation.trace import Trace, TraceRequest

DIRECTORY = Path(__file__).parent / "measured"
"""rows.json, which a test compares with docs/performance.md, and the config.json of each model."""


@dataclass(frozen=True)
class MeasuredRow:
    """A row of docs/performance.md, with its name and unit there: ms, s or tok/s. `model` is a directory here."""

    model: str
    row: str
    value: float
    unit: str


@dataclass(frozen=True)
class CheckedRow:
    """A measured row and its prediction."""

    measured: MeasuredRow
    predicted: float

    @property
    def error(self) -> float:
        """The relative error: 0.1 is a tenth too much."""
        return self.predicted / self.measured.value - 1


def measured_rows() -> list[MeasuredRow]:
    return [MeasuredRow(*row) for row in json.loads((DIRECTORY / "rows.json").read_text())["rows"]]


def checked(rows: Sequence[MeasuredRow]) -> list[CheckedRow]:
    predictions = Predictions()
    return [CheckedRow(row, predictions.of(row)) for row in rows]


class Predictions:
    """Predicts rows. Several rows may be figures of one simulation, which runs once."""

    def __init__(self) -> None:
        self._deployments: dict[tuple[str, str], Deployment] = {}
        self._runs: dict[tuple[str, str], SimulatedRun] = {}

    def of(self, row: MeasuredRow) -> float:
        """The prediction in the row's unit."""
        arithmetic = step_arithmetic(row.row)
        if arithmetic is not None:
            return arithmetic(self._deployed(row.model, "throughput"))
        server = re.fullmatch(r"server, (.*), (output|TTFT p50|TPOT p50)", row.row)
        if server is None:
            return self._run(row.model, "throughput", row.row, offline_trace(row.row)).seconds
        run = self._run(row.model, "balanced", server[1], server_trace(server[1]))
        if server[2] == "output":
            return sum(len(each.times) for each in run.served) / run.seconds
        times = [each.ttft if server[2] == "TTFT p50" else each.tpot for each in run.served]
        return 1e3 * median(time for time in times if time is not None)

    def _run(self, model: str, mode: str, name: str, trace: Trace) -> SimulatedRun:
        if (model, name) not in self._runs:
            where = self._deployed(model, mode)
            device = where.simulated(server=mode == "balanced")
            self._runs[model, name] = simulate(where.config, where.spec, device, trace)
        return self._runs[model, name]

    def _deployed(self, model: str, mode: str) -> Deployment:
        if (model, mode) not in self._deployments:
            config = Config().with_values(performance_mode=mode)
            self._deployments[model, mode] = deploy(config, read_spec(DIRECTORY / model), card("h200"))
        return self._deployments[model, mode]


def step_arithmetic(name: str) -> Callable[[Deployment], float] | None:
    """How a row of single steps is predicted; None for other rows. benchmarks/h200/workloads.py defines the rows."""
    if (found := re.fullmatch(r"decode b=(\d+)", name)) is not None:
        batch = int(found[1])
        return lambda where: where.step.decode(batch, 128 + (64 if batch > 64 else 128))
    if name == "decode b=1, 130k context":
        return lambda where: where.step.decode(1, 130_000 + 64)
    if (found := re.fullmatch(r"first token, ([\d,]+) in", name)) is not None:
        tokens = int(found[1].replace(",", ""))
        return lambda where: where.shares.request_ms + where.prompt_ms(tokens)
    if (found := re.fullmatch(r"prefix 2,000 \+ 50, (cold|hit)", name)) is not None:
        cached = 2_000 if found[1] == "hit" else 0
        return lambda where: where.shares.request_ms + where.prompt_ms(2_050 - cached, cached)
    return None


def offline_trace(name: str) -> Trace:
    """The requests of an offline row, all sent at once in the client's process."""
    if (found := re.fullmatch(r"([\d,]+) × \((\d+) \+ (\d+)\)", name)) is not None:
        count, prompt, output = (int(text.replace(",", "")) for text in found.groups())
        lengths = [(prompt, output)] * count
    else:
        assert name == "256 × (100–1,024 + 100–1,024)", name
        draw = random.Random(0)
        prompts, outputs = ([draw.randint(100, 1_024) for _ in range(256)] for _ in range(2))
        lengths = list(zip(prompts, outputs, strict=True))
    return Trace(tuple(TraceRequest(0.0, prompt, output) for prompt, output in lengths))


def server_trace(clients: str) -> Trace:
    """Requests of 512 + 128 tokens, as benchmarks/h200/serving.py sends them."""
    loads = {"1 client": (20, 1), "32 clients": (320, 32), "64 clients": (640, 64), "1,000 at once": (1_000, None)}
    count, at_once = loads[clients]
    return Trace(tuple(TraceRequest(0.0, 512, 128) for _ in range(count)), at_once)
