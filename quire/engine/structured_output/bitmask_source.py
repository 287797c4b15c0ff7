"""The engine's side of constrained sequences: a TokenBitmaskSource over a matcher process.

Owns that process: it starts with the first constrained sequence, and when it dies, the sequences that it followed fail
and the next one starts another.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Mapping, Sequence

from quire.engine.structured_output.matcher_messages import (
    Fill,
    Filled,
    Forget,
    FromMatchers,
    Prepare,
    Prepared,
    Row,
    RowState,
    ToMatchers,
    first_masks,
)
from quire.errors import GenerationError, QuireError, RequestError
from quire.foundation.messages.to_engine import Add
from quire.foundation.messages.workers import Bits
from quire.foundation.processes.helper_process import ChannelClosed, HelperProcess
from quire.scheduling.scheduler.request import Request

logger = logging.getLogger(__name__)

_MODULE = "quire.engine.structured_output.matcher_process"
_FILL_SECONDS = 10.0
"""Masks take milliseconds; a process that needs so long is given up."""
_LOST = "The process that follows grammars was lost. Send the request again."


def prepare_of(message: Add) -> Prepare:
    """The message that tells the matcher process about a sequence."""
    sampling = message.sampling
    return Prepare(
        message.id,
        message.grammar,
        sampling.ignore_eos,
        message.stop_ids if sampling.min_tokens else [],
        sampling.min_tokens,
    )


class GrammarBitmasks:
    """Bitmasks of sequences with a grammar.

    Args:
        model: The model's directory.
        tokenizer: The tokenizer's directory.
        vocab_size: The size of the model's vocabulary.
        most_masks: Most bitmasks that are asked for at once.
    """

    def __init__(self, model: str, tokenizer: str, vocab_size: int, most_masks: int) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._mask_bytes = 4 * -(-vocab_size // 32)
        self._most_masks = most_masks
        self._process: HelperProcess[ToMatchers, FromMatchers] | None = None
        self._masks = memoryview(b"")  # [masks · bytes], written by the process
        self._sent: dict[int, int] = {}  # by sequence: how many of its tokens the process knows
        self._preparing: set[int] = set()
        self._prepared: list[tuple[int, QuireError | None]] = []
        self._light: set[int] = set()
        self._asked: list[Row] = []  # in the last Fill
        self._filled: Filled | None = None  # its answer

    def wants(self, message: Add) -> bool:
        return bool(message.grammar)

    def prepare(self, message: Add) -> bool:
        prepare = prepare_of(message)
        self._sent[message.id] = message.prompt_len
        if not self._post(prepare) and not self._post(prepare):  # the second goes to a new process
            self._prepared.append((message.id, GenerationError(_LOST)))
            return False
        self._preparing.add(message.id)
        return False

    def prepared(self) -> list[tuple[int, QuireError | None]]:
        if self._preparing and self._process is not None:
            try:
                self._process.channel.flush()
                while (message := self._process.channel.receive(0.0)) is not None:
                    self._take(message)
            except ChannelClosed:
                self._lose()
        prepared, self._prepared = self._prepared, []
        return prepared

    def prepare_now(self, messages: Sequence[Add]) -> None:
        """Prepare sequences that run already, and wait until all are prepared. If one fails, its next mask says so."""
        for message in messages:
            self.prepare(message)
        waiting = {message.id for message in messages}
        while self._process is not None and not waiting.isdisjoint(self._preparing):
            self._receive()
        self._prepared = [entry for entry in self._prepared if entry[0] not in waiting]

    def is_light(self, request_id: int) -> bool:
        """Whether the grammar of a prepared sequence is light; see limits.py."""
        return request_id in self._light

    def ask(self, requests: Sequence[Request], drafts: Mapping[int, Sequence[int]]) -> bool:
        rows = []
        for request in requests:
            tokens = request.tokens[self._sent.get(request.id, 0) :]
            rows.append(Row(request.id, tokens, list(drafts.get(request.id, ()))))
            self._sent[request.id] = len(request.tokens)
        assert sum(1 + len(row.drafts) for row in rows) <= self._most_masks
        self._asked, self._filled = rows, None
        try:
            if self._process is None:
                raise ChannelClosed
            self._process.channel.send(Fill(rows))
        except ChannelClosed:
            self._lose()
        return False

    def bits(self) -> list[Sequence[Bits] | QuireError | None]:
        filled, places = self._receive_filled(), first_masks(self._asked)
        counts = filled.counts or [1] * len(places)
        return [
            (RequestError if row in filled.refused else GenerationError)(filled.errors[row])
            if state == "failed"
            else self._bits_of(state, places[row], counts[row])
            for row, state in enumerate(filled.states)
        ]

    def forget(self, request_id: int) -> None:
        if self._sent.pop(request_id, None) is None:
            return
        self._preparing.discard(request_id)
        self._light.discard(request_id)
        if self._process is not None:
            try:
                self._process.channel.post(Forget(request_id))
            except ChannelClosed:
                self._lose()

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def _bits_of(self, state: RowState, first: int, count: int) -> Sequence[Bits] | None:
        if state == "complete":
            return None
        size = self._mask_bytes
        return [self._masks[at * size : (at + 1) * size] for at in range(first, first + count)]

    def _post(self, prepare: Prepare) -> bool:
        """Send a sequence to the process. Returns whether there is one that took it."""
        try:
            self._running().channel.post(prepare)
        except (ChannelClosed, OSError):
            self._lose()
            return False
        return True

    def _receive_filled(self) -> Filled:
        """The answer to the last Fill."""
        while self._filled is None:
            self._receive()
        return self._filled

    def _receive(self) -> None:
        """Take the process's next message. If none comes in time, the process is lost."""
        assert self._process is not None, "losing it is an answer"
        try:
            message = self._process.channel.receive(_FILL_SECONDS)
        except ChannelClosed:
            message = None
        if message is None:
            self._lose()
        else:
            self._take(message)

    def _take(self, message: FromMatchers) -> None:
        match message:
            case Filled():
                self._filled = message
            case Prepared(sequence, error, light):
                if sequence in self._preparing:
                    self._preparing.remove(sequence)
                    self._light.update({sequence} if light else ())
                    self._prepared.append((sequence, RequestError(error) if error else None))

    def _running(self) -> HelperProcess[ToMatchers, FromMatchers]:
        if self._process is None:
            fd = os.memfd_create("quire-bitmasks")
            try:
                os.ftruncate(fd, self._most_masks * self._mask_bytes)
                self._masks = memoryview(mmap.mmap(fd, self._most_masks * self._mask_bytes))
                arguments = (
                    "--masks-fd", str(fd), "--model", self._model, "--tokenizer", self._tokenizer,
                    "--vocab-size", str(self._vocab_size),
                )  # fmt: skip
                self._process = HelperProcess(_MODULE, FromMatchers, (fd,), arguments)  # type: ignore[arg-type]
            finally:
                os.close(fd)
        return self._process

    def _lose(self) -> None:
        """Give up the process. Sequences that wait for it fail now, and those that run fail at their next mask."""
        if self._process is not None:
            logger.error("The process that follows grammars was lost; it starts again with the next grammar.")
            self._process.kill()
            self._process = None
        self._filled = Filled(["failed"] * len(self._asked), dict.fromkeys(range(len(self._asked)), _LOST))
        self._prepared += [(sequence, GenerationError(_LOST)) for sequence in sorted(self._preparing)]
        self._preparing.clear()
