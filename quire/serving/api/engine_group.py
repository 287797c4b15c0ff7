"""The engines of a server together: their state, health and limits, and commands to all. Knows no request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from quire.foundation.messages.from_engine import Done, Ready
from quire.serving.api.engine_connection import EngineState
from quire.serving.api.engine_replica import EngineReplica


class EngineGroup:
    """All engines, by their numbers.

    Args:
        engines: Those.
    """

    def __init__(self, engines: Iterable[EngineReplica]) -> None:
        self._engines = tuple(engines)
        self._connections = [engine.connection for engine in self._engines]

    def __iter__(self) -> Iterator[EngineReplica]:
        return iter(self._engines)

    def __getitem__(self, number: int) -> EngineReplica:
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
