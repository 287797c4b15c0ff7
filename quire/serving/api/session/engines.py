"""The engines as the session sees them: each one's requests, queue and statistics, and all of them together.

An `Engine` owns what one engine is sent and how what it says reaches readers; what concerns more than one is the
session's (`RequestOwner`). `Engines` has their common state, health and limits, and commands to all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec

from quire.engine.client import EngineClient, Lost
from quire.engine.metrics.stats import Stats
from quire.errors import GenerationError, QuireError, RequestError, RequestTimeoutError
from quire.foundation.clock import Clock
from quire.foundation.messages.from_engine import Deltas, Done, EndReason, Heartbeat, Ready
from quire.foundation.messages.to_engine import Add
from quire.foundation.processes.launch import Recovery, SendReport
from quire.serving.api.session.connection import EngineConnection, EngineState
from quire.serving.api.session.open_requests import OpenRequests, OutputCollector, engine_died, replay_adds
from quire.serving.api.session.queues import EngineQueue
from quire.serving.api.session.receivers import MakeReceiver
from quire.text.deltas import SequenceDelta, deltas_by_sequence

_TOO_LATE = "The request's time was over before it had any output. Send it again, with more time or later."
_BLAMED = "The engine stopped each time it worked on this request. Do not send it again; the server's log says why."


class RequestOwner(Protocol):
    """Owns the requests that an engine works on, and is told what becomes of the engine."""

    def on_engine_ready(self) -> None:
        """An engine takes work: it has started, or has taken the place of one that died."""
        ...

    def on_engine_died(self, engine: int, in_flight: Sequence[int]) -> None:
        """An engine died while it worked on the sequences `in_flight`, and another one is being started."""
        ...

    def on_engine_gone(self) -> None:
        """An engine is gone for good, and the server ends with it."""
        ...

    def close_request(self, collector: OutputCollector, reason: EndReason) -> None:
        """Abort the sequences of a request that still run, on whichever engine."""
        ...

    def fail_requests(self, collectors: Iterable[OutputCollector], error: QuireError, reason: EndReason) -> None:
        """Abort the sequences of requests that still run, and tell the requests' readers why."""
        ...


class Engine:
    """One engine with its connection, queue and statistics. Everything runs in the event loop.

    Args:
        client: The way to the engine.
        slots: Sequences that it runs at once.
        requests: The open requests of all engines.
        owner: Owns these requests.
        clock: For all times.
        report: Is told how many sequences go on in an engine that takes another's place.
        make_receiver: What receives the engine's messages.

    Attributes:
        number: The engine's number.
        connection: The connection to the engine.
        queue, stats: The engine's queue and statistics.
    """

    def __init__(
        self, client: EngineClient, slots: int, requests: OpenRequests, owner: RequestOwner, clock: Clock,
        report: SendReport, make_receiver: MakeReceiver,
    ) -> None:  # fmt: skip
        self.number = client.engine.engine
        self.queue = EngineQueue(slots)
        self.stats = Stats(self.number, client.engine.epoch)
        self.connection = EngineConnection(client, clock, self, make_receiver)
        self._requests = requests
        self._owner = owner
        self._report = report
        self._was_ready = False

    def send(self, add: Add) -> None:
        """Send a prompt for the first time, unless the engine knows it already or some of its sequences have ended; if
        there is no engine that takes it, it goes to the next one."""
        if self.connection.state != "ready":
            return
        found = [self._requests.get(number) for number in (add.id, *(fork.id for fork in add.forks))]
        sequences = [sequence for sequence in found if sequence is not None and not sequence.sent]
        if len(sequences) == len(found):
            for sequence in sequences:
                sequence.mark_sent()
            self.connection.send(add)

    # --- what it says -----------------------------------------------------------------------------------------------

    def on_ready(self, ready: Ready) -> None:
        self._owner.on_engine_ready()
        if self._was_ready:
            self._go_on()
        else:
            self._was_ready = True
            self.stats.set_max_model_len(ready.max_model_len)

    def _go_on(self) -> None:
        """Send an engine that has taken another's place all that is open."""
        self.queue.restart()
        sequences = self._requests.unsent(self.number)
        for add in replay_adds(sequences):
            self.queue.expect(add)
            self.connection.send(add)
        resumed = sum(sequence.engines > 1 for sequence in sequences)
        self.stats.replayed += resumed
        self._report(Recovery(self.connection.engine, resumed))

    def on_heartbeat(self, beat: Heartbeat) -> None:
        self.stats.record_heartbeat(beat)
        self.queue.observe(beat.load, beat.last_add)

    def on_deltas(self, deltas: Deltas, now: float) -> None:
        self.stats.record_load(deltas.load)
        self.queue.observe(deltas.load, deltas.last_add)
        for number, delta in deltas_by_sequence(deltas).items():
            self._on_delta(number, delta, now)

    def _on_delta(self, number: int, delta: SequenceDelta, now: float) -> None:
        sequence = self._requests.get(number)
        if sequence is None:
            return
        collector = sequence.collector
        sequence.record(delta)
        stats = collector.stats_of(number)
        self.stats.record_tokens(stats, len(delta.tokens), now, delta.cached_tokens)
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

    def on_lost(self, message: Lost) -> None:
        error = GenerationError("A message of the engine was lost. Send the request again.")
        self._owner.fail_requests(self._requests.collectors(self.number), error, "error")

    def on_engine_died(self, in_flight: Sequence[int]) -> None:
        self._owner.on_engine_died(self.number, in_flight)
        waiting = self._requests.of_engine(self.number)
        prompts = [sequence.add for sequence in waiting if sequence.add.fork_of is None]
        queued_tokens = sum(add.queued_tokens(self.stats.load.expected_output) for add in prompts)
        self.stats.record_engine_death(self.connection.engine.epoch, len(waiting), queued_tokens)
        blamed = engine_died(self._requests, self.number, in_flight)
        if blamed is not None:
            self._owner.fail_requests([blamed], GenerationError(_BLAMED), "error")

    def on_dead(self) -> None:
        self._owner.on_engine_gone()


