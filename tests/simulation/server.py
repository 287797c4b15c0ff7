"""The simulated server: the real supervisor over simulated processes, and what must hold between its processes."""

from __future__ import annotations

import itertools
import traceback
from collections import deque
from pathlib import Path

from quire.engine.client import client_address, engine_address
from quire.foundation.processes.launch import LaunchConfig
from quire.serving.supervisor.supervisor import Supervisor
from tests.executor.fake import FakeHostMemory
from tests.executor.fake_blocks import FakeDisk
from tests.simulation.api_process import Ask, SimulatedApi
from tests.simulation.blocking import BlockingThread
from tests.simulation.engine_process import SimulatedEngine
from tests.simulation.event_loop import VirtualLoop
from tests.simulation.invariants import sequences_of
from tests.simulation.judge import Judge
from tests.simulation.network import Network
from tests.simulation.processes import SimulatedProcess, SupervisorEvents, simulated_host
from tests.simulation.settings import Settings
from tests.simulation.world import World

WATCH_S = 0.25
"""How often it is looked whether there is progress."""
STALL_S = 0.7
"""How long an engine with work may bring nothing, if nothing was planted that explains it: steps take at most 0.1 s."""


class _Listener:
    """In place of the listening socket."""

    def set_inheritable(self, inheritable: bool) -> None:
        pass

    def fileno(self) -> int:
        return -1

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 8000


