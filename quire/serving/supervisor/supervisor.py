"""The supervisor: starts engines and API processes, announces when they are ready, replaces those that die or hang,
drains, and exits with a code.

Its states are starting → ready → draining. A process that dies before it was ever ready ends the server, and so do too
many deaths; the last line printed names the process and the cause.
"""

from __future__ import annotations

import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path

from quire.errors import SETUP_ERRORS, ConfigError, SetupError
from quire.foundation.clock import Clock, SystemClock
from quire.foundation.config import Config
from quire.foundation.processes.child_process import Child
from quire.foundation.processes.launch import (
    EXIT_CRASHED,
    STOP_ENGINE,
    LaunchConfig,
    ModelReport,
    Pulse,
    Recovery,
    Report,
    StatusReport,
    SwapRequest,
)
from quire.foundation.processes.orders import Reload
from quire.serving.supervisor.announce import announce_ready, print_error, print_log
from quire.serving.supervisor.children import MODULES, Children, Modules
from quire.serving.supervisor.lives import ModelEngines
from quire.serving.supervisor.model_swap import ModelSwap
from quire.serving.supervisor.process_host import RELOAD, THIS_MACHINE, Died, Event, ProcessHost, Reported, Signalled
from quire.serving.supervisor.watchdog import TICK_S, WINDOW_S, RestartLimit

STOP_TIMEOUT_S = 5.0
"""Seconds, beyond the drain, that a process may take to end after it was told to."""
SIGNAL_WAIT_S = 0.5
"""Seconds to wait for a signal: a process that ends in order may have got one that was sent to all at once."""


