"""A batch from a file to a file, for `quire run-batch`: what was answered before an interruption is not asked again.

Results are appended to a partial file as they come. When all are there, they are written in the order of the input, and
the partial file goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import msgspec

from quire.errors import RequestError
from quire.serving.dialects.batches.requests import (
    ENDPOINTS,
    Answer,
    BatchCalls,
    BatchLine,
    BatchLineError,
    parse_line,
    result_line,
)


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    output_tokens: int = 0


class _Counted(msgspec.Struct):
    usage: _Usage | None = None


class _PartialLine(msgspec.Struct):
    """The result for a line of the input, counted from 0. Its digest tells whether the input has changed."""

    line: int
    digest: str
    failed: bool
    result: msgspec.Raw


@dataclass(frozen=True)
class BatchCounts:
    """How many requests a file has, and how many of them are done and failed."""

    total: int
    done: int
    failed: int


@dataclass
class BatchFile:
    """An input file of requests, one a line, and its output; `partial` keeps results until all are there."""

    input: Path
    output: Path
    partial: Path
    _digests: dict[int, str] = field(default_factory=dict)
    _kept: dict[int, tuple[int, int]] = field(default_factory=dict)  # by line: where results stand in the partial file
    _failed: set[int] = field(default_factory=set)
    _wrong: dict[int, BatchLineError] = field(default_factory=dict)

    @property
    def counts(self) -> BatchCounts:
        return BatchCounts(len(self._digests), len(self._kept), len(self._failed))

    @property
    def wrong_lines(self) -> list[str]:
        """What is wrong with each line that is no request; it gets an error in place of an answer."""
        return [f"line {number + 1}: {error.message}" for number, error in self._wrong.items()]

    def check(self) -> None:
        """Read the input, and what an earlier run has left; raises RequestError if it cannot be answered."""
        seen: dict[str, int] = {}
        for number, raw in self._lines():
            self._digests[number] = hashlib.sha256(raw).hexdigest()
            name: str | None
            try:
                name = parse_line(raw, ENDPOINTS).custom_id
            except BatchLineError as error:
                self._wrong[number], name = error, error.custom_id
            if name in seen:
                raise RequestError(
                    f"{self.input}, line {number + 1}: custom_id '{name}' was in line {seen[name] + 1} already."
                )
            if name is not None:
                seen[name] = number
        if self._wrong and len(self._wrong) == len(self._digests):
            raise RequestError(f"{self.input}, {self.wrong_lines[0]}")
        if self.partial.exists():
            self._read_partial()

    async def run(self, calls: BatchCalls, on_answer: Callable[[int], None]) -> None:
        """Answer what is left, and write the output. Each answer's tokens are told to `on_answer`."""
        self.partial.parent.mkdir(parents=True, exist_ok=True)
        with self.partial.open("ab", buffering=0) as partial:
            await self._answer_all(calls, partial, on_answer)
        self._write_output()

    async def _answer_all(self, calls: BatchCalls, partial: IO[bytes], on_answer: Callable[[int], None]) -> None:
        sending: set[asyncio.Task[None]] = set()

        async def send(number: int, line: BatchLine) -> None:
            request_id, answer = await calls.answer(line)
            self._keep(partial, number, line.custom_id, request_id, answer)
            on_answer(_tokens(answer))

        try:
            for number, raw in self._lines():
                if number in self._wrong:
                    error = self._wrong[number]
                    self._keep(partial, number, error.custom_id, f"batch-{uuid.uuid4().hex}", _refusal(number, error))
                    on_answer(0)
                elif number not in self._kept:
                    await calls.wait_for_room()
                    sending.add(asyncio.create_task(send(number, parse_line(raw, ENDPOINTS))))
                    for task in [task for task in sending if task.done()]:
                        sending.discard(task)
                        task.result()
            await asyncio.gather(*sending)
        finally:
            for task in sending:
                task.cancel()
            await asyncio.gather(*sending, return_exceptions=True)

    def _keep(self, partial: IO[bytes], number: int, custom_id: str | None, request_id: str, answer: Answer) -> None:
        failed = answer.status != 200
        result = msgspec.Raw(result_line(custom_id, request_id, answer, repeat_error=True))
        data = msgspec.json.encode(_PartialLine(number, self._digests[number], failed, result)) + b"\n"
        begin = partial.seek(0, os.SEEK_END)
        partial.write(data)
        self._kept[number] = (begin, len(data))
        if failed:
            self._failed.add(number)

    def _read_partial(self) -> None:
        """Take over results of lines that are as they were; a result that broke off is cut away."""
        end = 0
        with self.partial.open("rb") as partial:
            for data in partial:
                try:
                    kept = msgspec.json.decode(data, type=_PartialLine)
                except msgspec.DecodeError:
                    break
                if not data.endswith(b"\n"):
                    break
                if self._digests.get(kept.line) == kept.digest and not kept.failed:  # failures are tried again
                    self._kept[kept.line] = (end, len(data))
                end += len(data)
        os.truncate(self.partial, end)

    def _write_output(self) -> None:
        draft = self.partial.with_name(f"{self.partial.name}.sorted")
        with self.partial.open("rb") as partial, draft.open("wb") as output:
            for _, (begin, size) in sorted(self._kept.items()):
                partial.seek(begin)
                output.write(msgspec.json.decode(partial.read(size), type=_PartialLine).result)
                output.write(b"\n")
            output.flush()
            os.fsync(output.fileno())
        self.output.parent.mkdir(parents=True, exist_ok=True)
        _move(draft, self.output)
        self.partial.unlink()

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        with self.input.open("rb") as file:
            for number, raw in enumerate(file):
                if raw.strip():
                    yield number, raw.rstrip(b"\r\n")


def _move(source: Path, target: Path) -> None:
    with contextlib.suppress(OSError):
        os.replace(source, target)
        return
    target.write_bytes(source.read_bytes())
    source.unlink()


def _refusal(number: int, error: BatchLineError) -> Answer:
    """The answer to a line that is no request. Its number tells it from others without a custom_id."""
    said = {"message": f"Line {number + 1}: {error.message}", "type": RequestError.type, "param": error.param}
    return Answer(400, msgspec.json.encode({"error": said | {"code": error.code}}))


def _tokens(answer: Answer) -> int:
    if answer.status != 200:
        return 0
    usage = msgspec.json.decode(answer.body, type=_Counted).usage or _Usage()
    return usage.completion_tokens or usage.output_tokens
