"""Hands what is large to reader processes, and bounds how much of it there is.

The first large task starts a process; one that dies or takes too long is replaced, and its task is refused.
"""

from __future__ import annotations

import asyncio
import os
import threading
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Literal

import msgspec
from pydantic import BaseModel

from quire.errors import OverloadedError, QuireError, RequestError, UnsupportedField
from quire.foundation.config import Config
from quire.foundation.messages.to_engine import Medium, MediumKind
from quire.foundation.processes.helper_process import ChannelClosed, HelperPool, HelperProcess
from quire.serving.api.schemas.known_fields import FieldLists

HUGE = 2**20
"""Tasks of more bytes go through one process, one after the other: each takes seconds, and a hundred times its size of
memory. Others do not wait for them."""
MAX_READERS = 4
"""Maximum number of processes for tasks that are not huge; a quarter of the cores if that is less."""
MAX_WAITING_BYTES = 256 * 2**20
"""Maximum size of all tasks that are being done or wait; the first may be larger."""
WORK_SECONDS = 60.0
"""Seconds after which a task is given up."""
TruncationSide = Literal["left", "right"]
_MODULE = "quire.serving.api.large_requests.reader_process"
_START_SECONDS = 60.0
_RETRY_S = 5
_TOO_COSTLY = "The request could not be read within the time and memory for it: make it smaller."
_KINDS = {kind.__name__: kind for kind in (RequestError, UnsupportedField)}


class Setup(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The first message: settings, which name the model's files. They may hold keys, so they are no arguments."""

    config: Config


class CheckBody(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Asks whether a request's body is what a schema (`module:Class`; empty for any JSON object) wants."""

    raw: bytes
    schema: str
    lists: FieldLists
    ignores_unknown: bool = False

    @classmethod
    def of(
        cls, raw: bytes, schema: type[BaseModel] | None, lists: FieldLists, ignores_unknown: bool = False
    ) -> CheckBody:
        """The task for a body and its schema; None for any JSON object."""
        name = "" if schema is None else f"{schema.__module__}:{schema.__qualname__}"
        return cls(raw, name, lists, ignores_unknown)

    @property
    def size(self) -> int:
        """About how many bytes the task has."""
        return len(self.raw)


class Encode(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Asks for the token ids of a text, or of the gap between it and a text `behind`. `kept` says how many tokens are
    wanted, and from which end others are cut off; None for all."""

    text: str
    add_special_tokens: bool = True
    kept: tuple[int, TruncationSide] | None = None
    behind: str | None = None

    @property
    def size(self) -> int:
        """About how many bytes the task has."""
        return len(self.text) + len(self.behind or "")


class Decode(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Asks for the text of packed token ids, special tokens included."""

    tokens: bytes

    @property
    def size(self) -> int:
        """About how many bytes the task has."""
        return len(self.tokens)


class Render(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Asks for the text of a conversation of about `size` bytes, by a `template` of its own or the model's."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    documents: list[dict[str, Any]]
    add_generation_prompt: bool
    continue_final_message: bool
    variables: dict[str, Any]
    size: int
    template: str | None = None


class ReadMedium(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Asks for a medium as the model's tower takes it: of a data: or file: URL, or of what another URL brought.
    `processor` and `io` are what the request says about its media, as JSON."""

    kind: MediumKind
    url: str
    content: bytes = b""
    processor: str = "{}"
    io: str = "{}"

    @property
    def size(self) -> int:
        """About how many bytes the task has."""
        return len(self.url) + len(self.content)


class ReadAudio(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Asks for the features of a file's sound; with `pads_short`, silence follows sounds that are shorter than what the
    model's encoder reads."""

    content: bytes
    pads_short: bool

    @property
    def size(self) -> int:
        """About how many bytes the task has."""
        return len(self.content)


Task = CheckBody | Encode | Decode | Render | ReadMedium | ReadAudio


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """What came of a task: `text` of Render and Decode, packed `tokens` of Encode, `medium` of ReadMedium and
    ReadAudio, or the class, message and field of an error. The first answer says that the process is ready."""

    text: str = ""
    tokens: bytes = b""
    error: str = ""
    message: str = ""
    param: str | None = None
    medium: Medium | None = None

    @classmethod
    def refusal(cls, error: RequestError) -> Answer:
        """The answer to a task that is refused."""
        return cls(error=type(error).__name__, message=error.message, param=error.param)

    def raise_error(self) -> None:
        if self.error:
            error = RequestError.__new__(_KINDS.get(self.error, RequestError))
            QuireError.__init__(error, self.message, param=self.param)
            raise error


def pack(tokens: Sequence[int]) -> bytes:
    """Token ids as int64: twenty times as fast to read as a list in msgpack."""
    return array("q", tokens).tobytes()


def unpack(packed: bytes) -> list[int]:
    """The ids that `pack` was given."""
    tokens = array("q")
    tokens.frombytes(packed)
    return tokens.tolist()


_Reader = HelperProcess[Setup | Task, Answer]


class LargeRequestReaders:
    """Does large tasks in processes of low priority. Called in the event loop."""

    def __init__(self, config: Config) -> None:
        readers = max(1, min(MAX_READERS, (os.cpu_count() or 1) // 4))
        self._threads = ThreadPoolExecutor(readers, thread_name_prefix="large-requests")
        self._huge = ThreadPoolExecutor(1, thread_name_prefix="huge-requests")
        self._readers = HelperPool(lambda: _start(config), _START_SECONDS, "The process that reads large requests")
        self._lock = threading.Lock()
        self._waiting_bytes = 0

    def close(self) -> None:
        """Refuse further requests, and end the processes that read."""
        for threads in (self._threads, self._huge):
            threads.shutdown(wait=False, cancel_futures=True)
        self._readers.close()

    async def ask(self, task: Task) -> Answer:
        """The answer to a task. Raises RequestError if the request is wrong or takes too much time or memory,
        OverloadedError if too much is being read, and UnavailableError if no process starts."""
        size = task.size
        with self._lock:
            if self._waiting_bytes and self._waiting_bytes + size > MAX_WAITING_BYTES:
                raise OverloadedError(
                    f"The server reads too many large requests. Send it again in {_RETRY_S} s.", retry_after_s=_RETRY_S
                )
            self._waiting_bytes += size
        is_huge = size > HUGE and not isinstance(task, ReadMedium | ReadAudio)  # whose size says little about its costs
        future = (self._huge if is_huge else self._threads).submit(self._answer, task)
        future.add_done_callback(lambda _: self._leave(size))  # also when its client leaves before its turn
        answer: Answer = await asyncio.wrap_future(future)
        answer.raise_error()
        return answer

    def _leave(self, size: int) -> None:
        with self._lock:
            self._waiting_bytes -= size

    def _answer(self, task: Task) -> Answer:
        try:
            answer = self._readers.ask(task, WORK_SECONDS)
        except UnicodeEncodeError:
            raise RequestError("The text is not valid Unicode: it has an unpaired surrogate.") from None
        if answer is None:
            raise RequestError(_TOO_COSTLY)
        return answer


def _start(config: Config) -> _Reader:
    reader: _Reader = HelperProcess(_MODULE, Answer)
    with suppress(ChannelClosed):  # which the pool sees as well
        reader.channel.send(Setup(config))
    return reader
