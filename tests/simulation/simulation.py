"""One run: a server, its clients and its faults, from the first start to the last exit."""

from __future__ import annotations

import contextlib
import io
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from unittest import mock

from quire.serving.api import request_work
from tests.simulation.faults import Faults
from tests.simulation.judge import Judge
from tests.simulation.operations import Operator
from tests.simulation.server import Server
from tests.simulation.settings import settings_of
from tests.simulation.traffic import Generator
from tests.simulation.world import SimulationError, World

PATIENCE_S = 1_000.0
"""Virtual seconds in which everything that is open must have ended, once nothing new comes."""
LONGEST_S = 50_000.0
"""Virtual seconds that the steps of a run may take, jumps of the clock included."""
IDLE_S = 5.0
"""After which an idle server must hold nothing."""
MOST_LATE_FAULTS = 10
"""How often an idle server may lose a process to a fault that was planted while it had work."""
BACK_OFF = 10
"""So much longer it takes until the next client comes when one was turned away."""
EARLY_SHARE = 0.03
"""Of the clients, how many come before the server is ready."""


@dataclass(frozen=True)
class Summary:
    """What a run was.

    Attributes:
        seed: Of the run.
        steps: Of the engines.
        seconds: Virtual, without jumps of the clock.
        tokens: That clients got.
        fingerprint: Equal for equal runs.
        outcomes: Requests by how they ended.
        faults: By kind.
        lives: Of the processes.
    """

    seed: int
    steps: int
    seconds: float
    tokens: int
    fingerprint: int
    outcomes: dict[str, int]
    faults: dict[str, int]
    lives: dict[str, int]


def simulate(seed: int, steps: int, faults: Sequence[str] | None = None, engines: int = 1) -> Summary:
    """Run one seed until its engines have done so many steps, then to the end.

    Args:
        seed: Everything follows from it.
        steps: Of the engines.
        faults: Kinds of faults, in place of those that the seed stands for.
        engines: How many the server has.

    Raises:
        SimulationError: An invariant was violated; the message says which one, what led there and how to see it again.
    """
    log = io.StringIO()
    with contextlib.redirect_stderr(log):
        run = _Run(seed, faults, engines)
        # Whether a task lets others run does not depend on how fast this machine is.
        working = mock.patch.object(request_work, "perf_counter", run.working_time)
        try:
            with working:
                return run.whole(steps)
        except SimulationError as error:
            last = "".join(log.getvalue().splitlines(keepends=True)[-10:])
            again = f"python -m tests.simulation --seed {seed} --steps {steps}"
            again += f" --engines {engines}" if engines > 1 else ""
            raise SimulationError(
                f"{error}\n\nThe last things that happened:\n{run.world.trace()}\n\nThe server's log:\n{last}\n"
                f"Seed {seed} violates an invariant: {run.world.problem.splitlines()[0]}\nAgain: {again}"
            ) from None
        finally:
            run.server.end()


