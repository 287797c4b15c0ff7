"""Every figure that Quire is to reach on one H200, beside vLLM's, the GPU's limit and the target (targets.json).

    python benchmarks/h200/targets.py --models DIR [--model llama-3.1-8b …] [--rows REGEX] [--runs N] [--out FILE.json]

DIR has a directory with a config.json for each model; weights are random, prompts all different. Prints a line of a
Markdown table for each row as it is measured; `quire bench regress` compares two files of --out. `--profile` adds where
the time of the decode and first-token rows goes, by kernel. Where Quire is not installed, set PYTHONPATH=. before.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving import LOADS, ROOT, Server, load, serve, vocabulary, with_tokenizer
from starting import caches, start_engine, write_checkpoint

from quire.tools.bench.report import measured_with

HERE = Path(__file__).resolve().parent
MODELS = ("llama-3.1-8b", "qwen3-0.6b", "qwen3-30b-a3b", "gpt-oss-20b")
COLD, WARM, SERVER_COLD, SERVER_WARM = (
    "start, empty caches", "start, warm", "start, server, empty caches", "start, server, warm",
)  # fmt: skip
READ, START_READ = "checkpoint, read warm", "checkpoint, start warm"
_NOT_OFFLINE = ("start", "checkpoint", "experts", "server")
_PATIENCE_S = 60.0
"""A process that is this many seconds behind its deadline is taken to hang."""


@dataclass(frozen=True)
class Options:
    """What is measured.

    Attributes:
        models: Directory of the models' directories.
        names: Which of them.
        rows: Regular expression that a row's name must match somewhere.
        runs: How often each row is measured.
        deadline: On `time.perf_counter`: nothing new is begun after it.
        profile: Show kernels.
        settings: Of the engine, as name=value.
    """

    models: Path
    names: Sequence[str]
    rows: str
    runs: int
    deadline: float
    profile: bool
    settings: Sequence[str]

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.perf_counter()

    def wants(self, *rows: str) -> bool:
        """Whether any of these rows is asked for."""
        return any(re.search(self.rows, row) for row in rows)


@dataclass
class Report:
    """Rows as they come: printed at once, kept for the file."""

    expected: dict[str, list[dict[str, Any]]]
    rows: list[dict[str, Any]] = field(default_factory=list)
    profiles: list[dict[str, Any]] = field(default_factory=list)

    def known(self, model: str) -> list[str]:
        """Names of the rows that a model has; none for a model that no figures are known for: it has all."""
        return [row["row"] for row in self.expected.get(model, [])]

    def row(self, model: str, name: str, value: float, runs: Sequence[float]) -> None:
        """A measured figure; one that no target is known for stands alone."""
        known = next((row for row in self.expected.get(model, []) if row["row"] == name), {"row": name})
        row = {"unit": "", "better": "lower"} | known | {"model": model, "value": value, "runs": list(runs)}
        self.rows.append(row)
        print(_line(row), flush=True)

    def profile(self, model: str, row: str, lines: Sequence[str]) -> None:
        """Kernels behind a row."""
        self.profiles.append({"model": model, "row": row, "lines": list(lines)})
        print("\n".join([f"\n    {model}, {row}:", *(f"    {line}" for line in lines)]), flush=True)


def main() -> int:
    options, out = _options()
    report = Report(json.loads((HERE / "targets.json").read_text())["models"])
    began = time.perf_counter()
    try:
        for name in options.names:
            print(f"\n{name}\n\n{_HEADING}", flush=True)
            for part in (_starts, _offline, _experts, _server):
                try:
                    part(options, name, report)
                except RuntimeError as error:
                    print(f"{part.__name__[1:]} of {name}: {error}", file=sys.stderr, flush=True)
    finally:
        if out is not None:
            facts = {"rows": report.rows, "profiles": report.profiles, "options": vars(options) | {"deadline": 0}}
            out.write_text(json.dumps(measured_with() | facts, default=str, ensure_ascii=False, indent=1) + "\n")
    print(f"\n{len(report.rows)} rows in {time.perf_counter() - began:.0f} s")
    return 0 if report.rows else 1


# --- the parts ------------------------------------------------------------------------------------------------------


def _starts(options: Options, name: str, report: Report) -> None:
    """New processes: first with empty caches of compiled kernels, then with what the first left there."""
    model = options.models / name
    with tempfile.TemporaryDirectory(prefix="quire-targets-") as directory:
        scratch = Path(directory)
        environment = caches(scratch)
        if options.wants(COLD, WARM, READ, START_READ) and options.left_s > 0:
            cold = start_engine(model, options.settings, environment, scratch)
            _started(report, name, COLD, [cold])
        if options.wants(WARM) and options.left_s > 0:
            warm = [start_engine(model, options.settings, environment, scratch) for _ in range(options.runs)]
            _started(report, name, WARM, warm)
        if options.rows and options.wants(READ, START_READ) and options.left_s > 0:
            size = write_checkpoint(model, scratch / "checkpoint")
            from_files = [
                start_engine(scratch / "checkpoint", options.settings, environment, scratch, "safetensors")
                for _ in range(options.runs)
            ]
            _started(report, name, START_READ, from_files)
            rates = [size / 1e9 / stages["weights"] for stages in from_files]
            report.row(name, READ, statistics.median(rates), rates)


def _offline(options: Options, name: str, report: Report) -> None:
    """One process for all of them."""
    known = report.known(name)
    asked = [row for row in known if options.wants(row) and not row.startswith(_NOT_OFFLINE)]
    if (known and not asked) or options.left_s <= 0:
        return
    rows = "|".join(f"^{re.escape(row)}$" for row in asked) or options.rows
    command = [
        sys.executable, str(HERE / "offline.py"), f"--model={options.models / name}", f"--rows={rows}",
        f"--runs={options.runs}", f"--budget-s={options.left_s:.0f}", *(f"--set={pair}" for pair in options.settings),
        *(["--profile"] if options.profile else []),
    ]  # fmt: skip
    _report_lines(command, options, name, report)


def _experts(options: Options, name: str, report: Report) -> None:
    """A process of its own, because counting takes time."""
    if not any(row.startswith("experts") and options.wants(row) for row in report.known(name)) or options.left_s <= 0:
        return
    flags = [f"--model={options.models / name}", *(f"--set={pair}" for pair in options.settings)]
    _report_lines([sys.executable, str(HERE / "experts_touched.py"), *flags], options, name, report)


def _server(options: Options, name: str, report: Report) -> None:
    """One server for all loads; where its start is asked for, one before it with empty caches."""
    known = report.known(name)
    loads = [
        clients
        for clients in LOADS
        if options.wants(*(row for row in clients.rows.values() if not known or row in known))
    ]
    cold = SERVER_COLD in known and options.wants(SERVER_COLD)
    if not (loads or cold) or options.left_s <= 0:
        return
    with tempfile.TemporaryDirectory(prefix="quire-targets-") as directory:
        scratch = Path(directory)
        model = with_tokenizer(options.models / name, scratch / name)
        log = scratch / "server.log"
        environment = caches(scratch) if cold else {}
        if cold:
            with serve(model, options.settings, environment, log) as server:
                report.row(name, SERVER_COLD, server.start_s, [server.start_s])
        if not loads:
            return
        with serve(model, options.settings, environment, log) as server:
            if cold:
                report.row(name, SERVER_WARM, server.start_s, [server.start_s])
            for clients in loads:
                _load(options, name, report, server, clients, scratch)


def _load(options: Options, name: str, report: Report, server: Server, clients: Any, scratch: Path) -> None:
    runs: list[dict[str, float]] = []
    for _ in range(options.runs):
        if options.left_s < clients.cost_s:
            print(f"(server, {clients.name}: no time left for run {len(runs) + 1} of {options.runs})", flush=True)
            break
        runs.append(load(server, clients, vocabulary(options.models / name), scratch))
    for row in clients.rows.values() if runs else ():
        values = [figures[row] for figures in runs]
        report.row(name, row, statistics.median(values), values)


def _started(report: Report, model: str, row: str, starts: Sequence[dict[str, float]]) -> None:
    totals = [stages["total"] for stages in starts]
    report.row(model, row, statistics.median(totals), totals)
    print("(" + ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in starts[-1].items()) + ")", flush=True)


def _report_lines(command: Sequence[str], options: Options, name: str, report: Report) -> None:
    """Report what a child measures of one model, until it ends.

    Raises:
        RuntimeError: It failed; the message has the end of its log.
    """
    with tempfile.NamedTemporaryFile("w+", prefix="quire-targets-", suffix=".log") as log:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT)
        watchdog = threading.Timer(options.left_s + _PATIENCE_S, child.kill)
        watchdog.start()
        assert child.stdout is not None
        for text in child.stdout:
            line = json.loads(text) if text.startswith("{") else {}
            if "row" in line:
                report.row(name, line["row"], line["value"], line["runs"])
            elif "profile" in line:
                report.profile(name, line["profile"], line["lines"])
            elif "note" in line:
                print(f"({line['note']})", flush=True)
        code = child.wait()
        watchdog.cancel()
        if code != 0:
            log.seek(0)
            raise RuntimeError(f"{Path(command[1]).name} failed:\n{log.read()[-3_000:]}")


# --- in and out -----------------------------------------------------------------------------------------------------

_HEADING = "| workload | Quire | vLLM 0.26 | limit | target | |\n|---|---|---|---|---|---|"


def _line(row: dict[str, Any]) -> str:
    unit = f" {row['unit']}" if row["unit"] not in ("", "×") else ""
    bound = "≤" if row["better"] == "lower" else "≥"
    target = row.get("target")
    reached = ""
    if target is not None:
        good = row["value"] <= target if row["better"] == "lower" else row["value"] >= target
        reached = "reached" if good else f"{row['value'] / target:.2f} of it"
    cells = [
        row["row"], f"{_number(row['value'])}{unit}", _number(row.get("vllm")), _number(row.get("limit")),
        f"{bound} {_number(target)}" if target is not None else "—", reached,
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _number(value: float | None) -> str:
    """To about four digits."""
    if value is None:
        return "—"
    decimals = 0 if value >= 1_000 else 1 if value >= 100 else 2 if value >= 10 else 3
    return f"{value:,.{decimals}f}"


def _options() -> tuple[Options, Path | None]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="has a directory with a config.json for each model")
    parser.add_argument("--model", nargs="+", default=list(MODELS), help="which of them")
    parser.add_argument("--rows", default="", help="only rows whose name matches; the checkpoint's only if asked for")
    parser.add_argument("--runs", type=int, default=1, help="how often each row is measured")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    parser.add_argument("--profile", action="store_true", help="kernels of the decode and first-token rows")
    parser.add_argument("--budget-s", type=float, default=3_600, help="begin nothing new after this many seconds")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the engine")
    given = parser.parse_args()
    deadline = time.perf_counter() + given.budget_s
    options = Options(given.models.resolve(), given.model, given.rows, given.runs, deadline, given.profile, given.set)
    return options, given.out


if __name__ == "__main__":
    sys.exit(main())
