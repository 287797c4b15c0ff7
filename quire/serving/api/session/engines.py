"""The engines as the session sees them: each one's requests, queue and statistics, and all of them together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec

from quire.engine.client import EngineClient, Lost
from quire.engine.metrics.stats import Stats
from quire.errors import GenerationError, QuireError, RequestError, RequestTimeoutError
from quire.foundation.clock import Clock
from quire.foundation.messages.from_engine import Dead, Deltas, Done, EndReason, FromEngine, Heartbeat, Ready
from quire.foundation.messages.to_engine import Add
from quire.foundation.processes.launch import Recovery, SendReport
from quire.serving.api.session.connection import EngineConnection, EngineState
from quire.serving.api.session.open_requests import OpenRequests, engine_died, replay_adds
from quire.serving.api.session.output_collector import OutputCollector
from quire.serving.api.session.queues import EngineQueue
from quire.serving.api.session.receivers import MakeReceiver
from quire.text.deltas import SequenceDelta, deltas_by_sequence

_TOO_LATE = "The request's time was over before it had any output. Send it again, with more time or later."
_BLAMED = "The engine stopped each time it worked on this request. Do not send it again; the server's log says why."


class RequestOwner(Protocol):
    """Owns the requests of all engines, and is told what becomes of each engine."""

    def on_engine_ready(self) -> None:
        """An engine takes work: it has started, or has taken the place of one that died."""

    def on_engine_died(self, engine: int, in_flight: Sequence[int]) -> None:
        """An engine died while it worked on the sequences `in_flight`, and another one is being started."""

    def on_engine_gone(self) -> None:
        """An engine is gone for good, and the server ends with it."""

    def fail_requests(self, collectors: Iterable[OutputCollector], error: QuireError, reason: EndReason) -> None:
        """Abort the sequences of requests that still run, and tell the requests' readers why."""


class Engine:
    """One engine with its connection, queue and statistics. Everything runs in the event loop.

    `report` is told how many sequences go on in an engine that takes another's place.
    """

    def __init__(
        self, client: EngineClient, slots: int, requests: OpenRequests, owner: RequestOwner, clock: Clock,
        report: SendReport, make_receiver: MakeReceiver, buckets: Mapping[str, Sequence[float]],
    ) -> None:  # fmt: skip
        self.number = client.engine.engine
        self.queue = EngineQueue(slots)
        self.stats = Stats(self.number, client.engine.epoch)
        self.stats.set_buckets(buckets)
        self.connection = EngineConnection(client, clock, self._on_said, make_receiver)
        self._clock = clock
        self._requests = requests
        self._owner = owner
        self._report = report
        self._was_ready = False

    def send(self, add: Add) -> None:
        """Send a prompt for the first time, unless some of its sequences were sent or have ended. Without an engine
        that takes it, the prompt goes to the next one."""
        if self.connection.state != "ready":
            return
        found = [self._requests.get(number) for number in (add.id, *(fork.id for fork in add.forks))]
        sequences = [sequence for sequence in found if sequence is not None and not sequence.sent]
        if len(sequences) == len(found):
            for sequence in sequences:
                sequence.mark_sent()
            self.connection.send(add)

    def _on_said(self, message: FromEngine | Lost) -> None:
        match message:
            case Ready() if self._was_ready:
                self._owner.on_engine_ready()
                self._go_on()
            case Ready():
                self._was_ready = True
                self._owner.on_engine_ready()
                self.stats.set_max_model_len(message.max_model_len)
            case Heartbeat():
                self.stats.record_heartbeat(message)
                self.queue.observe(message.load, message.last_add)
            case Deltas():
                self.stats.record_load(message.load)
                self.queue.observe(message.load, message.last_add)
                now = self._clock.now()
                for number, delta in deltas_by_sequence(message).items():
                    self._on_delta(number, delta, now)
            case Lost():
                error = GenerationError("A message of the engine was lost. Send the request again.")
                self._owner.fail_requests(self._requests.collectors(self.number), error, "error")
            case Dead(_, None):
                self._owner.on_engine_gone()
            case Dead(_, _, in_flight):
                self._on_died(in_flight)

    def _go_on(self) -> None:
        """Send all that is open to an engine that has taken another's place."""
        self.queue.restart()
        sequences = self._requests.unsent(self.number)
        for add in replay_adds(sequences):
            self.queue.expect(add)
            self.connection.send(add)
        resumed = sum(sequence.engines > 1 for sequence in sequences)
        self.stats.replayed += resumed
        self._report(Recovery(self.connection.engine, resumed))

    def _on_delta(self, number: int, delta: SequenceDelta, now: float) -> None:
        sequence = self._requests.get(number)
        if sequence is None:
            return
        collector = sequence.collector
        sequence.record(delta)
        stats = collector.stats_of(number)
        self.stats.record_tokens(stats, len(delta.tokens), now, delta.cached_tokens)
        if delta.end is not None and sequence.add.pooling is not None:
            self.stats.record_pooled(stats, delta.end)
        if delta.end is not None:  # first, because the reader may close the request when it gets the end
            stats.end = delta.end
            self._requests.remove(number)
            if delta.end.reason == "error":
                message = delta.end.message or "The engine could not go on with this request."
                collector.fail(GenerationError(message))
                return
            if delta.end.reason == "refused":
                named = f"{collector.form}: " if collector.form else ""
                collector.fail(RequestError(named + delta.end.message, param=collector.form))
                return
            if delta.end.reason == "timeout" and not any(stats.received for stats in collector.stats):
                collector.fail(RequestTimeoutError(_TOO_LATE))
                return
        collector.put(number, delta)

    def _on_died(self, in_flight: Sequence[int]) -> None:
        self._owner.on_engine_died(self.number, in_flight)
        waiting = self._requests.of_engine(self.number)
        prompts = [sequence.add for sequence in waiting if sequence.add.fork_of is None]
        queued_tokens = sum(add.queued_tokens(self.stats.load.expected_output) for add in prompts)
        self.stats.record_engine_death(self.connection.engine.epoch, len(waiting), queued_tokens)
        blamed = engine_died(self._requests, self.number, in_flight)
        if blamed is not None:
            self._owner.fail_requests([blamed], GenerationError(_BLAMED), "error")


