"""Both ends of a pipe of lines: what a child reports, and what it is told.

Every line arrives complete or not at all, and neither end ever waits for the other.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from contextlib import suppress
from typing import TypeVar

import msgspec

from quire.foundation.messages.to_engine import DECODING_ERRORS

MAX_UNSENT_BYTES = 1 << 22
"""A reader that leaves more than this unread gets no further lines: it has read nothing for a long time."""
_CHUNK = 1 << 16
_LOOK_MS = 100

logger = logging.getLogger(__name__)
T = TypeVar("T")


class LineWriter:
    """The sending end, for any thread. A pipe holds 64 KiB; a thread sends what does not fit yet.

    The pipe belongs to this object. Once the reader is gone, lines are dropped.
    """

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._unsent = bytearray()
        self._changed = threading.Condition()
        self._has_thread = False
        self._is_ending = False

    def send(self, line: bytes) -> None:
        """Send a line, which contains no line break. Never waits."""
        with self._changed:
            if self._fd < 0 or len(self._unsent) > MAX_UNSENT_BYTES:
                return
            self._unsent += line + b"\n"
            self._write()
            if self._unsent and not self._has_thread:
                self._has_thread = True
                threading.Thread(target=self._write_rest, name="pipe-lines", daemon=True).start()

    def flush(self, patience_s: float) -> None:
        """Wait until all lines are sent, for at most `patience_s` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unsent, patience_s)

    def end(self) -> None:
        """Close the pipe as soon as all lines are sent."""
        with self._changed:
            self._is_ending = True
            if not self._unsent:
                self._close()

    def close(self) -> None:
        """Close the pipe now. Further calls do nothing."""
        with self._changed:
            self._close()

    def _close(self) -> None:
        self._unsent.clear()
        self._changed.notify_all()
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _write(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: os.write(self._fd, self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._close()  # the reader is gone

    def _write_rest(self) -> None:
        room = select.poll()
        with self._changed:
            if self._fd >= 0:  # else it was closed before this thread began
                room.register(self._fd, select.POLLOUT)
        while True:
            room.poll(_LOOK_MS)  # with a timeout, because the pipe may be closed meanwhile
            with self._changed:
                if self._unsent:
                    self._write()
                if self._unsent:
                    continue
                if self._is_ending:
                    self._close()
                self._has_thread = False
                self._changed.notify_all()
                return


class LineReader:
    """The receiving end, which owns the pipe `fd`. It is readable when there may be lines, or the writer is gone."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self._begun: list[bytes] = []  # parts of a line that has no end yet

    def read(self) -> list[bytes]:
        """Complete lines since the last call. Never waits."""
        lines: list[bytes] = []
        with suppress(BlockingIOError):
            while chunk := os.read(self.fd, _CHUNK):
                first, *others = chunk.split(b"\n")
                self._begun.append(first)
                for part in others:
                    lines.append(b"".join(self._begun))
                    self._begun = [part]
        return lines

    def close(self) -> None:
        os.close(self.fd)


def decoded(lines: list[bytes], decoder: msgspec.json.Decoder[T], kind: str) -> list[T]:
    """The messages of lines. A line that is no message is logged and left out; `kind` is what it should have been."""
    messages = []
    for line in lines:
        try:
            messages.append(decoder.decode(line))
        except DECODING_ERRORS as error:
            logger.error("%s cannot be read, and is left out: %s.", kind, error)
    return messages


def wait_readable(*descriptors: int) -> list[int]:
    """Wait until descriptors are readable or their other end is gone; returns these."""
    poll = select.poll()  # select takes no numbers above 1,023
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll()]
