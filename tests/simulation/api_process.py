"""A simulated API process: the real EngineSession and process life, in a virtual event loop; HTTP is left out.

A connection is a coroutine, which dies with the process.
"""

from __future__ import annotations

import asyncio
import signal
import traceback
from collections import deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from quire.engine.client import EngineClient, Lost, client_address, engine_address
from quire.foundation.clock import Clock
from quire.foundation.messages.from_engine import EngineId, FromEngine
from quire.foundation.messages.to_engine import DECODING_ERRORS, ToEngine
from quire.foundation.processes.launch import EXIT_CRASHED, LaunchConfig
from quire.serving.api.session.receivers import OnMessage
from quire.serving.api.session.session import EngineSession
from quire.serving.api_server import serve_until_end
from tests.simulation.event_loop import VirtualLoop
from tests.simulation.model import END_OF_SEQUENCE
from tests.simulation.processes import SimulatedProcess

GRACE_S = 5.0
"""How long the HTTP server waits for connections when it ends."""
Ask = Any
"""What a client asks for; `Answer` knows what it is."""
Answer = Callable[[Ask, "SimulatedApi"], Coroutine[Any, Any, None]]


class SimulatedClient:
    """EngineClient over the simulated network: bytes, as ZmqClient has them."""

    def __init__(self, process: SimulatedProcess, launch: LaunchConfig, engine: EngineId) -> None:
        self._process = process
        self._directory = Path(launch.directory)
        self.number = launch.number
        self.engine = engine
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._outbox = process.connect(engine_address(self._directory, self.engine))
        self.on_arrival: Callable[[], None] = lambda: None
        address = client_address(self._directory, self.number, self.engine.engine)
        self.inbox = process.network.bind(address, lambda: self.on_arrival())

    def send(self, message: ToEngine) -> None:
        self._outbox.send(self._encoder.encode(message))

    def connect(self, engine: EngineId) -> None:
        self._process.network.forget(self._outbox)
        self.engine = engine
        self._outbox = self._process.connect(engine_address(self._directory, engine))

    def receive(self, timeout: float | None) -> FromEngine | Lost | None:
        if not self.inbox.messages:
            return None
        try:
            return self._decoder.decode(self.inbox.messages.popleft())
        except DECODING_ERRORS as error:
            return Lost(str(error))

    def close(self) -> None:
        self._outbox.close()


class SimulatedReceiver:
    """In place of the thread that receives: hands over what arrives, while the process gets time."""

    def __init__(self, client: EngineClient, clock: Clock, on_message: OnMessage) -> None:
        assert isinstance(client, SimulatedClient)
        self._client = client
        self._clock = clock
        self._on_message = on_message
        self._closed = False
        self.on_lost: Callable[[], None] = lambda: None
        self.heard_at: float | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._client.on_arrival = self.take
        self.take()

    def take(self) -> None:
        """Take what has arrived."""
        while not self._closed and not self._client._process.stopped:
            message = self._client.receive(0.0)
            if message is None:
                return
            self.heard_at = self._clock.now()
            self._loop.call_soon_threadsafe(self._hand_over, message)

    def _hand_over(self, message: FromEngine | Lost) -> None:
        if isinstance(message, Lost):
            self.on_lost()
        self._on_message(message)

    async def close(self) -> None:
        self._closed = True


class SimulatedHttp:
    """In place of uvicorn: runs what clients hand over."""

    def __init__(self, api: SimulatedApi) -> None:
        self._api = api
        self.started = self.should_exit = False
        self.tasks: set[asyncio.Task[None]] = set()

    async def serve(self, sockets: object = None) -> None:
        self.started = True
        while self._api.backlog:
            self.take(self._api.backlog.popleft())
        while not self.should_exit:
            await asyncio.sleep(0.1)
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=GRACE_S)
        for task in list(self.tasks):
            task.cancel()
        await self._api.session.close()

    def take(self, ask: Ask) -> None:
        """Somebody has connected; called in the event loop."""
        task = asyncio.get_running_loop().create_task(self._api.answer(ask, self._api))
        self.tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._api.process.dead:
            lines = "".join(traceback.format_exception(error))
            self._api.process.world.fail(f"a connection failed:\n{lines}")


class SimulatedApi:
    """What an API process does.

    Args:
        process: As the supervisor sees it.
        launch: What it is told.
        start_s: How long it takes to start.
        backlog: What nobody has accepted yet: of the listening socket, which outlives processes.
        answer: Serves one connection.

    Attributes:
        on_lost: Called when a message of the engine does not decode.
        session: Once it has started.
        loop: Its event loop.
    """

    session: EngineSession

    def __init__(
        self, process: SimulatedProcess, launch: LaunchConfig, start_s: float, backlog: deque[Ask], answer: Answer
    ) -> None:
        self.process = process
        self.launch = launch
        self.backlog = backlog
        self.answer = answer
        self.loop = VirtualLoop(process.world, f"api {launch.number}")
        self.http = SimulatedHttp(self)
        self.on_lost: Callable[[], None] = lambda: None
        self.receivers: list[SimulatedReceiver] = []
        process.world.after(start_s, lambda: self.loop.call_soon(self._begin))

    @property
    def serves(self) -> bool:
        """Whether a connection is accepted at once."""
        return self.http.started and not self.http.should_exit and not self.process.dead

    def connect(self, ask: Ask) -> None:
        """A client connects."""
        if self.serves:
            self.loop.call_soon(self.http.take, ask)
        else:
            self.backlog.append(ask)

    def _begin(self) -> None:
        """As `quire.serving.api_server.main`."""
        launch = self.launch
        self.session = EngineSession(
            [SimulatedClient(self.process, launch, engine) for engine in launch.engines],
            launch.config,
            (END_OF_SEQUENCE,),
            self.process.world,
            report=self.process.report,
            make_receiver=self._make_receiver,
        )
        self.session.stats.api_restarts = launch.restarts
        timeout = launch.config.server.shutdown_timeout
        main = serve_until_end(
            self.http, self.session, None, timeout, self.process.report, replaces=launch.restarts > 0  # type: ignore[arg-type]
        )  # fmt: skip
        self.loop.create_task(main).add_done_callback(self._ended)

    def _make_receiver(self, client: EngineClient, clock: Clock, on_message: OnMessage) -> SimulatedReceiver:
        receiver = SimulatedReceiver(client, clock, on_message)
        receiver.on_lost = self.on_lost
        self.receivers.append(receiver)
        return receiver

    def _ended(self, task: asyncio.Task[None]) -> None:
        if self.process.dead or task.cancelled():
            return
        if (error := task.exception()) is not None:
            lines = "".join(traceback.format_exception(error))
            self.process.world.fail(f"api process {self.launch.number} failed:\n{lines}")
        self.process.exit(0 if error is None else EXIT_CRASHED)

    # --- its duties -------------------------------------------------------------------------------------------------

    def stop_threads(self) -> None:
        self.loop.kill()

    def hold(self) -> None:
        self.loop.held = True

    def release(self) -> None:
        self.loop.release()
        for receiver in self.receivers:
            receiver.take()

    def handle_signal(self, number: signal.Signals) -> bool:
        return self.loop.signalled(number)
