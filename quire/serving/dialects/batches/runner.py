"""Works on the batches in the store: checks their input, sends their requests, writes their results.

Each process has one runner, and each batch one process; after a crash another process, or the next start, goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from quire.errors import EngineDeadError, QuireError, UnavailableError
from quire.foundation.clock import Clock, SystemClock, WallClock
from quire.serving.api.session.session import EngineSession
from quire.serving.dialects.batches.requests import (
    BatchCalls,
    BatchLine,
    BatchLineError,
    error_line,
    parse_line,
    result_line,
)
from quire.serving.store.batch_rows import BatchResult, ClaimedBatch
from quire.serving.store.limits import StoreFullError
from quire.serving.store.store import Store

logger = logging.getLogger(__name__)

MAX_REQUESTS = 50_000
"""Maximum number of requests of one batch."""
MAX_ERRORS = 100
"""Maximum number of wrong lines that a failed batch names."""
LOOK_S = 5.0
"""Seconds between looks into the store for batches that other processes left."""
WRITE_S = 0.25
"""Seconds between writes of results, which also read the batch's state."""
WRITTEN_AT_ONCE = 32
"""Results that are kept together or not at all."""
PATIENCE_S = 300.0
"""Seconds for which a store that cannot be used is tried again, say because another process has locked it."""
ENVELOPE_BYTES = 2**16
"""Bytes that a line may have beside the request's body."""

T = TypeVar("T")


@dataclass
class BatchRunner:
    """Runs batches, one after the other. Batches for models that this server does not serve are left alone."""

    store: Store
    calls: BatchCalls
    session: EngineSession
    models: Sequence[str]
    max_request_bytes: int
    clock: Clock = field(default_factory=WallClock)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look for batches; called in the event loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Stop; a batch that is not done is given back."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def wake(self) -> None:
        """Look for batches now, because something about one has changed."""
        self._news.set()

    async def _run(self) -> None:
        with contextlib.suppress(EngineDeadError):
            await self.session.wait_ready()
        while True:
            self._news.clear()
            claimed = await self._claim() if self.store.exists else None
            if claimed is not None and await self._work_on(claimed):
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._news.wait()

    async def _claim(self) -> ClaimedBatch | None:
        try:
            return await self.store.batches.claim(self.models)
        except QuireError as error:
            logger.warning("Batches cannot be worked on: %s", error.message)
            return None

    async def _work_on(self, claimed: ClaimedBatch) -> bool:
        """Work on a batch; returns whether it has ended. If the store cannot be used, it is claimed again later."""
        batch = str(claimed.body["id"])
        try:
            await self._run_to_end(batch, claimed)
        except UnavailableError as error:
            logger.error("Batch %s waits for the store: %s", batch, error.message)
            return False
        except asyncio.CancelledError:
            with contextlib.suppress(QuireError):
                await self.store.batches.release(batch)
            raise
        return True

    async def _run_to_end(self, batch: str, claimed: ClaimedBatch) -> None:
        try:
            await BatchRun(self.store, self.calls, claimed, self.max_request_bytes + ENVELOPE_BYTES, self.clock).run()
        except UnavailableError:
            raise
        except Exception as error:
            logger.exception("Batch %s failed.", batch)
            message = error.message if isinstance(error, QuireError) else "Something failed inside the server."
            problems = [_problem("server_error", message)]
            await patiently(lambda: self.store.batches.fail(batch, problems), f"The end of batch {batch}")


