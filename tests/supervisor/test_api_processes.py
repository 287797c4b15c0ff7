"""Several API processes: each is told and replaced on its own, and the server ends when all have."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from quire.foundation.messages.from_engine import Dead
from quire.foundation.processes.launch import EXIT_CRASHED, STOP_ENGINE, StatusReport
from tests.supervisor.machine import Machine
from tests.supervisor.test_supervisor import ticks

APIS = ("api 0", "api 1", "api 2")


def several(**settings: object) -> Machine:
    return Machine(api_server_count=3, **settings)


def test_all_share_one_socket_and_the_server_is_ready_when_all_are(capsys: pytest.CaptureFixture[str]) -> None:
    machine = several()

    def script() -> Iterator[None]:
        machine.ready("engine", "api 0", "api 2")
        yield
        assert "Ready in" not in capsys.readouterr().err
        machine.ready("api 1")
        yield
        yield
        assert "Ready in" in capsys.readouterr().err
        machine.interrupt()
        yield

    assert machine.run(script()) == 0
    launches = [child.launch for child in machine.children if child.name in APIS]
    assert [(launch.place, launch.number, launch.restarts) for launch in launches] == [(0, 0, 0), (1, 1, 0), (2, 2, 0)]
    assert len({launch.listen_fd for launch in launches}) == 1
    assert all(child.signals == [signal.SIGTERM] for child in machine.children if child.name in APIS)
    assert machine.latest("engine").signals == [STOP_ENGINE]


def test_a_dead_one_is_replaced_under_a_new_number_and_the_others_live_on() -> None:
    machine = several()

    def script() -> Iterator[None]:
        machine.ready("engine", *APIS)
        yield
        for _ in range(2):
            machine.die("api 1")
            yield
            machine.ready("api 1")
            yield
        machine.die("api 2")
        yield
        machine.ready("api 2")
        machine.die("engine")
        yield
        machine.ready("engine")
        yield
        machine.interrupt()
        yield

    assert machine.run(script()) == 0
    assert [child.launch.number for child in machine.children if child.name == "api 1"] == [1, 3, 4]
    latest = machine.latest("api 1").launch
    assert (latest.place, latest.restarts) == (1, 2)
    assert len([child for child in machine.children if child.name == "api 0"]) == 1
    assert [gone for who, gone in machine.told if who.startswith("engine")] == [1, 3, 2]
    told = {who for who, message in machine.told if isinstance(message, Dead)}
    assert told == {"client 0", "client 4", "client 5"}, "the present lives, each once"


def test_a_drain_waits_for_all_and_says_which_did_not_end_cleanly(capsys: pytest.CaptureFixture[str]) -> None:
    machine = several()
    machine.obedient = False

    def script() -> Iterator[None]:
        machine.ready("engine", *APIS)
        yield
        machine.interrupt()
        yield
        machine.die("api 1", -11)
        yield
        machine.die("api 0", 0)
        yield from ticks(5)
        assert machine.latest("engine").signals == [], "one API process still serves"
        machine.obedient = True
        machine.die("api 2", 0)
        yield

    assert machine.run(script()) == EXIT_CRASHED
    assert "api 1 process did not end cleanly" in capsys.readouterr().err.splitlines()[-1]
    assert len([child for child in machine.children if child.name in APIS]) == 3, "none takes its place in a drain"


def test_a_drain_does_not_wait_for_one_that_is_about_to_be_started_again() -> None:
    machine = several(shutdown_timeout=600.0)

    def script() -> Iterator[None]:
        machine.ready("engine", *APIS)
        yield
        for _ in range(5):  # it dies in each start, so the next one waits
            machine.die("api 1", 1)
            while machine.latest("api 1").code is not None:
                yield
        machine.die("api 1", 1)
        yield
        machine.interrupt()
        yield

    began = machine.clock.time
    assert machine.run(script()) == 0
    assert machine.clock.time - began < 60
    assert machine.latest("engine").signals == [STOP_ENGINE]


def test_one_that_fails_in_the_first_start_ends_all_with_its_own_words(capsys: pytest.CaptureFixture[str]) -> None:
    machine = several()

    def script() -> Iterator[None]:
        machine.ready("engine", "api 0", "api 2")
        machine.latest("api 1").failure = StatusReport("failed", "ConfigError", "The template is broken.")
        machine.die("api 1", 2)
        yield

    assert machine.run(script()) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "quire: error: The template is broken."
    assert all(child.code is not None and child.closed for child in machine.children)


def test_models_are_not_reloaded_by_a_signal(capsys: pytest.CaptureFixture[str]) -> None:
    machine = several()

    def script() -> Iterator[None]:
        machine.ready("engine", *APIS)
        yield
        machine.interrupt(signal.SIGHUP)
        yield
        machine.interrupt()
        yield

    assert machine.run(script()) == 0
    assert "nothing has changed" in capsys.readouterr().err
    assert all(not child.orders for child in machine.children)
