"""A helper process and the channel to it: msgpack frames over a socket pair.

Owns starting, speaking and ending, on both sides. Knows nothing about what is said.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

_HEAD = struct.Struct("<I")
_CHUNK = 1 << 16
STACK_BYTES = 256 * 2**20
"""Of a helper's thread: grammars nest, and their compiler recurses."""

Sent = TypeVar("Sent")
Received = TypeVar("Received")


class ChannelClosed(Exception):
    """The other side is gone."""


class Channel(Generic[Sent, Received]):
    """Sends one type of message and receives another.

    Args:
        connection: One end of a socket pair.
        receives: The type of what comes.
    """

    def __init__(self, connection: socket.socket, receives: type[Received]) -> None:
        self._socket = connection
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(receives)
        self._buffer = bytearray()
        self._unsent = bytearray()
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """For select."""
        return self._socket.fileno()

    def send(self, message: Sent) -> None:
        """Send a message, waiting for room. Any thread may.

        Raises:
            ChannelClosed: The other side is gone.
        """
        with self._sending:
            self._append(message)
            self._write(0)

    def post(self, message: Sent) -> None:
        """Send a message as far as there is room; the rest goes with later calls of `post`, `send` or `flush`.

        Raises:
            ChannelClosed: The other side is gone.
        """
        with self._sending:
            self._append(message)
            self._write(socket.MSG_DONTWAIT)

    def flush(self) -> None:
        """Send what `post` left, as far as there is room.

        Raises:
            ChannelClosed: The other side is gone.
        """
        with self._sending:
            self._write(socket.MSG_DONTWAIT)

    def receive(self, timeout: float | None) -> Received | None:
        """The next message, or None after `timeout` seconds (None: wait for ever). One thread only.

        Raises:
            ChannelClosed: The other side is gone.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (message := self._take()) is None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._socket], [], [], left)[0]:
                return None
            try:
                chunk = self._socket.recv(_CHUNK)
            except OSError as error:
                raise ChannelClosed from error
            if not chunk:
                raise ChannelClosed
            self._buffer += chunk
        return message

    def close(self) -> None:
        """Close this end; the other side notices."""
        self._socket.close()

    def _append(self, message: Sent) -> None:
        body = self._encoder.encode(message)
        self._unsent += _HEAD.pack(len(body)) + body

    def _write(self, flags: int) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent, flags)]
        except BlockingIOError:
            pass
        except OSError as error:
            raise ChannelClosed from error

    def _take(self) -> Received | None:
        """A message that has arrived as a whole."""
        if len(self._buffer) < _HEAD.size:
            return None
        end = _HEAD.size + _HEAD.unpack_from(self._buffer)[0]
        if len(self._buffer) < end:
            return None
        message = self._decoder.decode(memoryview(self._buffer)[_HEAD.size : end])
        self._buffer = self._buffer[end:]
        return message


class HelperProcess(Generic[Sent, Received]):
    """A running `python -m module`, and the channel to it. It exits when the channel is closed.

    Args:
        module: Ends in `run_helper(...)`.
        receives: The type of its messages.
        fds: File descriptors that it inherits.
        arguments: Of its command line.
    """

    def __init__(
        self, module: str, receives: type[Received], fds: tuple[int, ...] = (), arguments: tuple[str, ...] = ()
    ) -> None:
        own, its = socket.socketpair()
        with its:
            command = [sys.executable, "-m", module, "--channel-fd", str(its.fileno()), *arguments]
            self._process = subprocess.Popen(
                command, pass_fds=(its.fileno(), *fds), stdin=subprocess.DEVNULL, start_new_session=True
            )
        self.channel: Channel[Sent, Received] = Channel(own, receives)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def kill(self) -> None:
        """End it now, whatever it does."""
        self._process.kill()
        self.close()

    def close(self) -> None:
        """Close the channel, upon which it exits, and wait for that."""
        self.channel.close()
        try:
            self._process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def run_helper(main: Callable[[socket.socket], None]) -> None:
    """Body of a helper's `__main__`: run `main` with its end of the channel, on a large stack. The process exits when
    the other end is closed, in the middle of whatever it does."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a service manager may send it to all; it ends with its parent
    parser = argparse.ArgumentParser()
    parser.add_argument("--channel-fd", type=int, required=True)
    connection = socket.socket(fileno=parser.parse_known_args()[0].channel_fd)
    threading.stack_size(STACK_BYTES)
    threading.Thread(target=_run, args=(main, connection), name="helper", daemon=True).start()
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    poll.poll()
    os._exit(0)


def _run(main: Callable[[socket.socket], None], connection: socket.socket) -> None:
    try:
        main(connection)
    except ChannelClosed:
        pass
    except BaseException:
        traceback.print_exc()
    os._exit(1)
