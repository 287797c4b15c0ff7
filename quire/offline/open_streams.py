"""Prompts whose outputs are read while they grow: which are open, and what the engine brings them. For one thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from quire.errors import RequestError
from quire.foundation.messages.from_engine import Deltas
from quire.foundation.messages.to_engine import Abort, ToEngine
from quire.offline.local_engine import LocalEngine
from quire.outputs import RequestOutput
from quire.sampling_params import RequestOutputKind
from quire.text.sequence_accumulator import SequenceAccumulator, dispatch_deltas, failure_of


@dataclass
class OpenStream:
    """One prompt's sequences while they are generated. `changed` is set when there is something new, and `left` when
    nobody reads it any more. `kind` tells what each output has, and `error` is what ended it."""

    name: str
    text: str | None
    sequences: Sequence[SequenceAccumulator]
    kind: RequestOutputKind
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None

    @property
    def finished(self) -> bool:
        return all(sequence.choice.finished for sequence in self.sequences)

    async def next(self) -> None:
        """Wait for something new. Raises what ended the stream."""
        await self.changed.wait()
        self.changed.clear()
        if self.error is not None:
            raise self.error

    def output(self, local: LocalEngine) -> RequestOutput | None:
        """The next output for the reader, which later ones do not change; None if there is none."""
        if self.kind is RequestOutputKind.DELTA:
            gained = local.output(self.name, self.text, self.sequences, only_new=True)
            return gained if gained.outputs or gained.finished else None
        if self.kind is RequestOutputKind.FINAL_ONLY and not self.finished:
            return None
        output = local.output(self.name, self.text, self.sequences)
        return replace(output, outputs=[replace(each, token_ids=list(each.token_ids)) for each in output.outputs])


class OpenStreams:
    """All streams that are open. `send` takes messages to the engine."""

    def __init__(self, send: Callable[[ToEngine], None]) -> None:
        self._send = send
        self._open: dict[int, SequenceAccumulator] = {}
        self._stream_of: dict[int, OpenStream] = {}  # by sequence
        self._by_name: dict[str, OpenStream] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[OpenStream]:
        return iter(list(self._by_name.values()))

    def submit(self, name: str | None, text: str | None, sequences: Sequence[SequenceAccumulator]) -> OpenStream:
        """Send a prompt to the engine. Without a name it gets one. Raises RequestError if the name is taken."""
        name = str(sequences[0].add.id) if name is None else name
        if name in self._by_name:
            raise RequestError(f"A request with the id '{name}' is open already.", param="request_id")
        kind = sequences[0].add.sampling.output_kind
        stream = self._by_name[name] = OpenStream(name, text, sequences, kind)
        for sequence in sequences:
            self._open[sequence.add.id] = sequence
            self._stream_of[sequence.add.id] = stream
        self._send(sequences[0].add)  # with its forks
        return stream

    def leave(self, stream: OpenStream, *, engine_lives: bool) -> None:
        """Forget a stream that nobody reads any more, and abort what still runs of it."""
        del self._by_name[stream.name]
        stream.left.set()
        open_ones = [s.add.id for s in stream.sequences if self._open.pop(s.add.id, None) is not None]
        for sequence in stream.sequences:
            self._stream_of.pop(sequence.add.id, None)
        if open_ones and engine_lives:
            self._send(Abort(open_ones))

    def abort(self, name: str) -> None:
        """End a request. Its stream gets the end from the engine."""
        if (stream := self._by_name.get(name)) is not None:
            self._send(Abort([s.add.id for s in stream.sequences if s.add.id in self._open]))

    async def wait_none(self) -> None:
        while self._by_name:
            await next(iter(self._by_name.values())).left.wait()

    def take(self, message: Deltas) -> None:
        touched = {*message.ids, *(end.id for end in message.ends), *(number for number, _ in message.prompt_logprobs)}
        streams = [stream for number in touched if (stream := self._stream_of.get(number)) is not None]
        for sequence in dispatch_deltas(message, self._open):
            number = sequence.add.id
            if sequence.end is None:  # it ended by a stop string
                self._send(Abort([number]))
            elif (error := failure_of(sequence.end)) is not None:
                self._stream_of[number].error = error
            del self._open[number]
        for stream in streams:
            stream.changed.set()

    def fail(self, failure: Exception) -> None:
        """End all streams, because the engine is gone."""
        for stream in self._by_name.values():
            stream.error = failure
            stream.changed.set()