@dataclass
class BatchRun:
    """One batch, which is this process's, from where it is to its end."""

    store: Store
    calls: BatchCalls
    claimed: ClaimedBatch
    max_line_bytes: int
    clock: Clock
    _results: list[BatchResult] = field(default_factory=list)
    _cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def _body(self) -> dict[str, Any]:
        return self.claimed.body

    @property
    def _id(self) -> str:
        return str(self._body["id"])

    async def run(self) -> None:
        """Work on the batch until it has ended."""
        status = self._body["status"]
        if status == "validating" and not await self._check_input():
            return
        ends_as = self.claimed.ends_as or "cancelled"
        if status in ("validating", "in_progress"):
            ends_as = await self._send_all()
        await self._patiently(lambda: self.store.batches.finish(self._id, ends_as))

    async def _check_input(self) -> bool:
        """Check the input; returns whether all of it is requests. Else the batch has failed."""
        errors, names, total = list[dict[str, Any]](), set[str](), 0
        async for number, found in self._lines(lambda number: True):
            total += 1
            if isinstance(found, BatchLine) and found.custom_id in names:
                message = f"custom_id '{found.custom_id}' is there twice."
                found = BatchLineError("duplicate_custom_id", message, "custom_id")
            if isinstance(found, BatchLine):
                names.add(found.custom_id)
            else:
                errors.append(_problem(found.code, found.message, found.param, number + 1))
            if total > MAX_REQUESTS:
                errors = [_problem("too_many_requests", f"A batch may have at most {MAX_REQUESTS} requests.")]
            if total > MAX_REQUESTS or len(errors) >= MAX_ERRORS:
                break
        if not total:
            errors = [_problem("empty_file", "The input file has no requests.")]
        if errors:
            await self._patiently(lambda: self.store.batches.fail(self._id, errors))
            return False
        await self._patiently(lambda: self.store.batches.begin(self._id, total))
        return True

    async def _send_all(self) -> str:
        """Send what has no result yet; returns the state in which the batch ends."""
        done = await self._patiently(lambda: self.store.batches.lines_done(self._id))
        sending, status = set[asyncio.Task[None]](), "completed"
        writing = asyncio.create_task(self._keep_writing())
        try:
            async for number, line in self._lines(lambda number: number not in done):
                if isinstance(line, BatchLineError):
                    raise QuireError(f"Line {number + 1} of the input: {line.message}")
                if self.clock.now() >= self._body["expires_at"]:
                    status = "expired"
                    text = error_line(line.custom_id, "batch_expired", "The batch's time was over before.")
                    self._results.append(BatchResult(number, False, text))
                    continue
                if await self._or_cancelled(self.calls.wait_for_room()):
                    break
                task = asyncio.create_task(self._send(number, line))
                sending.add(task)
                task.add_done_callback(sending.discard)
            if sending:
                await self._or_cancelled(asyncio.wait(tuple(sending)))
        except BaseException:  # what is not written is asked again
            with contextlib.suppress(QuireError):
                await self._stop(writing, *sending)
                await self._write()
            raise
        await self._stop(writing, *sending)
        await self._patiently(self._write)
        return "cancelled" if self._cancelled.is_set() else status

    async def _stop(self, *tasks: asyncio.Task[None]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _or_cancelled(self, work: Coroutine[Any, Any, Any]) -> bool:
        """Wait for something; returns whether the batch was cancelled instead."""
        working, cancelled = asyncio.ensure_future(work), asyncio.ensure_future(self._cancelled.wait())
        try:
            await asyncio.wait((working, cancelled), return_when=asyncio.FIRST_COMPLETED)
            return not working.done()
        finally:
            cancelled.cancel()
            working.cancel()
            await asyncio.gather(working, cancelled, return_exceptions=True)

    async def _send(self, number: int, line: BatchLine) -> None:
        request_id, answer = await self.calls.answer(line, self.claimed.tenant)
        text = result_line(line.custom_id, request_id, answer)
        self._results.append(BatchResult(number, answer.status == 200, text))

    async def _keep_writing(self) -> None:
        """Write until the batch is cancelled, or the store is full, which the last `_write` will say."""
        status = "in_progress"
        while status != "cancelling":
            await asyncio.sleep(WRITE_S)
            try:
                status = await self._write()
            except UnavailableError as error:
                logger.warning("Results of batch %s wait to be written: %s", self._id, error.message)
            except StoreFullError:
                break
        self._cancelled.set()

    async def _write(self) -> str:
        """Write results down, some at a time so that a full store has the first. Returns the batch's state."""
        while True:
            results = self._results[:WRITTEN_AT_ONCE]
            status = await self.store.batches.record(self._id, results)
            del self._results[: len(results)]
            if not self._results:
                return status

    async def _lines(self, wanted: Callable[[int], bool]) -> AsyncIterator[tuple[int, BatchLine | BatchLineError]]:
        """The wanted lines by number, each a request or what is wrong with it. They are parsed in a thread."""
        read = self.store.files.lines(self._body["input_file_id"], self.max_line_bytes)
        async for some in read:
            for number, found in await asyncio.to_thread(self._parse, [line for line in some if wanted(line[0])]):
                yield number, found

    def _parse(self, lines: list[tuple[int, bytes]]) -> list[tuple[int, BatchLine | BatchLineError]]:
        found: list[tuple[int, BatchLine | BatchLineError]] = []
        for number, raw in lines:
            try:
                found.append((number, parse_line(raw, (self._body["endpoint"],), self.max_line_bytes)))
            except BatchLineError as error:
                found.append((number, error))
        return found

    async def _patiently(self, work: Callable[[], Awaitable[T]]) -> T:
        return await patiently(work, f"Batch {self._id}")


async def patiently(work: Callable[[], Awaitable[T]], what: str) -> T:
    """Do something in the store, and do it again while it cannot be used; raises UnavailableError after PATIENCE_S."""
    clock = SystemClock()
    deadline = clock.now() + PATIENCE_S
    while True:
        try:
            return await work()
        except UnavailableError as error:
            if clock.now() >= deadline:
                raise
            logger.warning("%s waits for the store: %s", what, error.message)
            await asyncio.sleep(WRITE_S)


def _problem(code: str, message: str, param: str | None = None, line: int | None = None) -> dict[str, Any]:
    return {"code": code, "message": message, "param": param, "line": line}
