"""A helper process and the channel to it: msgpack frames over a socket pair. Both sides are here."""

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

from quire.errors import UnavailableError

_HEAD = struct.Struct("<I")
_CHUNK = 1 << 16
STACK_BYTES = 256 * 2**20
"""Stack of a helper's thread: grammars nest, and their compiler recurses."""

Sent = TypeVar("Sent")
Received = TypeVar("Received")


class ChannelClosed(Exception):
    """The other side is gone."""


class Channel(Generic[Sent, Received]):
    """Sends and receives messages over one end of a socket pair. Raises ChannelClosed if the other side is gone."""

    def __init__(self, connection: socket.socket, receives: type[Received]) -> None:
        self._socket = connection
        self._readable = select.poll()  # `select.select` takes no descriptor above 1,023, and a server can have more
        self._readable.register(connection, select.POLLIN)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(receives)
        self._buffer = bytearray()
        self._unsent = bytearray()
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Sent) -> None:
        """Send a message, and wait for room. Any thread may call this."""
        with self._sending:
            self._append(message)
            self._write(0)

    def post(self, message: Sent) -> None:
        """Send a message as far as there is room. The rest goes with later calls of `post`, `send` or `flush`."""
        with self._sending:
            self._append(message)
            self._write(socket.MSG_DONTWAIT)

    def flush(self) -> None:
        """Send what `post` has left, as far as there is room."""
        with self._sending:
            self._write(socket.MSG_DONTWAIT)

    def receive(self, timeout: float | None) -> Received | None:
        """The next message, or None after `timeout` seconds (None: wait for ever). Only one thread may call this."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (message := self._take()) is None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
            if not self._readable.poll(left):
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
        if len(self._buffer) < _HEAD.size:
            return None
        end = _HEAD.size + _HEAD.unpack_from(self._buffer)[0]
        if len(self._buffer) < end:
            return None
        message = self._decoder.decode(memoryview(self._buffer)[_HEAD.size : end])
        self._buffer = self._buffer[end:]
        return message


class HelperProcess(Generic[Sent, Received]):
    """A running `python -m module` that ends in `run_helper(...)`, and the channel to it. It inherits `fds`, and exits
    when the channel is closed."""

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
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        self.close()

    def close(self) -> None:
        """Close the channel, and wait until it exits."""
        self.channel.close()
        try:
            self._process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class HelperPool(Generic[Sent, Received]):
    """Helpers that are started when a task needs one, and kept for the next. Any thread may ask. The first message of a
    helper says that it is ready; it may take `start_seconds`, and on an idle machine takes a tenth of a second. Errors
    call it by `name`."""

    def __init__(self, start: Callable[[], HelperProcess[Sent, Received]], start_seconds: float, name: str) -> None:
        self._start = start
        self._start_seconds = start_seconds
        self._name = name
        self._idle: list[HelperProcess[Sent, Received]] = []
        self._lock = threading.Lock()
        self._closed = False

    def ask(self, task: Sent, seconds: float) -> Received | None:
        """A helper's answer; None if it gives none in time, or dies of the task. Then the helper is killed. Raises
        UnavailableError if no helper starts."""
        helper, answer = self._take(), None
        try:
            deadline = time.monotonic() + seconds
            helper.channel.send(task)
            answer = helper.channel.receive(deadline - time.monotonic())
        except ChannelClosed:
            pass
        except UnicodeEncodeError:  # nothing was sent
            self._put_back(helper)
            raise
        if answer is None:
            helper.kill()
        else:
            self._put_back(helper)
        return answer

    def close(self) -> None:
        """End the idle helpers, and each other one after its task."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for helper in idle:
            helper.close()

    def _take(self) -> HelperProcess[Sent, Received]:
        with self._lock:
            while self._idle:
                helper = self._idle.pop()
                if helper.alive:
                    return helper
                helper.kill()
        helper = self._start()
        try:
            ready = helper.channel.receive(self._start_seconds)
        except ChannelClosed:
            ready = None
        if ready is None:
            helper.kill()
            raise UnavailableError(f"{self._name} does not start. See the server's log.")
        return helper

    def _put_back(self, helper: HelperProcess[Sent, Received]) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(helper)
                return
        helper.close()


def run_helper(main: Callable[[socket.socket], None]) -> None:
    """Run `main` with its end of the channel, on a large stack, as the body of a helper's `__main__`. The process exits
    when the other end is closed, in the middle of whatever it does."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a service manager may send it to all; a helper ends with its parent
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