class Engines:
    """All engines, by their numbers.

    Args:
        engines: Each, in this order.
    """

    def __init__(self, engines: Iterable[Engine]) -> None:
        self._engines = tuple(engines)
        self._connections = [engine.connection for engine in self._engines]

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._engines)

    def __getitem__(self, number: int) -> Engine:
        return self._engines[number]

    # --- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to receive; called in the event loop. More calls do nothing."""
        for connection in self._connections:
            connection.start()

    async def wait_ready(self) -> Ready:
        """What all engines can do, once each has been ready.

        Raises:
            EngineDeadError: One died instead.
        """
        for connection in self._connections:
            await connection.wait_ready()
        assert self.ready is not None
        return self.ready

    async def close(self) -> None:
        """Stop receiving and disconnect."""
        await asyncio.gather(*(connection.close() for connection in self._connections))

    # --- state ------------------------------------------------------------------------------------------------------

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
        """What each engine said when it was ready: what all of them can do, and what they hold together. None before
        all have been."""
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
        """Which engines new requests may go to: those that take them at once, or else all."""
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
        """For how long there has been no engine, in seconds."""
        return min(connection.recovering_s for connection in self._connections)

    @property
    def num_controls(self) -> int:
        """Commands without an answer."""
        return sum(connection.num_controls for connection in self._connections)

    # --- commands ---------------------------------------------------------------------------------------------------

    async def control(self, action: str, value: Mapping[str, str] | None = None) -> Done:
        """Send all engines a command and wait for their answers; one that is being replaced is paused or resumed when
        it is back. Returns the first error if there is one, else the sums of what they say.

        Raises:
            UnavailableError: There is no engine that could answer.
        """
        asked = [each for each in self._connections if each.state == "ready"] or self._connections[:1]
        for connection in self._connections:
            if connection not in asked:
                connection.remember(action)
        return _combined(await asyncio.gather(*(connection.control(action, value) for connection in asked)))

    def remember(self, action: str) -> None:
        """Another API process has paused or resumed the engines. Those that work say so; the others are not there to
        do it."""
        for connection in self._connections:
            if connection.state != "ready":
                connection.remember(action)

    def end_pause(self) -> None:
        """Go on where engines are paused."""
        for connection in self._connections:
            connection.end_pause()


def _combined(answers: Sequence[Done]) -> Done:
    """One answer of several engines to one command."""
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