class State(Enum):
    """What the processes are doing together."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class Supervisor:
    """Runs engines and API processes until told to stop, or until one of them cannot be replaced. The listener is
    listening, and API processes inherit it. `asked` are the settings as they were asked for, None if they are `config`,
    and `reread` reads them again. In developer mode, debug routes are served."""

    def __init__(
        self,
        config: Config,
        listener: socket.socket,
        developer_mode: bool,
        modules: Modules = MODULES,
        clock: Clock | None = None,
        host: ProcessHost = THIS_MACHINE,
        asked: Config | None = None,
        reread: Callable[[], Config] | None = None,
    ) -> None:
        self._config = config
        self._asked = asked
        self._reread = reread
        self._listener = listener
        self._developer_mode = developer_mode
        self._modules = modules
        self._clock = clock or SystemClock()
        self._state = State.STARTING
        self._started = self._clock.now()
        self._exit_code: int | None = None
        self._drain_ends = float("inf")
        self._last_line = ""
        self._unclean = ""  # what was wrong with the end of an API process in a drain
        self._host = host
        self._events = host.events()  # receives signals from here on
        self._limit = RestartLimit(config.server.max_restarts, self._clock)
        self._startup: dict[str, float] = {}
        self._kv_tokens, self._pools = 0, ""

    def run(self) -> int:
        """Run until the end. Returns the exit code: 0 after a drain, a failed start's, or 70 if processes died."""
        directory = Path(tempfile.mkdtemp(prefix="quire-"))  # readable by its owner only
        self._listener.set_inheritable(True)
        launch = LaunchConfig(
            self._config,
            str(directory),
            listen_fd=self._listener.fileno(),
            developer_mode=self._developer_mode,
            asked=self._asked,
        )
        self._children = Children(launch, self._modules, self._clock, self._host)
        self._swap = ModelSwap(self._children, self._events.forget, self._clock)
        try:
            for child in self._children:
                self._events.watch(child)
            while self._exit_code is None:
                for event in self._events.wait(TICK_S):
                    if self._exit_code is None:
                        self._handle(event)
                if self._exit_code is None:
                    self._tick()
        finally:
            self._children.close()
            self._events.close()
            shutil.rmtree(directory, ignore_errors=True)
            if self._exit_code:
                print_error(" ".join(self._last_line.split()))
        return self._exit_code

    def _handle(self, event: Event) -> None:
        match event:
            case Signalled(number) if number == RELOAD:
                self._reload()
            case Signalled(number) if self._state is State.DRAINING:
                self._end(128 + number, f"stopped at once by {signal.Signals(number).name}")
            case Signalled(number):
                self._drain(number)
            case Reported(child, report) if child in set(self._children):
                self._reported(child, report)
            case Died(child) if (api := self._children.apis.place_of(child)) is not None:
                self._api_died(child, api)
            case Died(child) if (place := self._children.place_of(child)) is not None:
                model, number = place
                if not self._swap.engine_died(child, model):
                    self._engine_died(child, model, number)

    def _tick(self) -> None:
        """Do what is due, whether or not something happened."""
        for child, why in self._children.stuck() if self._limit.most else ():
            print_log(f"{child.name} process {child.pid} is ended: {why}")
            child.kill(why)
        if self._clock.now() > self._drain_ends:
            names = [api.name for api in self._children.apis.children if api.exit_code() is None]
            self._end(EXIT_CRASHED, f"{' and '.join(names)} process did not end cleanly: it had to be killed")
        self._children.start_due()
        self._swap.tick()
        for child in self._children.take_started():
            self._events.watch(child)
            if self._children.apis.place_of(child) is not None:
                self._swap.api_started()

    def _reload(self) -> None:
        """Serve the settings as they are by now. API processes do the rest, and may refuse."""
        if why := self._config.server.keeps_model:
            print_log(f"SIGHUP: nothing has changed: {why}")
            return
        if self._state is not State.READY or self._reread is None or self._children.awaits_api:
            print_log("SIGHUP: ignored, because the server is starting or ending")
            return
        try:
            asked = self._reread()
        except ConfigError as error:
            print_log(f"SIGHUP: nothing has changed: {error.message}")
            return
        self._children.tell(Reload(asked))

    def _reported(self, child: Child, report: Report) -> None:
        match report:
            case Pulse():
                self._children.heard(child, report)
            case StatusReport("ready"):
                self._child_is_ready(child, report)
            case Recovery():
                self._engine_recovered(report)
            case SwapRequest():
                self._swap.begin(report)
            case ModelReport():
                self._swap.reported(report)

    def _engine_recovered(self, report: Recovery) -> None:
        died_at = self._children.died_at(report.generation, report.engine.engine)
        if report.sequences and died_at is not None:
            took = self._clock.now() - died_at
            print_log(f"recovered in {took:.1f} s: {report.sequences} open sequences go on")

    def _child_is_ready(self, child: Child, report: StatusReport) -> None:
        self._children.ready(child)
        if self._children.apis.place_of(child) is not None:
            self._kv_tokens, self._pools = report.kv_tokens, report.pools
        elif sum(report.startup.values()) > sum(self._startup.values()):
            self._startup = report.startup  # the slowest engine's
        if self._state is State.STARTING and self._children.all_ready:
            self._state = State.READY
            took = self._clock.now() - self._started
            announce_ready(self._config, self._listener, took, self._startup, self._kv_tokens, self._pools)

    # --- deaths -----------------------------------------------------------------------------------------------------

    def _engine_died(self, engine: Child, model: ModelEngines, number: int) -> None:
        cause = engine.cause_of_death()
        if not self._children.was_ready(engine.name):
            if engine.exit_code() == -signal.SIGTERM:
                self._told_to_stop()
            self._start_failed(engine)
            return
        number = model.at_fault(number)
        in_flight = model.in_flight(number)
        again = not model.last_in_flight[number].isdisjoint(in_flight)
        if self._limit.allow(again=again, failed_starts=self._children.failed_starts(engine)):
            partners = self._children.partners(model, number)
            self._say_replaced(engine.name, cause, again=again, shared=bool(partners))
            self._end_group(model, [number, *partners])
            self._children.replace_engine(model, number, cause, in_flight)
            for partner in partners:  # their requests have done nothing wrong
                self._children.replace_engine(model, partner, f"{engine.name} process died: {cause}", [])
            return
        self._children.give_up_engine(model, number, cause)
        self._wait_for_apis()
        self._end(
            EXIT_CRASHED, f"{engine.name} process died: {cause}. Requests in flight got an error; {self._gave_up()}"
        )

    def _end_group(self, model: ModelEngines, numbers: Sequence[int]) -> None:
        """End these engines of a model: one is dead, and the others cannot go on without it."""
        for engine in (model.children[number] for number in numbers):
            self._events.forget(engine)
            engine.kill()
            engine.cause_of_death()
        model.renew_group()

    def _api_died(self, api: Child, place: int) -> None:
        if self._state is State.DRAINING:
            self._api_drained(api)
            return
        cause = api.cause_of_death()
        if api.exit_code() in (0, -signal.SIGTERM) and self._told_to_stop():
            if self._exit_code is None:
                self._api_drained(api)
            return
        if not self._children.was_ready(api.name):
            self._start_failed(api)
            return
        if self._limit.allow():
            self._say_replaced(api.name, cause)
            self._children.replace_api(place)
            return
        self._end(EXIT_CRASHED, f"{api.name} process died: {cause}. Open connections were cut; {self._gave_up()}")

    def _say_replaced(self, name: str, cause: str, *, again: bool = False, shared: bool = False) -> None:
        what = "all that divide experts with it are started again" if shared else "it is started again"
        why = "looking for the request that does it" if again else f"{self._limit.used} of {self._limit.most}"
        print_log(f"{name} process died: {cause}; {what} ({why})")

    def _gave_up(self) -> str:
        if not self._limit.most:
            return "start the server again."
        return (
            f"that was one more than the {self._limit.most} restarts that --max-restarts allows within "
            f"{WINDOW_S / 60:.0f} minutes; start the server again."
        )

    def _start_failed(self, child: Child) -> None:
        """End the server, because a process died before it was ever ready. Its last report is the whole story."""
        failure = child.failure
        if self._exit_code is not None:
            return
        if self._state is State.DRAINING:
            self._end(0, "")
        elif failure is None:
            self._end(EXIT_CRASHED, f"{child.name} process died: {child.cause_of_death()}. Start the server again.")
        else:
            error = SETUP_ERRORS.get(failure.error, SetupError)
            self._end(error.exit_code if failure.error else EXIT_CRASHED, failure.message)

    def _end(self, code: int, last_line: str) -> None:
        self._exit_code, self._last_line = code, last_line

    # --- the end ----------------------------------------------------------------------------------------------------

    def _told_to_stop(self) -> bool:
        """Wait for a signal to all processes at once, from which a child may have died already. The drain begins with
        it. Returns whether it came."""
        deadline = self._clock.now() + SIGNAL_WAIT_S
        while self._state is not State.DRAINING and (left := deadline - self._clock.now()) > 0:
            for event in self._events.wait(left):
                if self._exit_code is None:
                    self._handle(event)
            if self._exit_code is not None:
                break
        return self._state is State.DRAINING

    def _drain(self, number: int) -> None:
        """Refuse new requests, and let open ones finish within their time. A second signal ends everything at once."""
        self._state = State.DRAINING
        self._swap.stop()
        delay, timeout = self._config.server.shutdown_delay, self._config.server.shutdown_timeout
        taken = f"new requests are taken for {delay:g} s, then " if delay else ""
        print_log(
            f"{signal.Signals(number).name}: {taken}open requests get {timeout:g} s to finish; a second signal ends all"
        )
        self._drain_ends = self._clock.now() + delay + timeout + STOP_TIMEOUT_S
        serving = self._children.present_apis
        self._children.start_no_api()
        if not serving:
            self._stop_engines()  # no request is open, and none can come
        for api in serving:
            api.signal(signal.SIGTERM)

    def _api_drained(self, api: Child) -> None:
        """Note that an API process has ended. When all have, the engines may end."""
        stopped_early = not self._children.is_ready(api) and api.exit_code() == -signal.SIGTERM
        if api.exit_code() != 0 and not stopped_early:
            self._unclean = f"{api.name} process did not end cleanly: {api.cause_of_death()}"
        if not self._children.apis.all_gone:
            return
        if self._unclean:
            self._end(EXIT_CRASHED, self._unclean)
        else:
            self._stop_engines()

    def _stop_engines(self) -> None:
        """End the engines, which are the last processes, and with them the server."""
        engines = [engine for engine in self._children.engines if self._children.is_ready(engine)]
        for engine in engines:
            engine.signal(STOP_ENGINE)
        deadline = self._clock.now() + STOP_TIMEOUT_S
        for engine in engines:
            again = self._wait_for(engine, deadline)
            if again is not None:
                self._end(128 + again, f"stopped at once by {signal.Signals(again).name}")
                return
            if engine.exit_code() != 0:
                how = "it had to be killed" if engine.exit_code() is None else engine.cause_of_death()
                print_log(f"{engine.name} process did not end cleanly: {how}")
        print_log("stopped")
        self._end(0, "")

    def _wait_for_apis(self) -> None:
        """Wait until the API processes have told their clients that all is over, and have ended by themselves."""
        deadline = self._clock.now() + STOP_TIMEOUT_S
        for api in self._children.apis.children:
            self._wait_for(api, deadline)

    def _wait_for(self, child: Child, deadline: float) -> int | None:
        """Wait until the child is gone, time is up, or a signal comes, which is returned."""
        while child.exit_code() is None and (left := deadline - self._clock.now()) > 0:
            for event in self._events.wait(left):
                if isinstance(event, Signalled) and event.number != RELOAD:
                    return event.number
        return None
