"""Both ends of a pipe of lines: what a child reports, and what it is told. Neither end ever waits for the other.

Every line arrives whole or not at all. Knows nothing about what lines mean.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import TypeVar

import msgspec

from quire.foundation.messages.to_engine import DECODING_ERRORS

MAX_UNSENT_BYTES = 1 << 22
"""A reader that leaves more than this unread gets no further lines: it has read nothing for a long time."""
_CHUNK = 1 << 16
_LOOK_MS = 100

T = TypeVar("T")


class LineWriter:
    """The sending end. A pipe holds 64 KiB; a thread sends what it has no room for yet.

    Any thread may call it. Once the reader is gone, lines are dropped.

    Args:
        fd: The pipe, which is this object's from now on.
    """

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._unsent = bytearray()
        self._changed = threading.Condition()
        self._has_thread = False
        self._is_ending = False

    def send(self, line: bytes) -> None:
        """Send a line, which contains no line break; never waits."""
        with self._changed:
            if self._fd < 0 or len(self._unsent) > MAX_UNSENT_BYTES:
                return
            self._unsent += line + b"\n"
            self._write()
            if self._unsent and not self._has_thread:
                self._has_thread = True
                threading.Thread(target=self._write_rest, name="pipe-lines", daemon=True).start()

    def flush(self, patience_s: float) -> None:
        """Wait until all lines are sent, for `patience_s` seconds at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unsent, patience_s)

    def end(self) -> None:
        """Close the pipe as soon as all lines are sent."""
        with self._changed:
            self._is_ending = True
            if not self._unsent:
                self._close()

    def close(self) -> None:
        """Close the pipe now. More calls do nothing."""
        with self._changed:
            self._close()

    def _close(self) -> None:
        self._unsent.clear()
        self._changed.notify_all()
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _write(self) -> None:
        """Send as much as there is room for."""
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
            room.poll(_LOOK_MS)  # not for ever: the pipe may be closed meanwhile
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
    """The receiving end.

    Args:
        fd: The pipe; it is closed with this object.

    Attributes:
        fd: Readable when there may be lines, and for ever once the writer is gone.
    """

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self._begun: list[bytes] = []  # parts of a line whose end has not come

    def read(self) -> list[bytes]:
        """Whole lines since the last call; never waits."""
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
        """Close the pipe."""
        os.close(self.fd)


def decoded(lines: list[bytes], decoder: msgspec.json.Decoder[T]) -> Iterator[T | Exception]:
    """The message of each line, or why it is none."""
    for line in lines:
        try:
            yield decoder.decode(line)
        except DECODING_ERRORS as error:
            yield error


def wait_readable(*descriptors: int) -> list[int]:
    """Until one of them is readable, or its other end is gone; returns those that are."""
    poll = select.poll()  # select has no room for numbers from 1,024 on
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll()]
