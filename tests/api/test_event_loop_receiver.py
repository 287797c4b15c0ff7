"""The engine's messages, received in the event loop."""

from __future__ import annotations

import asyncio
import os
from collections import deque

import pytest
import uvloop

from quire.engine.client import Lost
from quire.foundation.clock import SystemClock
from quire.foundation.messages.from_engine import Dead, Deltas, EngineId, FromEngine, Heartbeat
from quire.foundation.messages.to_engine import ToEngine
from quire.serving.api.session.receivers import PIECE, EventLoopReceiver


class PipeClient:
    """A client whose descriptor is readable while it has messages."""

    number = 0
    engine = EngineId(2, 5)

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        self._said: deque[FromEngine | Exception] = deque()
        self.asked = 0

    def say(self, *messages: FromEngine | Exception) -> None:
        self._said += messages
        os.write(self._writing, b"!" * len(messages))

    def fileno(self) -> int:
        return self._reading

    def receive(self, timeout: float | None) -> FromEngine | None:
        assert timeout == 0.0, "the event loop would wait"
        self.asked += 1
        if not self._said:
            return None
        message = self._said[0]
        if isinstance(message, Exception):
            raise message  # a broken connection stays broken, and its descriptor readable
        os.read(self._reading, 1)
        return self._said.popleft()

    def send(self, message: ToEngine) -> None: ...

    def connect(self, engine: EngineId) -> None: ...

    def close(self) -> None:
        os.close(self._reading)
        os.close(self._writing)


class Conversation:
    """A receiver and what it has handed over, while the loop runs."""

    def __init__(self) -> None:
        self.client = PipeClient()
        self.heard: list[FromEngine | Lost] = []
        self.receiver = EventLoopReceiver(self.client, SystemClock(), self.on_message)
        self.failures: list[BaseException] = []
        self.raises = False

    def on_message(self, message: FromEngine | Lost) -> None:
        self.heard.append(message)
        if self.raises:
            self.raises = False
            raise ValueError("planted")

    async def __aenter__(self) -> Conversation:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self.failures.append(context["exception"]))
        self.receiver.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.receiver.close()
        self.client.close()

    async def until(self, number: int) -> None:
        async with asyncio.timeout(20):
            while len(self.heard) < number:
                await asyncio.sleep(0)


def beat(number: int) -> Heartbeat:
    return Heartbeat(float(number), 0.0, limit_s=1.0)


def test_messages_come_in_order_and_an_idle_connection_is_not_looked_at() -> None:
    async def work() -> None:
        async with Conversation() as it:
            assert it.receiver.heard_at is None
            it.client.say(*map(beat, range(7)))
            await it.until(7)
            it.client.say(beat(7))
            await it.until(8)
            assert it.heard == [beat(number) for number in range(8)]
            assert it.receiver.heard_at is not None
            await asyncio.sleep(0.02)
            asked = it.client.asked
            await asyncio.sleep(0.05)
            assert it.client.asked == asked

    uvloop.run(work())


def test_others_run_between_messages_and_between_the_pieces_of_a_large_one() -> None:
    async def work() -> None:
        async with Conversation() as it:
            ids = list(range(2 * PIECE + 3))
            seen: list[int] = []

            async def look() -> None:
                while len(it.heard) < 5:
                    seen.append(len(it.heard))
                    await asyncio.sleep(0)

            it.client.say(beat(0), beat(1), Deltas(ids, [1] * len(ids), ids))
            await asyncio.gather(look(), it.until(5))
            assert set(seen) >= {1, 2, 3, 4}
            pieces = [message for message in it.heard if isinstance(message, Deltas)]
            assert [number for piece in pieces for number in piece.ids] == ids
            assert it.heard[:2] == [beat(0), beat(1)]

    uvloop.run(work())


def test_a_connection_that_breaks_is_one_dead_engine(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with Conversation() as it:
            it.client.say(beat(0), OSError("planted"))
            await it.until(2)
            await asyncio.sleep(0.02)
            assert it.heard == [beat(0), Dead("OSError", source=EngineId(2, 5))]

    uvloop.run(work())
    assert caplog.text.count("The connection to the engine broke.") == 1


def test_a_message_that_cannot_be_handled_holds_up_no_other() -> None:
    async def work() -> None:
        async with Conversation() as it:
            it.raises = True
            it.client.say(beat(0), beat(1))
            await it.until(2)
            assert [type(failure) for failure in it.failures] == [ValueError]

    uvloop.run(work())


def test_behind_its_end_nothing_is_handed_over() -> None:
    async def work() -> None:
        async with Conversation() as it:
            it.client.say(*map(beat, range(5)))
            await it.until(1)
            await it.receiver.close()
            heard = len(it.heard)
            await asyncio.sleep(0.02)
            assert len(it.heard) == heard < 5
            await it.receiver.close()  # again

    uvloop.run(work())
