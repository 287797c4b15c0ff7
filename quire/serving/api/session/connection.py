"""The connection to one engine: its state, health and commands, and the heartbeat of this process. Knows no request."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Mapping
from typing import Literal

from quire.engine.client import EngineClient, Lost
from quire.errors import EngineDeadError, GenerationError, QuireError, UnavailableError
from quire.foundation.clock import Clock
from quire.foundation.messages.from_engine import Dead, Deltas, Done, EngineId, FromEngine, Heartbeat, Load, Ready
from quire.foundation.messages.to_engine import CLIENT_SHIFT, ClientHeartbeat, Control, PauseMode, ToEngine
from quire.serving.api.session.receivers import MakeReceiver, OnMessage, ThreadReceiver

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
SILENT_S = 5.0
"""Seconds after which an engine that was not heard is not well; it sends a heartbeat every second."""
RED_AT = 0.5
"""Share of the time after which an engine counts as stuck: a step that takes longer is one to worry about."""
RECOVERING = "The engine is being started again. Send the request again in a few seconds."
DEAD = "The engine has stopped. Send the request again later."
LOADING = "The server is still loading the model. Send the request again in a few seconds."
EngineState = Literal["starting", "ready", "recovering", "dead"]


def changes_pause(action: str) -> bool:
    """Whether a command pauses engines or lets them go on."""
    return action.startswith("pause:") or action == "resume"


class EngineConnection:
    """One engine as one API process sees it, in the event loop. It is starting → ready ⇄ recovering → dead.

    What an engine says counts until its successor is known; what it says later is dropped. `ready` is what it said when
    it was ready; None before.
    """

    def __init__(
        self,
        client: EngineClient,
        clock: Clock,
        on_said: OnMessage,
        make_receiver: MakeReceiver = ThreadReceiver,
    ) -> None:
        self.state: EngineState = "starting"
        self.ready: Ready | None = None
        self.engine: EngineId = client.engine
        self._client = client
        self._clock = clock
        self._on_said = on_said
        self._controls = PendingControls(client)
        self._beat: Heartbeat | None = None  # since the last step that brought something
        self._receiver = make_receiver(client, clock, self._on_message)
        self._died_at = 0.0
        self._pause = ""  # the command that the engine is paused by
        self._said_pause: Literal["", PauseMode] = ""  # how it is paused, as it said last
        self._ready_event = asyncio.Event()
        self._heartbeats: asyncio.Task[None] | None = None

    # --- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to receive; called in the event loop. More calls do nothing."""
        if self._heartbeats is None:
            self._receiver.start()
            self._heartbeats = asyncio.get_running_loop().create_task(self._send_heartbeats())

    async def wait_ready(self) -> Ready:
        """The engine's Ready; raises EngineDeadError if the engine died instead."""
        await self._ready_event.wait()
        if self.ready is None:
            raise EngineDeadError(DEAD)
        return self.ready

    async def close(self) -> None:
        """Stop receiving and disconnect."""
        if self._heartbeats is not None:
            self._heartbeats.cancel()
            await asyncio.wait([self._heartbeats])
        await self._receiver.close()
        self._client.close()

    # --- to the engine ----------------------------------------------------------------------------------------------

    def send(self, message: ToEngine) -> None:
        """Send a message; it is dropped when no engine takes work."""
        if self.state == "ready":
            self._client.send(message)

    async def control(self, action: str, value: Mapping[str, str] | None = None) -> Done:
        """Send a command and wait for its answer; raises UnavailableError if no engine could answer."""
        if self.state != "ready":
            raise UnavailableError({"starting": LOADING, "recovering": RECOVERING, "dead": DEAD}[self.state])
        self.remember(action)
        return await self._controls.send(action, value)

    def tell(self, action: str, value: Mapping[str, str]) -> None:
        """Send a command whose answer nobody waits for; it is dropped when no engine takes work."""
        if self.state == "ready":
            self._controls.tell(action, value)

    def remember(self, action: str) -> None:
        """Remember a command that pauses or resumes the engine, for an engine that takes its place."""
        if changes_pause(action):
            self._pause = action.removeprefix("resume")

    def end_pause(self) -> None:
        """Resume the engine if it is paused. An engine that takes its place is not paused."""
        self._pause = ""
        if self.state == "ready":
            self._controls.tell("resume")

    @property
    def num_controls(self) -> int:
        """The number of commands that are not answered yet."""
        return len(self._controls)

    @property
    def recovering_s(self) -> float:
        return self._clock.now() - self._died_at if self.state == "recovering" else 0.0

    @property
    def complaint(self) -> str:
        """Why the engine does no work, or does not seem to; empty if all is well."""
        match self.state:
            case "starting":
                return "the model is being loaded"
            case "recovering":
                return f"the engine died {self.recovering_s:.1f} s ago and is being started again"
            case "dead":
                return "the engine has stopped"
            case "ready":
                return self._health_complaint

    @property
    def _health_complaint(self) -> str:
        heard_at, beat = self._receiver.heard_at, self._beat
        if heard_at is not None and (silent := self._clock.now() - heard_at) > SILENT_S:
            return f"the engine has not been heard for {silent:.0f} s"
        if beat is not None and (stalled := beat.now - beat.last_progress) > RED_AT * beat.limit_s:
            return f"a step of the engine takes {stalled:.0f} s by now; after {beat.limit_s:.0f} s it is stuck"
        return ""

    async def _send_heartbeats(self) -> None:
        while self.state != "dead":
            self._client.send(ClientHeartbeat(self._client.number))
            await asyncio.sleep(HEARTBEAT_S)

    # --- from the engine --------------------------------------------------------------------------------------------

    def _on_message(self, message: FromEngine | Lost) -> None:
        if not isinstance(message, Lost) and message.source != self.engine:
            logger.debug("dropped a %s of engine %s", type(message).__name__, message.source)
            return
        match message:
            case Deltas():
                self._beat = None
                self._learn_pause(message.load)
                self._on_said(message)
            case Heartbeat():
                self._beat = message
                self._learn_pause(message.load)
                self._on_said(message)
            case Ready():
                self._on_ready(message)
            case Done():
                self._controls.on_done(message)
            case Dead(cause, None):
                self._on_dead(cause)
            case Dead(_, EngineId() as successor):
                self._on_replaced(message, successor)
            case Lost(reason):
                self._on_lost(message, reason)

    def _on_ready(self, ready: Ready) -> None:
        if self.state == "ready":
            return  # this process was silent for long, and is back
        self.ready = ready
        self.state = "ready"
        self._beat = None
        self._said_pause = ready.paused
        if ready.paused:  # by an API process before this one
            self._pause = f"pause:{ready.paused}"
        elif self._pause:
            self._controls.tell(self._pause)
        self._on_said(ready)
        self._ready_event.set()

    def _learn_pause(self, load: Load) -> None:
        """Notice that another API process has paused or resumed the engine."""
        if load.paused != self._said_pause:
            self._said_pause = load.paused
            self._pause = f"pause:{load.paused}" if load.paused else ""

    def _on_lost(self, message: Lost, reason: str) -> None:
        if self.ready is None:  # it may have been the Ready
            self._on_dead(reason)
            return
        self._on_said(message)
        self._controls.fail_all(GenerationError("A message of the engine was lost. Send the request again."))

    def _on_replaced(self, dead: Dead, successor: EngineId) -> None:
        if self.ready is not None:
            if self.state == "ready":
                self._died_at = self._clock.now()
            self.state = "recovering"
        self.engine = successor
        self._client.connect(successor)
        self._client.send(ClientHeartbeat(self._client.number))
        self._on_said(dead)
        self._controls.fail_all(UnavailableError(RECOVERING))

    def _on_dead(self, cause: str) -> None:
        logger.error("The engine stopped: %s", cause)
        self.state = "dead"
        self._ready_event.set()
        self._on_said(Dead(cause, source=self.engine))
        self._controls.fail_all(EngineDeadError(DEAD))


class PendingControls:
    """Commands to an engine whose answers have not come."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._ids = (client.number << CLIENT_SHIFT | i for i in itertools.count(1))
        self._waiting: dict[int, asyncio.Future[Done]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    async def send(self, action: str, value: Mapping[str, str] | None = None) -> Done:
        """Send a command and wait for its answer; raises a QuireError if there will be none."""
        number = next(self._ids)
        answer: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self._client.send(Control(number, action, dict(value or {})))
            return await answer
        finally:
            del self._waiting[number]

    def tell(self, action: str, value: Mapping[str, str] | None = None) -> None:
        """Send a command whose answer nobody waits for."""
        self._client.send(Control(next(self._ids), action, dict(value or {})))

    def on_done(self, message: Done) -> None:
        if (answer := self._waiting.get(message.id)) and not answer.done():
            answer.set_result(message)

    def fail_all(self, error: QuireError) -> None:
        """Fail all commands that wait, because their answers will not come."""
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(error)
