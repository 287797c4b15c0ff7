"""What the supervisor decides when its processes report, hang and die, on a machine where none is really started."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from quire.compute.collectives.layout import LINE, group_bytes
from quire.compute.mesh import Mesh
from quire.foundation.messages.from_engine import Dead, EngineId
from quire.foundation.processes.launch import EXIT_CRASHED, STOP_ENGINE, Pulse, Recovery, StatusReport
from quire.foundation.processes.shared_memory import SharedMemory
from quire.serving.supervisor.supervisor import STOP_TIMEOUT_S
from tests.supervisor.machine import Machine


def ticks(count: int) -> Iterator[None]:
    for _ in range(count):
        yield


def test_a_process_that_fails_to_start_ends_all_with_its_own_words(capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine()

    def script() -> Iterator[None]:
        machine.latest("engine").failure = StatusReport("failed", "CheckpointError", "The file is broken.")
        machine.die("engine", 1)
        yield

    assert machine.run(script()) == 4
    assert capsys.readouterr().err.splitlines()[-1] == "quire: error: The file is broken."
    assert all(child.code is not None and child.closed for child in machine.children)


def test_an_engine_that_dies_has_a_successor_with_another_name_and_clients_are_told() -> None:
    machine = Machine()
    machine.in_flight = [7, 9]

    def script() -> Iterator[None]:
        machine.ready("engine", "api")
        yield
        for _ in range(3):
            machine.die("engine")
            yield
            machine.ready("engine")
            machine.report("api", Recovery(EngineId(), 2))
            yield
        machine.interrupt()
        yield

    assert machine.run(script()) == 0
    engines = [child for child in machine.children if child.name == "engine"]
    assert [engine.launch.engine for engine in engines] == [EngineId(0, epoch) for epoch in range(4)]
    told = [message for who, message in machine.told if who == "client 0"]
    assert [(dead.source.epoch, dead.successor.epoch, dead.in_flight) for dead in told] == [
        (epoch, epoch + 1, [7, 9]) for epoch in range(3)
    ]
    assert engines[-1].signals == [STOP_ENGINE, signal.SIGKILL][: len(engines[-1].signals)]


def test_replaced_processes_leave_no_descriptors() -> None:
    machine = Machine(max_restarts=100)
    open_children: list[int] = []

    def script() -> Iterator[None]:
        machine.ready("engine", "api")
        yield
        for _ in range(8):
            for name in ("engine", "api"):
                machine.die(name)
                yield
                machine.ready(name)
                yield
            open_children.append(sum(not child.closed for child in machine.children))
        machine.interrupt()
        yield

    assert machine.run(script()) == 0
    assert open_children == [2] * 8


def test_both_may_die_at_once_and_the_next_api_process_knows_the_next_engine() -> None:
    for order in (("engine", "api"), ("api", "engine")):
        machine = Machine()

        def script(machine: Machine = machine, order: tuple[str, ...] = order) -> Iterator[None]:
            machine.ready("engine", "api")
            yield
            for name in order:
                machine.die(name)
            yield
            machine.ready("engine", "api")
            yield
            machine.interrupt()
            yield

        assert machine.run(script()) == 0
        api = machine.latest("api")
        assert api.launch.number == 1
        dead = [message for who, message in machine.told if who == "client 1"]
        knows = api.launch.engines[0] if not dead else dead[-1].successor
        assert knows == machine.latest("engine").launch.engine == EngineId(0, 1)


def test_one_death_more_than_allowed_ends_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine(max_restarts=2)
    machine.obedient = False

    def script() -> Iterator[None]:
        machine.ready("engine", "api")
        yield
        for _ in range(3):
            machine.die("engine", 3)
            yield
            machine.ready("engine")
            yield

    assert machine.run(script()) == EXIT_CRASHED
    assert machine.told[-1] == ("client 0", Dead("it exited with code 3", source=EngineId(0, 2)))
    last = capsys.readouterr().err.splitlines()[-1]
    assert "engine process died: it exited with code 3." in last
    assert "--max-restarts allows" in last


def test_starts_that_take_long_and_fail_are_no_loop(capsys: pytest.CaptureFixture[str]) -> None:
    """A guide's report of ranks that load past the time they have: so few deaths lie within a window that it never is
    full."""
    machine = Machine(max_restarts=3)

    def script() -> Iterator[None]:
        machine.ready("engine", "api")
        yield
        machine.die("engine")
        while True:
            began = machine.clock.time
            while machine.clock.time < began + 400:
                yield
            machine.die("engine", 70)

    assert machine.run(script()) == EXIT_CRASHED
    assert sum(child.name == "engine" for child in machine.children) == 5, "one, its successor, and three restarts"
    assert "more than the 3 restarts" in capsys.readouterr().err.splitlines()[-1]


def test_deaths_in_the_search_for_a_request_do_not_count() -> None:
    machine = Machine(max_restarts=1)
    machine.in_flight = [7]

    def script() -> Iterator[None]:
        machine.ready("engine", "api")
        yield
        for _ in range(5):
            machine.die("engine")
            yield
            machine.ready("engine")
            machine.report("api", Recovery(EngineId(), 3))
            yield
        machine.interrupt()
        yield

    assert machine.run(script()) == 0
    assert len([child for child in machine.children if child.name == "engine"]) == 6


def test_who_is_stuck_is_killed_and_replaced() -> None:
    machine = Machine()

    def script() -> Iterator[None]:
        machine.ready("engine", "api")
        machine.report("engine", Pulse(9.0, 4.0))
        machine.report("api", Pulse())
        yield
        yield from ticks(3)
        assert machine.children[0].killed_for == "it was stuck: a step took more than 4.0 s"
        assert machine.latest("engine").launch.engine == EngineId(0, 1)
        for _ in range(60):  # the API process is never heard again
            machine.report("engine", Pulse())
            machine.clock.time += 0.4
            yield
        assert "nothing was heard" in machine.children[1].killed_for
        assert machine.latest("api").launch.number == 1
        machine.interrupt()
        yield

    assert machine.run(script()) == 0


def test_a_drain_replaces_an_engine_and_ends_when_the_api_process_does() -> None:
    machine = Machine()
    machine.obedient = False

    def script() -> Iterator[None]:
        machine.ready("engine", "api")
        yield
        machine.interrupt()
        yield
        assert machine.latest("api").signals == [signal.SIGTERM]
        machine.die("engine")
        yield
        machine.ready("engine")
        yield from ticks(5)
        machine.obedient = True
        machine.die("api", 0)
        yield

    assert machine.run(script()) == 0
    assert machine.latest("engine").signals == [STOP_ENGINE]
    assert machine.latest("engine").launch.engine == EngineId(0, 1)


def test_a_drain_comes_to_its_end_and_a_second_signal_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    for again, code in ((False, EXIT_CRASHED), (True, 128 + signal.SIGINT)):
        machine = Machine(shutdown_timeout=7.0)
        machine.obedient = False
        began = machine.clock.time

        def script(machine: Machine = machine, again: bool = again) -> Iterator[None]:
            machine.ready("engine", "api")
            yield
            machine.interrupt()
            yield
            if again:
                machine.interrupt(signal.SIGINT)
                yield

        assert machine.run(script()) == code
        took = machine.clock.time - began
        assert (took < 1.0) if again else (7.0 + STOP_TIMEOUT_S <= took < 8.5 + STOP_TIMEOUT_S)
        assert all(child.code is not None for child in machine.children), "nothing is left running"


def test_a_drain_does_not_wait_for_an_api_process_that_is_about_to_be_started_again() -> None:
    machine = Machine(shutdown_timeout=600.0)

    def script() -> Iterator[None]:
        machine.ready("engine", "api")
        yield
        for _ in range(5):  # it dies in each start, so the next one waits
            machine.die("api", 1)
            while machine.latest("api").code is not None:
                yield
        machine.die("api", 1)
        yield
        assert machine.latest("api").code is not None
        machine.interrupt()
        yield

    began = machine.clock.time
    assert machine.run(script()) == 0
    assert machine.clock.time - began < 60
    assert machine.latest("engine").signals == [STOP_ENGINE]


def test_a_child_that_a_signal_to_all_has_ended_is_no_crash() -> None:
    for name in ("engine", "api"):
        machine = Machine()

        def script(machine: Machine = machine, name: str = name) -> Iterator[None]:
            machine.die(name, -signal.SIGTERM)  # while all start; the signal to this process comes a moment later
            yield
            machine.interrupt()
            yield

        assert machine.run(script()) == 0


def test_an_api_process_that_such_a_signal_has_drained_before_is_no_crash_either() -> None:
    machine = Machine()

    def script() -> Iterator[None]:
        machine.ready("engine", "api")
        yield
        machine.die("api", 0)
        yield
        machine.interrupt()
        yield

    assert machine.run(script()) == 0
    assert machine.latest("engine").signals == [STOP_ENGINE]
    assert len(machine.children) == 2, "none takes its place"


def test_without_restarts_nothing_is_watched() -> None:
    machine = Machine(max_restarts=0)
    machine.obedient = False

    def script() -> Iterator[None]:
        machine.ready("engine", "api")
        machine.report("engine", Pulse(9.0, 4.0))
        yield from ticks(10)
        machine.die("engine", -11)
        yield

    assert machine.run(script()) == EXIT_CRASHED
    assert machine.children[0].killed_for == ""
    assert len(machine.children) == 2


def test_of_two_engines_the_dead_one_is_replaced_and_clients_are_told_which() -> None:
    machine = Machine(data_parallel_size=2)
    machine.in_flight = [7]

    def script() -> Iterator[None]:
        machine.ready("engine 0", "engine 1")
        yield
        machine.ready("api")
        yield
        machine.die("engine 1")
        yield
        machine.ready("engine 1")
        machine.report("api", Recovery(EngineId(1, 1), 1))
        yield
        machine.interrupt()
        yield

    assert machine.run(script()) == 0
    assert [child.name for child in machine.children] == ["engine 0", "engine 1", "api", "engine 1"]
    assert machine.children[2].launch.engines == (EngineId(0), EngineId(1))
    assert machine.latest("engine 1").launch.engine == EngineId(1, 1)
    (told,) = [message for who, message in machine.told if who == "client 0"]
    assert (told.source, told.successor, told.in_flight) == (EngineId(1), EngineId(1, 1), [7])
    for name in ("engine 0", "engine 1"):
        assert STOP_ENGINE in machine.latest(name).signals


def test_a_search_in_one_engine_does_not_make_the_others_deaths_free() -> None:
    machine = Machine(data_parallel_size=2, max_restarts=2)
    machine.in_flight = [7]

    def script() -> Iterator[None]:
        machine.ready("engine 0", "engine 1", "api")
        yield
        for name in ("engine 0", "engine 1", "engine 0", "engine 1"):  # the first two count, then both are searching
            machine.die(name)
            yield
            machine.ready(name)
            yield
        machine.in_flight = [8]
        machine.die("engine 1")
        yield

    assert machine.run(script()) == EXIT_CRASHED
    assert [child.name for child in machine.children].count("engine 0") == 3
    assert [child.name for child in machine.children].count("engine 1") == 3


def test_an_engine_that_never_starts_ends_all_though_the_other_one_has(capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine(data_parallel_size=2)

    def script() -> Iterator[None]:
        machine.ready("engine 0", "api")
        yield
        machine.latest("engine 1").failure = StatusReport("failed", "MemoryBudgetError", "No room.")
        machine.die("engine 1", 1)
        yield

    assert machine.run(script()) == 5
    assert capsys.readouterr().err.splitlines()[-1] == "quire: error: No room."


def test_after_an_api_processs_death_all_engines_are_told_and_it_knows_their_latest_lives() -> None:
    machine = Machine(data_parallel_size=2)

    def script() -> Iterator[None]:
        machine.ready("engine 0", "engine 1", "api")
        yield
        machine.die("engine 0")
        yield
        machine.ready("engine 0")
        machine.die("api")
        yield
        machine.ready("api")
        machine.interrupt()
        yield

    assert machine.run(script()) == 0
    assert machine.latest("api").launch.engines == (EngineId(0, 1), EngineId(1, 0))
    assert [who for who, message in machine.told if who.startswith("engine")] == ["engine 1", "engine 0"]


def group(**settings: object) -> Machine:
    return Machine(data_parallel_size=2, enable_expert_parallel=True, **settings)


def test_engines_that_divide_experts_are_replaced_together_which_counts_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Only the requests of the one that died are suspected."""
    machine = group(max_restarts=2)
    machine.in_flight = [7]
    groups: list[list[object]] = []

    def script() -> Iterator[None]:
        machine.ready("engine 0", "engine 1", "api")
        yield
        for name in ("engine 0", "engine 1"):
            before = [machine.latest(f"engine {number}") for number in range(2)]
            machine.die(name)
            yield
            assert all(child.code is not None and child.closed and child in machine.forgotten for child in before)
            after = [machine.latest(f"engine {number}") for number in range(2)]
            assert not {*after} & {*before}
            groups.append([child.launch.group for child in after])
            machine.ready("engine 0", "engine 1")
            yield
        machine.interrupt()
        yield

    assert machine.run(script()) == 0
    told = [message for who, message in machine.told if who == "client 0"]
    assert [(dead.source, dead.successor.epoch, list(dead.in_flight)) for dead in told] == [
        (EngineId(0, 0), 1, [7]),
        (EngineId(1, 0), 1, []),
        (EngineId(1, 1), 2, [7]),
        (EngineId(0, 1), 2, []),
    ]
    assert "engine 0 process died" in told[1].cause
    for first, second in groups:
        assert (first.engine, second.engine) == (0, 1)  # type: ignore[attr-defined]
        assert (first.memory_fd, first.bells) == (second.memory_fd, second.bells)  # type: ignore[attr-defined]
    lines = capsys.readouterr().err
    assert "all that divide experts with it are started again (1 of 2)" in lines
    assert "(2 of 2)" in lines