class Server:
    """One supervisor and its processes.

    Args:
        world: Gives the time.
        settings: Of the run.
        judge: Serves connections, and is told what explains errors.

    Attributes:
        engines, api: The present ones, engines by their numbers.
        target: The number of the engine that faults are planted in.
        exit_code: Once all is over.
        backlog: Connections that nobody has accepted.
        held: Whether some process is kept from running.
        next_start_fails: How many of the next engines die before they are ready.
        next_engine_dies_after: At which of its points the next engine dies; None: it lives.
    """

    api: SimulatedApi
    api_process: SimulatedProcess

    def __init__(self, world: World, settings: Settings, judge: Judge) -> None:
        self.world = world
        self.settings = settings
        self.network = Network(world)
        self.backlog: deque[Ask] = deque()
        self.exit_code: int | None = None
        self.held = False
        self.next_start_fails = 0
        self.next_engine_dies_after: int | None = None
        self.lives = {"engine": 0, "api": 0}
        self.engines: dict[int, SimulatedEngine] = {}
        self._host_memories: dict[int, FakeHostMemory] = {}  # by engine: it outlives them
        self._disks: dict[int, FakeDisk] = {}
        self.target = 0
        self._judge = judge
        self._rng = world.random("server")
        self._pids = itertools.count(1)
        self._processes: dict[int, SimulatedProcess] = {}
        self._loops: list[VirtualLoop] = []
        self._threads: list[BlockingThread] = []
        self._earlier_steps = 0
        self._was_up = False
        self._disturbed = world.now()
        self._busy_since: dict[int, float] = {}
        self._thread = BlockingThread(world, self._supervise)
        self.events = SupervisorEvents(world, self._thread)
        world.after(WATCH_S, self._watch)

    @property
    def is_up(self) -> bool:
        """Whether it was ready once, and is not over."""
        if not self._was_up and self.lives["api"]:
            engines = [engine.process for engine in self.engines.values()]
            self._was_up = all(process.was_ready for process in (*engines, self.api_process))
        return self._was_up and self.exit_code is None

    @property
    def steps(self) -> int:
        """Of all engines."""
        executors = [engine.executor for engine in self.engines.values()]
        return self._earlier_steps + sum(executor.steps for executor in executors if executor is not None)

    @property
    def engine(self) -> SimulatedEngine:
        """The one that faults are planted in."""
        return self.engines[self.target]

    @property
    def engine_process(self) -> SimulatedProcess:
        """The process of that one."""
        return self.engine.process

    def connect(self, ask: Ask) -> None:
        """A client connects."""
        if self.lives["api"]:
            self.api.connect(ask)
        else:
            self.backlog.append(ask)

    def hold(self, process: SimulatedProcess, seconds: float, *, stopped: bool) -> None:
        """A process gets no time for so long."""
        self.held = True
        process.hold(stopped=stopped)

        def release() -> None:
            self.held = False
            self.disturbed()
            process.release()

        self.world.after(seconds, release)

    def disturbed(self) -> None:
        """A fault was planted: progress is counted from now on."""
        self._disturbed = self.world.now()

    def jumped(self) -> None:
        """The clock has jumped. A process that stands still anyway may look worse than it is."""
        if self.held:
            for engine in self.engines.values():
                engine.process.guilty = True
            self.api_process.guilty = True

    def end(self) -> None:
        """Unwind all threads and tasks."""
        for process in self._processes.values():
            process.dead = True
        for loop in self._loops:
            loop.unwind()
        for thread in (*self._threads, self._thread):
            thread.unwind()

    # --- processes --------------------------------------------------------------------------------------------------

    def _supervise(self) -> None:
        host = simulated_host(self.world, self.network, self.events, self._state, self._start)
        try:
            supervisor = Supervisor(
                self.settings.config, _Listener(), developer_mode=False, clock=self.world, host=host  # type: ignore[arg-type]
            )  # fmt: skip
            self.exit_code = supervisor.run()
            self.world.say(f"the supervisor exits with {self.exit_code}")
        except Exception:
            self.world.fail(f"the supervisor failed:\n{traceback.format_exc()}")

    def _state(self, pid: int) -> str:
        return "T" if self._processes[pid].stopped else "S"

    def _start(self, name: str, launch: LaunchConfig) -> SimulatedProcess:
        process = SimulatedProcess(self.world, self.network, self.events, name, next(self._pids))
        self._processes[process.pid] = process
        start_s = self._rng.uniform(0.2, 2.0)
        kind = name.partition(" ")[0]
        if kind == "engine":
            self._start_engine(process, launch, start_s)
        else:
            self._start_api(process, launch, start_s)
        self.lives[kind] += 1
        self.world.say(f"{name} {process.pid} starts: {launch.engine}, client {launch.number}")
        return process

    def _start_engine(self, process: SimulatedProcess, launch: LaunchConfig, start_s: float) -> None:
        before = self.engines.get(launch.engine.engine)
        if before is not None and before.executor is not None:
            self._earlier_steps += before.executor.steps
        fails = self.next_start_fails > 0
        self.next_start_fails -= fails
        number, cache, memory = launch.engine.engine, self.settings.config.cache, None
        if cache.kv_offloading_size is not None and cache.enable_prefix_caching:
            memory = self._host_memories.setdefault(number, FakeHostMemory())
        disk = None
        if memory is not None and self.settings.num_disk_blocks:
            luck = self.world.random(f"disk {number}")
            disk = self._disks.setdefault(number, FakeDisk(
                self.settings.num_disk_blocks, full=lambda: luck.random() < 0.05, tears=lambda: luck.random() < 0.05,
            ))  # fmt: skip
        engine = self.engines[number] = SimulatedEngine(process, launch, self.settings, start_s, fails, memory, disk)
        self._threads.append(engine.thread)
        if not fails and self.next_engine_dies_after is not None:
            engine.die_after(self.next_engine_dies_after)
            self.next_engine_dies_after = None
        process.begin(engine)
        process.on_exit = self._engine_died

    def _start_api(self, process: SimulatedProcess, launch: LaunchConfig, start_s: float) -> None:
        self.api_process = process
        self.api = SimulatedApi(process, launch, start_s, self.backlog, self._judge.serve)
        self._loops.append(self.api.loop)
        self.api.on_lost = self._message_lost
        process.begin(self.api)
        process.on_exit = lambda: self._judge.cut(self.backlog)

    def _engine_died(self) -> None:
        self._judge.excuses.engine_deaths.append(self.world.now())

    def _message_lost(self) -> None:
        self._judge.excuses.errors.append(self.world.now())

    # --- what must hold ---------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        if self.exit_code is None:
            if self.lives["api"]:
                for engine in self.engines.values():
                    self._check_progress(engine)
                    self._check_agreement(engine)
            self.world.after(WATCH_S, self._watch)

    def _check_progress(self, engine: SimulatedEngine) -> None:
        """An engine with work brings something again and again: no wake-up is lost."""
        core, executor, now, number = engine.core, engine.executor, self.world.now(), engine.id.engine
        if core is None or executor is None or self.held or engine.process.dead:
            self._busy_since[number] = now
            return
        scheduler, pausing = core._scheduler, core._pausing
        if not scheduler.has_work or pausing.reached or (scheduler.only_awaiting and not scheduler.steps_in_flight):
            self._busy_since[number] = now
        busy_since = self._busy_since.setdefault(number, now)
        since = max(busy_since, self._disturbed, executor.last_result, executor.excused_until)
        if now - since > STALL_S:
            counts = core.counts()
            self.world.fail(f"engine {engine.id} has work and has brought nothing for {now - since:.2f} s: {counts}")

    def _check_agreement(self, engine: SimulatedEngine) -> None:
        """When nothing is on its way, the session and the engine have the same sequences."""
        api, number = self.api, engine.id.engine
        if engine.core is None or engine.process.dead or not api.serves or api.loop.held or not api.loop.is_idle:
            return
        directory = Path(engine.launch.directory)
        addresses = engine_address(directory, engine.id), client_address(directory, api.launch.number, number)
        quiet = all(self.network.is_quiet(address) for address in addresses)
        connection = api.session.engines[number].connection
        if not quiet or engine.core._outbox._by_client or (connection.state, connection.engine) != ("ready", engine.id):
            return
        sent = {sequence.add.id for sequence in api.session.requests.of_engine(number) if sequence.sent}
        has = sequences_of(engine.core, api.launch.number)
        if sent != has:
            self.world.fail(f"lost: {sorted(sent - has)}, unknown to the session: {sorted(has - sent)}")

    def check_idle(self) -> None:
        """With no request open, everything is free."""
        for engine in self.engines.values():
            self._check_idle_engine(engine)
        session, fail = self.api.session, self.world.fail
        groups = sum(len(stats._groups) for stats in session.stats.engines)
        left = session.num_sequences, session.engines.num_controls, groups
        if any(left):
            fail(f"an idle session holds (sequences, commands, prompts): {left}")
        limit = session.admission_limit
        if limit.sequences or limit.tokens:
            fail(f"an idle session believes in a queue: {limit.sequences} sequences, {limit.tokens} tokens")
        if session.status.health_complaint:
            fail(f"an idle server is not well: {session.status.health_complaint}")

    def _check_idle_engine(self, engine: SimulatedEngine) -> None:
        core, fail = engine.core, self.world.fail
        assert core is not None
        assert engine.grammars is not None
        counts = core.counts()
        if counts["moves"]:
            return  # blocks that nobody awaits any more are on their way
        if counts["requests"] or counts["in_flight"] or counts["free_blocks"] != counts["blocks"]:
            fail(f"an idle engine holds something: {counts}")
        if counts["free_slots"] != counts["slots"] or counts["free_host_blocks"] != counts["host_blocks"]:
            fail(f"an idle engine holds slots or host blocks: {counts}")
        if engine.grammars.num_held:
            fail("an idle engine holds grammars")
