"""Whole servers under simulated load and faults: no invariant is violated, and a seed always runs the same way."""

from __future__ import annotations

import dataclasses
import os
import random
import subprocess
import sys
from collections import Counter

import pytest

from quire.engine.core import EngineCore
from tests.simulation import simulation
from tests.simulation.__main__ import main, summaries
from tests.simulation.faults import Faults
from tests.simulation.settings import FAULTS, Settings, settings_of
from tests.simulation.simulation import simulate


@pytest.mark.parametrize("seed", range(10))
def test_no_invariant_is_violated(seed: int) -> None:
    simulate(seed, steps=300)


@pytest.mark.parametrize(("seed", "engines"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_none_is_violated_by_several_engines(seed: int, engines: int) -> None:
    summary = simulate(seed, steps=300, engines=engines)
    assert summary.lives["engine"] >= engines


def test_a_seed_runs_the_same_way_in_another_process() -> None:
    """Whatever the order of sets of strings, and whatever ran before."""
    here = simulate(3, steps=400)
    code = "from tests.simulation.simulation import simulate; print(simulate(3, steps=400))"
    other = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert other.stdout.strip() == str(here)
    assert simulate(4, steps=400).fingerprint != here.fingerprint


def test_a_run_ends_with_a_server_that_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_restarts(rng: random.Random) -> Settings:
        settings = settings_of(rng)
        return dataclasses.replace(settings, config=settings.config.with_values(max_restarts=0), drains_early=False)

    monkeypatch.setattr(simulation, "settings_of", without_restarts)
    assert simulate(0, 10_000, ["engine killed"]).lives["engine"] == 1


@pytest.mark.parametrize("late_s", [2.0, 4.8])
def test_an_engine_may_die_when_all_is_idle(late_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does if a fault waits for one of its later turns."""
    stop = Faults.stop

    def stop_and_kill(faults: Faults) -> None:
        stop(faults)
        faults._world.after(late_s, lambda: faults._kill_engine())

    monkeypatch.setattr(Faults, "stop", stop_and_kill)
    assert simulate(3, 40, [], engines=2).lives["engine"] == 3


def test_the_script_runs_many_seeds_in_several_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "4", "--steps", "60", "--jobs", "2"]) == 0
    at_once = capsys.readouterr().out.splitlines()
    assert main(["--seeds", "4", "--steps", "60"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == at_once[1:]


def test_the_script_says_how_a_violation_is_seen_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(EngineCore, "_idle_wait", lambda core, wait: wait)
    assert main(["--steps", "60"]) == 1
    said = capsys.readouterr().out
    again = said.splitlines()[-1].removeprefix("Again: python -m tests.simulation ")
    assert main(again.split()) == 1
    assert capsys.readouterr().out == said


@pytest.mark.long("reliability")
def test_a_thousand_seeds() -> None:
    """A million steps are a matter of `python -m tests.simulation`."""
    steps = 0
    faults: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    for summary in summaries(range(1_000), steps=180, jobs=2):
        steps += summary.steps
        faults.update(summary.faults)
        outcomes.update(summary.outcomes)
    assert steps >= 200_000
    assert faults.keys() == set(FAULTS), "every kind of fault happened"
    assert outcomes["answered"] >= 20_000, outcomes
    assert {"cut", "left", "timed out", "poison found", "row broken", "message corrupted"} <= outcomes.keys()
