"""Commands of docs/planning.md, as they are typed."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
from pathlib import Path

import msgspec
import pytest

from quire.cli.main import main
from quire.models.spec import read_spec
from quire.planning.costmodel.measured_step_times import (
    MeasuredStepTimes,
    ServerTerms,
    StepTerms,
    read_step_times,
    windows_of,
)
from quire.planning.machine import this_machine
from quire.tools.bench import load, step_times
from quire.tools.simulation import calibration
from quire.tools.sizing.measured_rows import DIRECTORY

BUILTIN = Path(__file__).parents[2] / "quire" / "builtin" / "quill"
TEXT = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
COMMANDS = [
    line for block in re.findall(r"```console\n(.*?)```", TEXT, re.S) for line in re.findall(r"^\$ (.*)$", block, re.M)
]
CHECK = "quire plan --check"
"""Takes 10 s; the table is made in test_measured_rows.py."""
CALIBRATE = next(line for line in COMMANDS if "--calibrate" in line)
"""Starts an engine and a server."""
SIMULATE = next(line for line in COMMANDS if line.startswith("quire simulate"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files that commands name."""
    directory = tmp_path_factory.mktemp("planning")
    shutil.copytree(DIRECTORY / "llama-3.1-8b", directory / "models" / "llama-3.1-8b")
    (directory / "prices.yaml").write_text(re.findall(r"```yaml\n(.*?)```", TEXT, re.S)[0])
    lines = [{"timestamp": 50 * i, "input_length": 300, "output_length": 10, "hash_ids": [0]} for i in range(20)]
    (directory / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (directory / "quill.json").write_bytes(msgspec.json.encode(timed_steps()))
    return directory


def timed_steps() -> MeasuredStepTimes:
    """As --calibrate writes them."""
    spec, dtype = read_spec(BUILTIN), "bfloat16" if this_machine().fast_bfloat16 else "float32"
    terms = StepTerms(points=((1, 1.0), (512, 20.0)), row_ms=0.1, chunk_ms=0.0, read_ms=0.0, score_ms=0.0, error=0.02)
    server, windows = (
        ServerTerms(request_ms=2.0, arrival_ms=0.5, step_ms=0.1, row_ms=0.05),
        tuple(windows_of(spec).items()),
    )
    return MeasuredStepTimes("quill", spec.num_parameters, dtype, dtype, 2, windows, terms, 0.5, server)


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 13
    assert CHECK in COMMANDS


@pytest.mark.parametrize("command", [line for line in COMMANDS if line not in (CHECK, CALIBRATE)])
def test_a_command_works(
    command: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    with pytest.raises(SystemExit) as end:
        main(shlex.split(command)[1:])
    assert end.value.code == 0, capsys.readouterr().err
    assert capsys.readouterr().out


def test_what_the_page_shows_is_what_is_said(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    shown = re.findall(r"```\n(models/.*?)```", TEXT, re.S)[0]
    with pytest.raises(SystemExit):
        main(shlex.split(COMMANDS[1])[1:])
    said = capsys.readouterr().out
    assert said.replace("/config.json:", ":") == shown


def test_what_the_page_shows_of_a_search_is_what_is_said(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    shown = re.findall(r"```\n(=+ Rates.*?)```", TEXT, re.S)[0]
    with pytest.raises(SystemExit):
        main(shlex.split(SIMULATE)[1:])
    assert shown in capsys.readouterr().out


@pytest.mark.long("operations")
def test_steps_are_timed_and_written(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """How close a simulation with them comes is for an idle machine to tell: benchmarks/simulate_accuracy.py. Any of
    them may be 0 here: they are fitted to what a busy machine did, and tests/costmodel fits times that are given."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(calibration, "RUNS", 1)
    monkeypatch.setattr(step_times, "LEAST_PASSES", 1)
    monkeypatch.setattr(step_times, "WANTED_S", 0.0)
    monkeypatch.setattr(load, "REQUESTS", {1: 3, 8: 16})
    with pytest.raises(SystemExit) as end:
        main(shlex.split(CALIBRATE)[1:])
    assert end.value.code == 0, capsys.readouterr().err
    assert "steps as timed here" in capsys.readouterr().out
    found = read_step_times("quill.json")
    assert found != timed_steps()
    assert (found.model, found.windows) == ("quill", timed_steps().windows)
    assert found.server != calibration.FIRST_GUESS, "the server's are fitted as well"
    tokens, times = zip(*found.steps.points, strict=True)
    assert tokens == tuple(sorted(set(tokens)))
    assert len(tokens) > 8, "rows and prompts of many lengths were timed"
    terms = [*times, *msgspec.structs.astuple(found.steps)[1:], *msgspec.structs.astuple(found.server)]
    assert any(terms)
    assert all(0 <= each < math.inf for each in [*terms, found.engine_request_ms])
