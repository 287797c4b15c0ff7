"""An engine's process that is begun while a server reads its settings."""

from __future__ import annotations

import os

import pytest

from quire.cli import early_engine
from quire.cli.early_engine import ENGINE, EarlyEngine
from quire.foundation.config import Config
from quire.foundation.processes.begun_process import BegunProcess
from quire.foundation.processes.child_process import Child
from quire.foundation.processes.launch import EXIT_ORPHANED, LaunchConfig
from quire.foundation.processes.pipe_lines import wait_readable

CHILD = "tests.processes.failing_child"
"""It ends with its model's name as the message."""


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[BegunProcess]:
    """The processes that are begun; they run CHILD, and so do others."""
    made: list[BegunProcess] = []

    def begin(module: str) -> BegunProcess:
        assert module == early_engine.MODULE
        made.append(BegunProcess(CHILD))
        return made[-1]

    monkeypatch.setattr(early_engine, "BegunProcess", begin)
    monkeypatch.setattr(early_engine, "torch_is_for_cpus", lambda: True)
    monkeypatch.setattr(early_engine, "ENGINE", CHILD)
    return made


def ended(child: Child) -> str:
    """The message with which it ended."""
    wait_readable(child.pid_fd)
    try:
        return child.cause_of_death()
    finally:
        child.close()


def test_the_first_engine_is_the_process_that_was_begun_and_others_are_not(begun: list[BegunProcess]) -> None:
    with EarlyEngine() as early:
        engines = [early.start("engine", CHILD, LaunchConfig(Config().with_values(model=name), "")) for name in "ab"]
    assert [engine.pid == begun[0].process.pid for engine in engines] == [True, False]
    assert [ended(engine) for engine in engines] == ["a", "b"]
    assert len(begun) == 1


@pytest.mark.parametrize("setting", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_an_engine_of_several_ranks_is_another_process(begun: list[BegunProcess], setting: str) -> None:
    with EarlyEngine() as early:
        child = early.start("engine", CHILD, LaunchConfig(Config().with_values(model="a", **{setting: 2}), ""))
        assert child.pid != begun[0].process.pid
        assert ended(child) == "a"
    assert begun[0].process.poll() is not None


def test_other_processes_are_not_taken_for_an_engine(
    begun: list[BegunProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_engine, "ENGINE", ENGINE)
    with EarlyEngine() as early:
        api = early.start("api", CHILD, LaunchConfig(Config().with_values(model="a"), ""))
        assert api.pid != begun[0].process.pid
        assert ended(api) == "a"


@pytest.mark.parametrize("flag", ["--help", "--headless"])
def test_commands_that_start_no_engine_begin_none(
    begun: list[BegunProcess], flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.cli.serve.run", lambda arguments, start: 0)
    assert early_engine.serve([flag]) == 0
    assert not begun


def test_a_process_that_gets_no_settings_ends_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    begun = BegunProcess(CHILD)
    for descriptor in (begun.launch_write, begun.report_read, begun.lifeline):  # as when the parent dies
        os.close(descriptor)
    assert begun.process.wait(60) == EXIT_ORPHANED
    assert capfd.readouterr() == ("", "")
