"""A simulated engine process: the real EngineCore and its loop, on a simulated executor and simulated sockets."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

from quire.engine.build import ModelRuntimeInfo
from quire.engine.client import _undecodable_messages, client_address, engine_address
from quire.engine.core import EngineCore
from quire.engine.flight_record import FlightRecorder
from quire.engine.port import Undecodable
from quire.engine.process import turn_until
from quire.foundation.messages.from_engine import Deltas, EngineId, FromEngine
from quire.foundation.messages.to_engine import DECODING_ERRORS, ToEngine
from quire.foundation.processes.launch import EXIT_CRASHED, STOP_ENGINE, LaunchConfig, Pulse, StatusReport
from quire.scheduling.kvcache.host_index import HostIndex
from tests.executor.fake import FakeExecutor, FakeHostMemory
from tests.executor.fake_blocks import FakeDisk
from tests.simulation.blocking import BlockingThread
from tests.simulation.executor import ExecutorFaults, PlantedDeath, PlantedFault, SimulatedExecutor
from tests.simulation.invariants import LastMessages, check_engine
from tests.simulation.model import POOLING, VOCAB_SIZE, SimulatedGrammars, pools_from_cache, sample
from tests.simulation.network import Connection
from tests.simulation.processes import SimulatedProcess
from tests.simulation.settings import Settings

TURN_S = 1e-4
"""What a turn of the loop takes beside waiting."""


class SimulatedPort:
    """The engine's Port over the simulated network: bytes, as ZmqPort has them."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self._engine = engine
        self._directory = Path(engine.launch.directory)
        self._clients: dict[int, Connection] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        self._waiting = False
        self._last_messages = LastMessages(engine.process.world)
        address = engine_address(self._directory, engine.launch.engine)
        self.inbox = engine.process.network.bind(address, self._arrived)

    def drain(self, wait: float | None) -> list[ToEngine | Undecodable]:
        engine, world = self._engine, self._engine.process.world
        engine.effect()
        engine.thread.sleep(TURN_S)
        deadline = None if wait is None else world.now() + wait
        while not self.inbox.messages:
            left = None if deadline is None else deadline - world.now()
            if left is not None and left <= 0:
                return []
            self._waiting = True
            engine.thread.wait(left)
            self._waiting = False
        messages: list[ToEngine | Undecodable] = []
        while self.inbox.messages:
            raw = self.inbox.messages.popleft()
            try:
                messages.append(self._decoder.decode(raw))
            except DECODING_ERRORS as error:
                messages += _undecodable_messages(raw, error)
        return messages

    def send(self, client: int, message: FromEngine) -> None:
        if isinstance(message, Deltas):
            self._last_messages.said(message)
        self._engine.effect()
        if client not in self._clients:
            address = client_address(self._directory, client, self._engine.launch.engine.engine)
            self._clients[client] = self._engine.process.connect(address)
        self._clients[client].send(
            self._encoder.encode(msgspec.structs.replace(message, source=self._engine.launch.engine))
        )
        self._engine.effect()

    def forget(self, client: int) -> None:
        if client in self._clients:
            self._engine.process.network.forget(self._clients.pop(client))

    def _arrived(self) -> None:
        if self._waiting:
            self._engine.thread.wake()


