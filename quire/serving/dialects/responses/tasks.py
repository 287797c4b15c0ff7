"""What goes on without a client: responses in the background, and writing others down."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import msgspec

from quire.errors import QuireError, UnavailableError
from quire.serving.dialects.dialect import encoded_event, named_event
from quire.serving.dialects.responses.answers import ABANDONED, failed
from quire.serving.dialects.responses.service import RunningResponse
from quire.serving.store.limits import StoreFullError, UnknownIdError
from quire.serving.store.store import Store

logger = logging.getLogger(__name__)

WRITE_S = 0.1
"""Seconds between writes of events."""
ALIVE_S = 5.0
"""Seconds after which a response without events says that it is worked on."""
POLL_S = 0.05
"""Seconds between a reader's looks for more events."""
LAST_WRITES_S = 5.0
"""Seconds for tasks to end by themselves when the server ends."""


class _Event(msgspec.Struct):
    type: str


class ResponseTasks:
    """Tasks of one process. `store` is None where no responses are kept."""

    def __init__(self, store: Store | None) -> None:
        self._store = store
        self._tasks: set[asyncio.Task[None]] = set()
        self._working: dict[str, asyncio.Task[None]] = {}
        self._last_refusal = ""

    def keep(self, running: RunningResponse) -> None:
        """Begin to write down a response that has ended."""
        self._spawn(self.put(running))

    async def put(self, running: RunningResponse) -> None:
        """Write down a response that has ended. A store without room does not fail it: its client has it."""
        if self._store is None:
            return
        try:
            await self._store.responses.put(running.stored())
        except QuireError as error:
            if error.message != self._last_refusal:  # once for each reason, not for each response
                logger.warning("Response %s is not kept, nor others like it: %s", running.id, error.message)
            self._last_refusal = error.message

    def work_on(self, running: RunningResponse) -> None:
        """Finish a response that is in the store."""
        assert self._store is not None
        task = self._spawn(self._work_on(running, self._store))
        self._working[running.id] = task
        task.add_done_callback(lambda _: self._working.pop(running.id, None))

    def stop(self, response: str) -> None:
        """End the work on a response that is not wanted any more; does nothing if another process works on it."""
        if response in self._working:
            self._working[response].cancel()

    async def close(self) -> None:
        """Wait for what is nearly done, and end the rest."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LAST_WRITES_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _work_on(self, running: RunningResponse, store: Store) -> None:
        events, choices = running.events, running.choices
        events.begin()
        reading = asyncio.ensure_future(choices.read_all(lambda _, gained: events.add(gained)))
        try:
            if not await _write_while(reading, running, store):
                return
            try:
                reading.result()
                events.finish()
            except QuireError as error:
                events.fail(error.message)
            except Exception:
                logger.exception("Response %s failed in the background.", running.id)
                events.fail("Something failed inside the server.")
            while await _write(running, store) is None:
                await asyncio.sleep(WRITE_S)
        except StoreFullError as error:
            events.fail(error.message)
            await store.responses.end(running.id, "failed", msgspec.json.encode({**events.response, "output": []}))
        finally:
            reading.cancel()
            choices.close()


async def follow(store: Store, response: str, after: int) -> AsyncIterator[bytes]:
    """The events of a response in the background behind number `after`, as they are sent, to its end."""
    while True:
        try:
            found = await store.responses.events(response, after)
        except UnknownIdError:  # it was deleted meanwhile
            return
        for number, data in found.events:
            after = number
            yield encoded_event(msgspec.json.decode(data, type=_Event).type, data)
        if found.abandoned:
            yield await _abandoned(store, response, after + 1)
        if found.last:
            return
        await asyncio.sleep(POLL_S)


async def _abandoned(store: Store, response: str, number: int) -> bytes:
    """The last event of a response on which nobody works any more."""
    body = failed(msgspec.json.decode((await store.responses.get(response)).body), ABANDONED)
    kind = "response.failed"
    return named_event(kind, {"type": kind, "sequence_number": number, "response": body})


async def _write_while(reading: asyncio.Future[None], running: RunningResponse, store: Store) -> bool:
    """Write events down until the choice has ended; returns whether the response is still wanted then."""
    loop = asyncio.get_running_loop()
    written = 0.0
    while not reading.done():
        if running.events.unread or loop.time() - written > ALIVE_S:
            if await _write(running, store) is False:
                return False
            written = loop.time()
        await asyncio.wait((reading,), timeout=WRITE_S)
    return True


async def _write(running: RunningResponse, store: Store) -> bool | None:
    """Write state and next events; returns whether the response is wanted, None if nothing could be written."""
    events, body = list(running.events.unread), running.events.response
    unchanged = body["status"] == "in_progress" and not any(number == 0 for number, _, _ in events)
    encoded = None if unchanged else msgspec.json.encode(body)
    try:
        wanted = await store.responses.update(
            running.id, body["status"], encoded, [(number, data) for number, _, data in events]
        )
    except UnavailableError as error:
        logger.warning("Events of response %s wait to be written: %s", running.id, error.message)
        return None
    del running.events.unread[: len(events)]
    return wanted
