"""A MaskMaker in a process of its own, `python -m quire.engine.structured_output.mask_process`, and the way to it."""

from __future__ import annotations

import argparse
import logging
import mmap
import os
import socket
from collections.abc import Callable

import numpy as np

from quire.engine.structured_output.mask_maker import MaskMaker
from quire.engine.structured_output.matcher import Bitmasks
from quire.engine.structured_output.messages import (
    Failure,
    Fill,
    Filled,
    Forget,
    FromMasks,
    Prepare,
    Prepared,
    Row,
    ToMasks,
)
from quire.foundation.processes.helper_process import Channel, ChannelClosed, HelperProcess, run_helper
from quire.runtime.worker.startup.threads import usable_cores

logger = logging.getLogger(__name__)

_MODULE = "quire.engine.structured_output.mask_process"
_MAX_THREADS = 16
_FILL_SECONDS = 10.0
"""Masks take milliseconds; a process that needs this long is given up."""
_LOST = Failure("The process that follows grammars was lost. Send the request again.")


class MaskProcess:
    """The engine's side. The process starts with the first grammar; when it dies, the sequences that it followed
    fail, and the next sequence starts another process. It writes `masks`, as many as `max_masks`; `report` takes
    each Prepared."""

    def __init__(
        self, model: str, tokenizer: str, vocab_size: int, max_masks: int, report: Callable[[Prepared], None]
    ) -> None:
        self.masks: Bitmasks = np.zeros((0, 0), np.uint8)
        self._arguments = ("--model", model, "--tokenizer", tokenizer, "--vocab-size", str(vocab_size))
        self._shape = max_masks, _mask_bytes(vocab_size)
        self._report = report
        self._process: HelperProcess[ToMasks, FromMasks] | None = None
        self._preparing: set[int] = set()
        self._num_asked = 0  # rows in the last Fill
        self._filled: Filled | None = None  # its answer

    def prepare(self, prepare: Prepare) -> bool:
        """Begin a sequence. Returns that it cannot be filled at once: a report says when it can."""
        if self._post(prepare) or self._post(prepare):  # the second goes to a new process
            self._preparing.add(prepare.id)
        else:
            self._report(Prepared(prepare.id, _LOST))
        return False

    def poll(self) -> None:
        """Take in what the process has said."""
        if self._preparing and self._process is not None:
            try:
                self._process.channel.flush()
                while (message := self._process.channel.receive(0.0)) is not None:
                    self._take(message)
            except ChannelClosed:
                self._lose()

    def ask(self, rows: list[Row]) -> None:
        """Have each row's bitmasks filled, as by `MaskMaker.fill`; `filled` follows."""
        self._num_asked, self._filled = len(rows), None
        try:
            if self._process is None:
                raise ChannelClosed
            self._process.channel.send(Fill(rows))
        except ChannelClosed:
            self._lose()

    def filled(self) -> Filled:
        """The answer to the last `ask`. If none comes in time, the process is lost."""
        while self._filled is None:
            assert self._process is not None, "losing it is an answer"
            try:
                message = self._process.channel.receive(_FILL_SECONDS)
            except ChannelClosed:
                message = None
            if message is None:
                self._lose()
            else:
                self._take(message)
        return self._filled

    def forget(self, sequence: int) -> None:
        """Forget a sequence that is over, or never began."""
        self._preparing.discard(sequence)
        if self._process is not None:
            try:
                self._process.channel.post(Forget(sequence))
            except ChannelClosed:
                self._lose()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _post(self, prepare: Prepare) -> bool:
        """Send a sequence to the process. Returns whether the process took it."""
        try:
            self._running().channel.post(prepare)
        except (ChannelClosed, OSError):
            self._lose()
            return False
        return True

    def _take(self, message: FromMasks) -> None:
        if isinstance(message, Filled):
            self._filled = message
        elif message.id in self._preparing:
            self._preparing.remove(message.id)
            self._report(message)

    def _running(self) -> HelperProcess[ToMasks, FromMasks]:
        if self._process is None:
            fd = os.memfd_create("quire-bitmasks")
            try:
                os.ftruncate(fd, self._shape[0] * self._shape[1])
                self.masks = _shared_masks(fd, self._shape[1])
                arguments = ("--masks-fd", str(fd), *self._arguments)
                self._process = HelperProcess(_MODULE, FromMasks, (fd,), arguments)  # type: ignore[arg-type]
            finally:
                os.close(fd)
        return self._process

    def _lose(self) -> None:
        """Give up the process. Sequences that wait for it fail now, and those that run fail at their next mask."""
        if self._process is not None:
            logger.error("The process that follows grammars was lost; it starts again with the next grammar.")
            self._process.kill()
            self._process = None
        self._filled = Filled([0] * self._num_asked, dict.fromkeys(range(self._num_asked), _LOST))
        preparing, self._preparing = sorted(self._preparing), set()
        for sequence in preparing:
            self._report(Prepared(sequence, _LOST))


def main(connection: socket.socket) -> None:
    """Do what the engine says until it is gone."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--masks-fd", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--vocab-size", type=int, required=True)
    given = parser.parse_known_args()[0]
    channel: Channel[FromMasks, ToMasks] = Channel(connection, ToMasks)  # type: ignore[arg-type]  # a union is no type to mypy
    masks = _shared_masks(given.masks_fd, _mask_bytes(given.vocab_size))
    threads = max(1, min(_MAX_THREADS, usable_cores() - 1))
    maker = MaskMaker(given.model, given.tokenizer, masks, given.vocab_size, threads, channel.send)
    while True:
        match channel.receive(None):
            case Prepare() as prepare:
                if maker.prepare(prepare):
                    channel.send(Prepared(prepare.id))
            case Forget(sequence):
                maker.forget(sequence)
            case Fill(rows):
                channel.send(maker.fill(rows))


def _mask_bytes(vocab_size: int) -> int:
    return 4 * -(-vocab_size // 32)


def _shared_masks(fd: int, mask_bytes: int) -> Bitmasks:
    return np.frombuffer(mmap.mmap(fd, 0), dtype=np.uint8).reshape(-1, mask_bytes)


if __name__ == "__main__":
    run_helper(main)