class _Run:
    """A run that goes on."""

    def __init__(self, seed: int, faults: Sequence[str] | None, engines: int) -> None:
        self.world = World(seed)
        self.settings = settings_of(self.world.random("settings"))
        if faults is not None:
            self.settings = replace(self.settings, faults=faults, fault_s=1.0)
        if engines > 1:
            config = self.settings.config.with_values(data_parallel_size=engines)
            self.settings = replace(self.settings, config=config)
        self.judge = Judge(self.world, self.settings)
        self.server = Server(self.world, self.settings, self.judge)
        self.faults = Faults(self.server, self.judge.excuses)
        self.operator = Operator(self.server, self.settings, self.judge.excuses)
        self._generator = Generator(self.world, self.settings)
        self._rng = self.world.random("arrivals")
        self._closed = False
        self._worked = 0.0
        self._next_arrival()

    def whole(self, steps: int) -> Summary:
        """Until the end."""
        server, judge = self.server, self.judge
        judge.excuses.given_up = self.settings.config.server.max_restarts < 1_000
        self._until(lambda: server.steps >= steps or server.exit_code is not None, LONGEST_S)
        self._closed = True
        self.faults.stop()
        self.operator.stop()
        if self.settings.drains_early:  # an API process that dies in a drain is not replaced
            self._until(lambda: self._is_well or server.exit_code is not None, PATIENCE_S)
        else:
            self._come_to_rest()
            if server.exit_code is None:
                server.check_idle()
        judge.excuses.draining = True
        server.events.signal(signal.SIGTERM)
        self._until(lambda: server.exit_code is not None, 2 * PATIENCE_S)
        self._check_end()
        return Summary(
            self.world.seed,
            server.steps,
            self.world.lived,
            judge.tokens,
            self.world.fingerprint,
            dict(sorted(judge.outcomes.items())),
            dict(sorted(self.faults.planted.items())),
            server.lives,
        )

    def _come_to_rest(self) -> None:
        """Until nothing has happened for a while. A fault that was planted before may strike an idle engine."""
        for _ in range(MOST_LATE_FAULTS):
            self._until(lambda: self._is_settled or self.server.exit_code is not None, PATIENCE_S)
            self._until(lambda: False, IDLE_S, passes=True)
            if self._is_settled or self.server.exit_code is not None:
                return
        self.world.fail("an idle server does not come to rest")

    @property
    def _is_settled(self) -> bool:
        """Whether nothing is open, and all is well."""
        return not self.judge.open and not self.operator.paused and self._is_well

    @property
    def _is_well(self) -> bool:
        """Whether the processes are there, and none is kept from running."""
        server = self.server
        if server.held or not server.api.serves or any(each.process.dead for each in server.engines.values()):
            return False
        states = [engine["state"] for engine in server.api.session.engines.states]
        return server.api.session.state == "ready" and set(states) == {"ready"}

    def _until(self, done: object, patience: float, *, passes: bool = False) -> None:
        """Let things happen until it is done, for so many virtual seconds; longer is a violation unless it `passes`."""
        assert callable(done)
        world = self.world
        deadline = world.now() + patience
        while not done():
            if world.now() > deadline:
                if not passes:
                    world.fail(f"requests {sorted(self.judge.open)} have not ended, or the server has not")
                break
            if not world.next():
                if not passes:
                    world.fail("nothing is going to happen any more")
                break
            if world.problem:
                break
        if world.problem:
            raise SimulationError(world.problem)

    def _check_end(self) -> None:
        """Every request has ended, and the exit code says what happened."""
        server, judge, world = self.server, self.judge, self.world
        never_accepted = {ask.number for ask in server.backlog}
        if judge.open.keys() - never_accepted:
            world.fail(f"requests {sorted(judge.open.keys() - never_accepted)} never ended")
        if server.exit_code != 0 and not judge.excuses.given_up:
            world.fail(f"the server's exit code is {server.exit_code}")
        if world.problem:
            raise SimulationError(world.problem)

    def working_time(self) -> float:
        """What a task of an event loop believes to have worked for: sometimes more than it may without a pause."""
        self._worked += self._rng.choice((0.0, 0.0, 0.0, 1.0))
        return self._worked

    # --- clients ----------------------------------------------------------------------------------------------------

    def _next_arrival(self) -> None:
        patience = BACK_OFF if self.judge.turned_away else 1
        self.world.after(patience * self._rng.expovariate(1 / self.settings.arrival_s), self._arrive)

    def _arrive(self) -> None:
        if self._closed:
            return
        if not self.server.is_up and self._rng.random() > EARLY_SHARE:
            self._next_arrival()
            return
        burst = "bursts" in self.settings.features and self._rng.random() < 0.05
        for _ in range(self.settings.max_open if burst else 1):
            if len(self.judge.open) < self.settings.max_open:
                ask = self._generator.next()
                self.judge.arrived(ask)
                self.server.connect(ask)
        self._next_arrival()
