"""The API process's side: hands what is large to reader processes, and bounds how much of it there is.

Owns the processes: the first large piece starts one, one that dies or takes too long is replaced, and its piece is
refused. Knows nothing about HTTP.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pydantic import BaseModel

from quire.errors import OverloadedError, RequestError, UnavailableError
from quire.foundation.config import Config
from quire.foundation.processes.helper_process import ChannelClosed, HelperProcess
from quire.serving.api.large_requests.tasks import (
    Answer,
    CheckBody,
    Decode,
    Encode,
    Render,
    Setup,
    Task,
    TruncationSide,
    pack,
    unpack,
)
from quire.serving.api.schemas.known_fields import FieldLists

HUGE = 2**20
"""Pieces of more bytes go through one process, one after the other: each takes seconds, and a hundred times its size of
memory. Others do not wait for them."""
MAX_READERS = 4
"""Processes for pieces that are not huge; a quarter of the cores if that is less."""
MAX_WAITING_BYTES = 256 * 2**20
"""Of pieces that are being read or wait for it, but for the first."""
WORK_SECONDS = 60.0
"""After so long a piece is given up."""
_MODULE = "quire.serving.api.large_requests.reader_process"
_START_SECONDS = 60.0
_RETRY_S = 5
_TOO_COSTLY = "The request could not be read within the time and memory for it: make it smaller."

_Reader = HelperProcess[Setup | Task, Answer]


class LargeRequestReaders:
    """Reads what is large, in processes of low priority. Called in the event loop.

    Args:
        config: Resolved settings.
    """

    def __init__(self, config: Config) -> None:
        self._setup = Setup(config)
        readers = max(1, min(MAX_READERS, (os.cpu_count() or 1) // 4))
        self._threads = ThreadPoolExecutor(readers, thread_name_prefix="large-requests")
        self._huge = ThreadPoolExecutor(1, thread_name_prefix="huge-requests")
        self._idle: list[_Reader] = []
        self._lock = threading.Lock()
        self._waiting_bytes = 0
        self._closed = False

    def close(self) -> None:
        """Refuse further requests, and end the processes that read."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for threads in (self._threads, self._huge):
            threads.shutdown(wait=False, cancel_futures=True)
        for reader in idle:
            reader.kill()

    async def check_body(self, raw: bytes, schema: type[BaseModel] | None, lists: FieldLists) -> None:
        """Find out whether a body is what a schema (None: any JSON object) wants.

        Raises:
            RequestError: It is not; see `read_body`.
            QuireError: As of all methods here: OverloadedError, if too much is being read; UnavailableError, if no
                process starts.
        """
        name = "" if schema is None else f"{schema.__module__}:{schema.__qualname__}"
        unsupported = {field: list(neutral) for field, neutral in lists.unsupported.items()}
        await self._ask(CheckBody(raw, name, sorted(lists.ignored), unsupported), len(raw))

    async def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        kept: tuple[int, TruncationSide] | None = None,
        behind: str | None = None,
    ) -> list[int]:
        """Token ids of a text; see Encode.

        Raises:
            RequestError: It is no valid Unicode.
        """
        answer = await self._ask(Encode(text, add_special_tokens, kept, behind), len(text) + len(behind or ""))
        return unpack(answer.tokens)

    async def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        packed = pack(tokens)
        return (await self._ask(Decode(packed), len(packed))).text

    async def render(
        self,
        messages: list[dict[str, Any]],
        size: int,
        *,
        tools: Sequence[Mapping[str, Any]],
        documents: Sequence[Mapping[str, Any]],
        template: str | None,
        **options: Any,
    ) -> str:
        """The text of a conversation.

        Args:
            size: About how many bytes it has.
            template: Text of another template than the model's.
            options: See Render.

        Raises:
            RequestError: The template refuses it.
        """
        task = Render(messages, [*map(dict, tools)], [*map(dict, documents)], template=template, **options)
        return (await self._ask(task, size)).text

    async def _ask(self, task: Task, size: int) -> Answer:
        with self._lock:
            if self._waiting_bytes and self._waiting_bytes + size > MAX_WAITING_BYTES:
                raise OverloadedError(
                    f"The server reads too many large requests. Send it again in {_RETRY_S} s.", retry_after_s=_RETRY_S
                )
            self._waiting_bytes += size
        future = (self._huge if size > HUGE else self._threads).submit(self._answer, task)
        future.add_done_callback(lambda _: self._leave(size))  # also when its client leaves before its turn
        answer: Answer = await asyncio.wrap_future(future)
        answer.raise_error()
        return answer

    def _leave(self, size: int) -> None:
        with self._lock:
            self._waiting_bytes -= size

    # --- in threads, which wait for the processes --------------------------------------------------------------------

    def _answer(self, task: Task) -> Answer:
        reader = self._take()
        try:
            reader.channel.send(task)
            answer = reader.channel.receive(WORK_SECONDS)
        except UnicodeEncodeError:
            self._put_back(reader)
            raise RequestError("The text is not valid Unicode: it has an unpaired surrogate.") from None
        except ChannelClosed:
            answer = None
        if answer is None:
            reader.kill()
            raise RequestError(_TOO_COSTLY)
        self._put_back(reader)
        return answer

    def _take(self) -> _Reader:
        """An idle process that lives, or a new one."""
        with self._lock:
            while self._idle:
                reader = self._idle.pop()
                if reader.alive:
                    return reader
                reader.kill()
        new: _Reader = HelperProcess(_MODULE, Answer)
        try:
            new.channel.send(self._setup)
            ready = new.channel.receive(_START_SECONDS)
        except ChannelClosed:
            ready = None
        if ready is None:
            new.kill()
            raise UnavailableError("The process that reads large requests does not start. See the server's log.")
        return new

    def _put_back(self, reader: _Reader) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(reader)
                return
        reader.kill()