class Engines:
    """All engines, by their numbers."""

    def __init__(self, engines: Iterable[Engine]) -> None:
        self._engines = tuple(engines)
        self._connections = [engine.connection for engine in self._engines]

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._engines)

    def __getitem__(self, number: int) -> Engine:
        return self._engines[number]

    def start(self) -> None:
        """Begin to receive; called in the event loop. More calls do nothing."""
        for connection in self._connections:
            connection.start()

    async def wait_ready(self) -> Ready:
        """Wait for each engine to be ready, and return what all can do; raises EngineDeadError if one dies."""
        for connection in self._connections:
            await connection.wait_ready()
        assert self.ready is not None
        return self.ready

    async def close(self) -> None:
        """Stop receiving and disconnect."""
        await asyncio.gather(*(connection.close() for connection in self._connections))

    @property
    def state(self) -> EngineState:
        """starting → ready ⇄ recovering → dead: ready as long as one engine is, once all have been."""
        states = [connection.state for connection in self._connections]
        if "dead" in states:
            return "dead"
        if any(connection.ready is None for connection in self._connections):
            return "starting"
        return "ready" if "ready" in states else "recovering"

    @property
    def ready(self) -> Ready | None:
        """What all engines can do, and what they hold together; None before each of them has been ready."""
        said = [connection.ready for connection in self._connections]
        known = [ready for ready in said if ready is not None]
        if len(known) < len(said):
            return None
        return msgspec.structs.replace(
            known[0],
            capacity=min(ready.capacity for ready in known),
            num_blocks=sum(ready.num_blocks for ready in known),
            kv_tokens=sum(ready.kv_tokens for ready in known),
        )

    @property
    def working(self) -> list[bool]:
        """Which engines take a request at once."""
        return [connection.state == "ready" for connection in self._connections]

    @property
    def able(self) -> list[bool]:
        """Which engines new requests may go to: those that take them at once, or all if none does."""
        working = self.working
        return working if any(working) else [True] * len(working)

    @property
    def complaint(self) -> str:
        """Why no work is done, or does not seem to be; empty if some engine is well."""
        complaints = [connection.complaint for connection in self._connections]
        if self.state == "starting":
            return next(filter(None, complaints), "")
        return complaints[0] if all(complaints) else ""

    @property
    def states(self) -> list[dict[str, str | int]]:
        """Each engine's number and state, and what is wrong with it, if anything is."""
        found: list[dict[str, str | int]] = []
        for connection in self._connections:
            reason = {"reason": connection.complaint} if connection.complaint else {}
            found.append({"engine": connection.engine.engine, "state": connection.state, **reason})
        return found

    @property
    def recovering_s(self) -> float:
        """Seconds for which there has been no engine."""
        return min(connection.recovering_s for connection in self._connections)

    @property
    def num_controls(self) -> int:
        """The number of commands that are not answered yet."""
        return sum(connection.num_controls for connection in self._connections)

    async def control(self, action: str, value: Mapping[str, str] | None = None) -> Done:
        """Send all engines a command and wait for their answers. An engine that is being replaced is paused or resumed
        when it is back. Returns the first answer with an error, or else the sums of what the engines say; raises
        UnavailableError if no engine could answer."""
        asked = [each for each in self._connections if each.state == "ready"] or self._connections[:1]
        for connection in self._connections:
            if connection not in asked:
                connection.remember(action)
        return _combined(await asyncio.gather(*(connection.control(action, value) for connection in asked)))

    def remember(self, action: str) -> None:
        """Note that another API process has paused or resumed the engines. Engines that work say so themselves."""
        for connection in self._connections:
            if connection.state != "ready":
                connection.remember(action)

    def end_pause(self) -> None:
        for connection in self._connections:
            connection.end_pause()


def _combined(answers: Sequence[Done]) -> Done:
    first = next((answer for answer in answers if answer.error), answers[0])
    if len(answers) == 1 or first.error:
        return first
    values = [answer.value for answer in answers]
    together = {
        name: example
        if isinstance(example, str)
        else all(value[name] for value in values)
        if isinstance(example, bool)
        else sum(value[name] for value in values)
        for name, example in first.value.items()
    }
    return msgspec.structs.replace(first, value=together)