def test_an_engine_that_others_have_waited_for_in_vain_is_to_blame() -> None:
    machine = group()
    machine.in_flight = [9]

    def script() -> Iterator[None]:
        machine.ready("engine 0", "engine 1", "api")
        yield
        shared = machine.latest("engine 0").launch.group
        assert shared is not None
        words = memoryview(SharedMemory(group_bytes(Mesh(ep=2)), shared.memory_fd).view).cast("I")
        words[2 * LINE // 4] = 1 + 1  # rank 1, which is that of engine 1
        machine.die("engine 0", 70)
        yield
        machine.ready("engine 0", "engine 1")
        yield
        machine.interrupt()
        yield

    assert machine.run(script()) == 0
    told = [message for who, message in machine.told if who == "client 0"]
    assert [(dead.source.engine, list(dead.in_flight)) for dead in told] == [(1, [9]), (0, [])]


def test_when_a_group_starts_again_and_one_fails_each_is_started_once_more() -> None:
    machine = group(max_restarts=5)

    def script() -> Iterator[None]:
        machine.ready("engine 0", "engine 1", "api")
        yield
        machine.die("engine 0")
        yield
        machine.die("engine 1", 5)  # its start
        yield from ticks(10)
        machine.ready("engine 0", "engine 1")
        yield
        machine.interrupt()
        yield

    assert machine.run(script()) == 0
    started = [child.launch.engine for child in machine.children if child.name.startswith("engine")]
    assert sorted(started) == [EngineId(number, epoch) for number in range(2) for epoch in range(3)]
    first, second = (machine.latest(f"engine {number}").launch.group for number in range(2))
    assert first is not None
    assert second == replace(first, engine=1), "they meet"
