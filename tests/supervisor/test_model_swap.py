"""What the supervisor decides when another model is asked for, on a machine where no process is really started."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from quire.errors import ConfigError
from quire.foundation.config import Config
from quire.foundation.messages.from_engine import EngineId
from quire.foundation.processes.launch import STOP_ENGINE, ModelReport, StatusReport, SwapMode, SwapRequest, SwapStatus
from quire.foundation.processes.orders import DropModel, HoldRequests, OpenModel, Order, Reload, TellSwap
from tests.supervisor.machine import FakeChild, Machine

NEW = "engine (model 1)"
RESTORED = "engine (model 2)"


def wanted(mode: SwapMode, model: str = "new", **settings: object) -> SwapRequest:
    config = Config().with_values(model=model, served_model_name=(model,), **settings)
    return SwapRequest(asked=config, config=config, mode=mode, drain_timeout=7.0, hold_timeout=9.0)


def report(machine: Machine, generation: int, state: Literal["served", "released", "refused"], why: str = "") -> None:
    machine.report("api", ModelReport(generation, state, why))


def status(child: FakeChild) -> SwapStatus:
    """What an API process was told last."""
    return [order.status for order in child.orders if isinstance(order, TellSwap)][-1]


def orders(child: FakeChild) -> list[Order]:
    return [order for order in child.orders if not isinstance(order, TellSwap)]


def opened(child: FakeChild) -> list[int]:
    return [order.launch.generation for order in child.orders if isinstance(order, OpenModel)]


def up(machine: Machine) -> Iterator[None]:
    machine.ready("engine", "api")
    yield
    yield


def end(machine: Machine) -> Iterator[None]:
    machine.interrupt()
    yield


def started(**settings: object) -> Machine:
    return Machine(model="old", served_model_name=("old",), **settings)


def test_beside_the_old_engine_ends_when_its_requests_have() -> None:
    machine = started()

    def script() -> Iterator[None]:
        yield from up(machine)
        machine.report("api", wanted("beside"))
        yield
        old, new, api = machine.children[0], machine.latest(NEW), machine.latest("api")
        assert status(api) == SwapStatus(1, "new", "beside", "loading")
        assert opened(api) == [1]
        assert new.launch.config.model.model == "new"
        assert new.launch.directory != old.launch.directory
        machine.ready(NEW)
        yield
        assert not old.signals, "the API process has not switched yet"
        report(machine, 1, "served")
        yield
        assert not old.signals, "requests of the old model are open"
        assert status(api).phase == "draining"
        report(machine, 0, "released")
        yield
        assert old.signals == [STOP_ENGINE]
        yield
        assert (status(api).phase, status(api).reason) == ("done", "")
        assert old.closed
        assert old in machine.forgotten
        assert not Path(old.launch.directory).exists()
        assert len(machine.children) == 3
        yield from end(machine)

    assert machine.run(script()) == 0


def test_after_the_new_engine_starts_when_the_old_one_is_gone() -> None:
    machine = started()

    def script() -> Iterator[None]:
        yield from up(machine)
        machine.report("api", wanted("after"))
        yield
        old, api = machine.children[0], machine.latest("api")
        assert orders(api) == [HoldRequests(7.0, 9.0)]
        assert len(machine.children) == 2
        machine.obedient = False
        report(machine, 0, "released")
        yield
        assert old.signals == [STOP_ENGINE]
        assert len(machine.children) == 2, "both would not fit into memory"
        machine.die("engine", 0)
        yield
        yield
        assert machine.latest(NEW).launch.generation == 1
        assert opened(api) == [1]
        machine.obedient = True
        machine.ready(NEW)
        report(machine, 1, "served")
        yield
        assert status(api).phase == "done"
        yield from end(machine)

    assert machine.run(script()) == 0


def test_an_old_engine_that_does_not_end_is_killed() -> None:
    machine = started()

    def script() -> Iterator[None]:
        yield from up(machine)
        machine.report("api", wanted("after"))
        yield
        machine.obedient = False
        report(machine, 0, "released")
        for _ in range(15):
            yield
        assert machine.children[0].signals == [STOP_ENGINE, signal.SIGKILL]
        assert machine.latest(NEW).code is None
        machine.obedient = True
        yield from end(machine)

    assert machine.run(script()) == 0


def test_beside_a_model_that_does_not_start_changes_nothing() -> None:
    machine = started()

    def script() -> Iterator[None]:
        yield from up(machine)
        machine.report("api", wanted("beside"))
        yield
        new, api = machine.latest(NEW), machine.latest("api")
        new.failure = StatusReport("failed", "CheckpointError", "The file is broken.")
        new.killed_for = "The file is broken."
        machine.die(NEW, 4)
        yield
        assert (status(api).phase, status(api).reason) == ("failed", "The file is broken.")
        assert orders(api)[-1] == DropModel(1)
        assert machine.children[0].code is None
        machine.report("api", wanted("beside"))
        yield
        assert (status(api).number, status(api).phase) == (2, "loading")
        yield from end(machine)

    assert machine.run(script()) == 0


def test_after_a_model_that_does_not_start_the_old_one_is_back() -> None:
    machine = started()

    def script() -> Iterator[None]:
        yield from up(machine)
        machine.report("api", wanted("after"))
        yield
        report(machine, 0, "released")
        yield
        yield
        api = machine.latest("api")
        machine.latest(NEW).killed_for = "It does not fit."
        machine.die(NEW, 5)
        yield
        assert (status(api).phase, status(api).reason) == ("restoring", "It does not fit.")
        assert machine.latest(RESTORED).launch.config.model.model == "old"
        assert opened(api) == [1, 2]
        machine.ready(RESTORED)
        report(machine, 2, "served")
        yield
        assert (status(api).phase, status(api).reason) == ("failed", "It does not fit.")
        yield from end(machine)

    assert machine.run(script()) == 0


def test_neither_model_starts_and_the_server_ends_with_the_cause(capsys: pytest.CaptureFixture[str]) -> None:
    machine = started()

    def script() -> Iterator[None]:
        yield from up(machine)
        machine.report("api", wanted("after"))
        yield
        report(machine, 0, "released")
        yield
        yield
        machine.die(NEW, 5)
        yield
        machine.latest(RESTORED).failure = StatusReport("failed", "CheckpointError", "The file is gone.")
        machine.die(RESTORED, 4)
        yield

    assert machine.run(script()) == 4
    assert capsys.readouterr().err.splitlines()[-1] == "quire: error: The file is gone."


def test_the_api_process_may_refuse_a_model_whose_engines_are_ready() -> None:
    machine = started()

    def script() -> Iterator[None]:
        yield from up(machine)
        machine.report("api", wanted("beside"))
        yield
        machine.ready(NEW)
        report(machine, 1, "refused", "Its tokenizer is broken.")
        yield
        assert status(machine.latest("api")).reason == "Its tokenizer is broken."
        assert machine.latest(NEW).code is not None
        assert machine.children[0].code is None
        yield from end(machine)

    assert machine.run(script()) == 0


def test_the_old_engine_is_replaced_while_its_requests_are_open() -> None:
    machine = started()

    def script() -> Iterator[None]:
        yield from up(machine)
        machine.report("api", wanted("beside"))
        yield
        machine.ready(NEW)
        report(machine, 1, "served")
        yield
        machine.die("engine")
        yield
        assert machine.latest("engine").launch.engine == EngineId(0, 1)
        assert machine.latest("engine").launch.generation == 0
        machine.die(NEW)
        yield
        assert (machine.latest(NEW).launch.engine, machine.latest(NEW).launch.generation) == (EngineId(0, 1), 1)
        yield from end(machine)

    assert machine.run(script()) == 0


@pytest.mark.parametrize("phase", ["loading", "draining"])
def test_beside_the_next_api_process_goes_on_with_the_swap(phase: str) -> None:
    machine = started()

    def script() -> Iterator[None]:
        yield from up(machine)
        machine.report("api", wanted("beside"))
        yield
        if phase == "draining":
            machine.ready(NEW)
            report(machine, 1, "served")
            yield
        machine.die("api")
        yield
        yield
        api = machine.latest("api")
        assert api.launch.number == 1
        if phase == "loading":
            assert api.launch.generation == 0
            assert opened(api) == [1]
            (order,) = orders(api)
            assert isinstance(order, OpenModel)
            assert order.launch.number == 1
            assert status(api).phase == "loading"
        else:  # whose requests were the old engine's is gone
            assert api.launch.generation == 1
            assert machine.children[0].signals == [STOP_ENGINE]
            yield
            assert status(api).phase == "done"
        yield from end(machine)

    assert machine.run(script()) == 0


@pytest.mark.parametrize("phase", ["draining", "loading"])
def test_after_the_next_api_process_lets_requests_wait(phase: str) -> None:
    machine = started()

    def script() -> Iterator[None]:
        yield from up(machine)
        machine.report("api", wanted("after"))
        yield
        if phase == "loading":
            report(machine, 0, "released")
            yield
            yield
        machine.die("api")
        yield
        yield
        api = machine.latest("api")
        if phase == "draining":
            assert (api.launch.generation, api.launch.hold_s) == (0, 0.0)
            assert orders(api) == [HoldRequests(7.0, 9.0)]
        else:
            assert (api.launch.generation, api.launch.hold_s) == (1, 9.0)
            machine.ready(NEW, "api")
            report(machine, 1, "served")
            yield
            assert status(api).phase == "done"
            machine.die("api")
            yield
            assert machine.latest("api").launch.hold_s == 0.0
        yield from end(machine)

    assert machine.run(script()) == 0


def test_one_swap_at_a_time() -> None:
    machine = started()

    def script() -> Iterator[None]:
        yield from up(machine)
        machine.report("api", wanted("beside"))
        yield
        machine.report("api", wanted("beside", "third"))
        yield
        assert status(machine.latest("api")).model == "new"
        assert len(machine.children) == 3
        yield from end(machine)

    assert machine.run(script()) == 0


@pytest.mark.parametrize("mode", ["beside", "after"])
def test_sigterm_wins(mode: SwapMode) -> None:
    machine = started()

    def script() -> Iterator[None]:
        yield from up(machine)
        machine.report("api", wanted(mode))
        yield
        machine.obedient = False
        machine.interrupt()
        yield
        api = machine.latest("api")
        assert api.signals == [signal.SIGTERM]
        count = len(machine.children)
        report(machine, 0, "released")  # said just before
        if mode == "beside":
            machine.die(NEW, 4)
        yield
        yield
        assert len(machine.children) == count, "nothing is started any more"
        assert api.code is None, "it still drains"
        machine.obedient = True
        machine.die("api", 0)
        yield

    assert machine.run(script()) == 0


def test_engines_of_gone_models_leave_nothing() -> None:
    machine = started()

    def script() -> Iterator[None]:
        yield from up(machine)
        for generation in range(1, 6):
            machine.report("api", wanted("beside", f"model {generation}"))
            yield
            machine.ready(f"engine (model {generation})")
            report(machine, generation, "served")
            report(machine, generation - 1, "released")
            yield
            yield
            assert sum(not child.closed for child in machine.children) == 2
        children = machine._supervisor._children
        assert len(children._was_ready) == len(children._watchdogs) == len(children._ready) == 2
        yield from end(machine)

    assert machine.run(script()) == 0


def test_sighup_asks_for_what_the_settings_say_by_now(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[Config | ConfigError] = [Config().with_values(model="other"), ConfigError("No YAML.")]

    def reread() -> Config:
        what = said.pop(0)
        if isinstance(what, ConfigError):
            raise what
        return what

    machine = started()
    machine._supervisor._reread = reread

    def script() -> Iterator[None]:
        machine.interrupt(signal.SIGHUP)
        yield
        yield from up(machine)
        machine.interrupt(signal.SIGHUP)
        yield
        assert orders(machine.latest("api")) == [Reload(Config().with_values(model="other"))]
        machine.interrupt(signal.SIGHUP)
        yield
        assert len(orders(machine.latest("api"))) == 1
        yield from end(machine)

    assert machine.run(script()) == 0
    printed = capsys.readouterr().err
    assert "SIGHUP: ignored, because the server is starting or ending" in printed
    assert "SIGHUP: nothing has changed: No YAML." in printed
