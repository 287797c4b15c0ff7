"""Answers a batch's requests with the server's own endpoints, as fast as interactive requests leave room.

Knows nothing about files.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence

from starlette.types import ASGIApp, Message

from quire.foundation.config import SchedulerConfig
from quire.serving.api.request_head import TENANT
from quire.serving.api.schemas.sampling import MAX_PRIORITY
from quire.serving.api.session.session import EngineSession
from quire.serving.dialects.batches.lines import Answer, BatchLine

LOOK_AGAIN_S = 0.01
RETRY_S = 0.5
_AGAIN = (429, 503)
"""Statuses of a server that takes no work now, or has too much of it: the request is sent again later."""


class BatchCalls:
    """Sends requests while there is room for them.

    Args:
        calls: To the endpoints.
        session: Says how many sequences are open.
        scheduler: How many run at once, and whether they have priorities.
        share: Of the sequences that run at once, how much a batch may fill: interactive requests always find the rest.
            Where there are none, more than 1 keeps some waiting, so that none has to be waited for.
    """

    def __init__(
        self, calls: InProcessCalls, session: EngineSession, scheduler: SchedulerConfig, share: float = 0.5
    ) -> None:
        self._calls = calls
        self._session = session
        self._most = max(1, int((scheduler.max_num_seqs or 1) * share))
        self._has_priorities = scheduler.scheduling_policy == "priority"
        self._slots = asyncio.Semaphore(self._most)

    async def wait_for_room(self) -> None:
        """Until one more request may be sent; it takes a slot, which `answer` gives back."""
        await self._slots.acquire()
        try:
            while self._session.num_sequences >= self._most:
                await asyncio.sleep(LOOK_AGAIN_S)
        except BaseException:
            self._slots.release()
            raise

    async def answer(self, line: BatchLine, tenant: str = "") -> tuple[str, Answer]:
        """The id that a request of a tenant got, and its answer. The slot is free then."""
        try:
            body = line.body_with_priority(MAX_PRIORITY) if self._has_priorities else line.body
            request_id = f"batch-{uuid.uuid4().hex}"
            return request_id, await self._post(line.url, body, request_id, tenant)
        finally:
            self._slots.release()

    async def _post(self, url: str, body: bytes, request_id: str, tenant: str) -> Answer:
        while True:
            answer = await self._calls.post(url, body, request_id, tenant)
            if answer.status not in _AGAIN and self._session.state != "dead":
                return answer
            await asyncio.sleep(RETRY_S)


class InProcessCalls:
    """Posts JSON to an application.

    Args:
        app: The application.
        keys: Its API keys; the first one is sent along.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._headers = [(b"content-type", b"application/json")]
        if keys:
            self._headers.append((b"authorization", b"Bearer " + keys[0].encode()))

    async def post(self, path: str, body: bytes, request_id: str, tenant: str = "") -> Answer:
        """The answer to a request; when this is cancelled, so is the work for it.

        Args:
            path: Of the endpoint.
            request_id: Sent as X-Request-Id.
            tenant: Whose request it is, see Caller.
        """
        headers = [*self._headers, (b"x-request-id", request_id.encode()), (b"content-length", b"%d" % len(body))]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"", "headers": headers,
            "client": None, "server": None, "state": {TENANT: tenant},
        }  # fmt: skip
        unsent: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        status, parts = 0, list[bytes]()

        async def receive() -> Message:
            if unsent:
                return unsent.pop()
            await asyncio.Event().wait()  # this client never disconnects
            raise AssertionError

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                parts.append(message.get("body", b""))

        await self._app(scope, receive, send)
        return Answer(status, b"".join(parts))