class SimulatedEngine:
    """What an engine process does.

    Args:
        process: As the supervisor sees it.
        launch: What it is told.
        settings: Of the run.
        start_s: How long it takes to start.
        start_fails: Whether it dies instead of becoming ready.

    Attributes:
        core: Once it is ready.
        executor: The same.
        grammars: The same.
        faults: What is to go wrong in its executor.
    """

    def __init__(
        self,
        process: SimulatedProcess,
        launch: LaunchConfig,
        settings: Settings,
        start_s: float,
        start_fails: bool,
        host_memory: FakeHostMemory | None = None,
        disk: FakeDisk | None = None,
    ) -> None:
        self._host_memory = host_memory
        self._disk = disk
        self.process = process
        self.launch = launch
        self.faults = ExecutorFaults()
        self.core: EngineCore | None = None
        self.executor: SimulatedExecutor | None = None
        self.grammars: SimulatedGrammars | None = None
        self.thread = BlockingThread(process.world, self._main)
        self._settings = settings
        self._start_s = start_s
        self._start_fails = start_fails
        self._stopping = False
        self._effects_left: int | None = None

    @property
    def id(self) -> EngineId:
        """Which engine it is."""
        return self.launch.engine

    def die_after(self, effects: int) -> None:
        """It is killed at one of its next points, in the middle of whatever it does then."""
        self._effects_left = effects

    def effect(self) -> None:
        """A point where it may be killed."""
        if self._effects_left is not None:
            self._effects_left -= 1
            if self._effects_left < 0:
                raise PlantedDeath

    # --- its duties -------------------------------------------------------------------------------------------------

    def stop_threads(self) -> None:
        self.thread.kill()
        if self.executor is not None:
            self.executor.tear()

    def hold(self) -> None:
        self.thread.hold()

    def release(self) -> None:
        self.thread.release()

    def handle_signal(self, number: signal.Signals) -> bool:
        if number == signal.SIGTERM:
            return True  # ignored
        if number == STOP_ENGINE and self.core is not None:
            self._stopping = True
            return True
        return False

    # --- what it runs -----------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            self._run()
        except PlantedDeath:
            self.process.exit(-signal.SIGKILL)
        except PlantedFault as fault:
            self.process.report(StatusReport("failed", "", str(fault)))
            self.process.exit(EXIT_CRASHED)
        except Exception:
            self.process.world.fail(f"engine {self.id} failed:\n{traceback.format_exc()}")
            self.process.exit(EXIT_CRASHED)

    def _run(self) -> None:
        """As `quire.engine.process.main`."""
        process, launch, settings = self.process, self.launch, self._settings
        port = SimulatedPort(self)
        self.thread.sleep(self._start_s)
        if self._start_fails:
            raise PlantedFault("planted at the start")
        executor = self._make_executor()
        device_limits = executor.start()
        masker = SimulatedGrammars(process.world)
        rows = launch.config.scheduler.max_num_seqs
        assert rows
        flight = FlightRecorder(Path(launch.directory), launch.engine, executor.max_in_flight, rows)
        drafts = (lambda sampling: 3) if "drafts" in settings.features else None
        index = None if self._host_memory is None else HostIndex(memoryview(self._host_memory.index), bytes(32))
        info = ModelRuntimeInfo(
            settings.groups, drafts=drafts, pooling=POOLING, pools_from_cache=pools_from_cache, host_index=index
        )
        core = EngineCore(launch.config, device_limits, info, executor, port, process.world, masker, flight)
        self.core, self.executor, self.grammars = core, executor, masker
        process.report(StatusReport("ready", startup=device_limits.startup))
        turn_until(lambda: self._stopping, _CheckedCore(core, self._check), process.world, self._report_pulse)  # type: ignore[arg-type]
        executor.close()
        process.exit(0)

    def _make_executor(self) -> SimulatedExecutor:
        settings, world = self._settings, self.process.world
        luck = world.random(f"device {self.id}")
        ready = [*sorted(luck.choices(range(settings.num_host_blocks + 1), k=30)), settings.num_host_blocks]
        fake = FakeExecutor(
            settings.num_blocks,
            settings.config.cache.block_size,
            VOCAB_SIZE,
            settings.groups,
            settings.num_host_blocks,
            sample=sample,
            accept=(lambda most: luck.randint(luck.random() < 0.9 or bool(settings.num_states), most))
            if "drafts" in settings.features
            else None,
            max_in_flight=settings.max_in_flight,
            ready_host_blocks=lambda: ready.pop(0) if len(ready) > 1 else ready[0],
            seeded=True,
            pooling=POOLING,
            pools_from_cache=pools_from_cache,
            num_states=settings.num_states,
            host_memory=self._host_memory,
            disk=self._disk,
        )
        fake.orders.delay = lambda: luck.randint(1, 4)
        return SimulatedExecutor(fake, self.thread, world, settings.token_s, self.effect, self.faults)

    def _report_pulse(self, pulse: object) -> None:
        assert isinstance(pulse, Pulse)
        self.process.report(pulse)

    def _check(self) -> None:
        assert self.core is not None
        check_engine(self.core, self.process.world, self._settings)


class _CheckedCore:
    """An EngineCore whose state is checked after every turn."""

    def __init__(self, core: EngineCore, check: Callable[[], None]) -> None:
        self._core = core
        self._check = check

    def turn(self, wait: float | None) -> None:
        self._core.turn(wait)
        self._check()

    def record_turn(self, seconds: float) -> None:
        self._core.record_turn(seconds)

    def pulse(self) -> Pulse:
        return self._core.pulse()
