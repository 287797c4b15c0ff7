"""What a supervisor tells an API process while it runs: JSON lines through a pipe. Plain data, and both ends of it."""

from __future__ import annotations

import contextlib
import os

import msgspec

from quire.config import Config
from quire.messages.from_engine import EngineId
from quire.processes.launch import LaunchConfig
from quire.processes.swap_reports import SwapStatus


class Reload(msgspec.Struct, frozen=True, tag=True):
    """The settings were read again: serve what they say.

    Attributes:
        asked: As they were asked for.
    """

    asked: Config


class HoldRequests(msgspec.Struct, frozen=True, tag=True):
    """Let new requests wait, and disconnect from the served model once its open requests have ended.

    Attributes:
        drain_timeout: What these get, in seconds.
        hold_timeout: How long new ones wait, in seconds.
    """

    drain_timeout: float
    hold_timeout: float


class OpenModel(msgspec.Struct, frozen=True, tag=True):
    """Serve this model as soon as its engines are ready; then disconnect from the one before, see HoldRequests.

    Attributes:
        launch: Its settings, engines and directory.
        drain_timeout: What open requests of the one before get, in seconds.
    """

    launch: LaunchConfig
    drain_timeout: float


class DropModel(msgspec.Struct, frozen=True, tag=True):
    """This model will never be ready.

    Attributes:
        generation: Which.
    """

    generation: int


class TellSwap(msgspec.Struct, frozen=True, tag=True):
    """For whoever asks how a swap proceeds."""

    status: SwapStatus


class TakeTurn(msgspec.Struct, frozen=True, tag=True):
    """Which API process looks for a request that kills an engine from now on, see `Dead.turn`.

    Attributes:
        engine: Which life of the engine this is about.
        turn: The process's number; None: all go on.
    """

    engine: EngineId
    turn: int | None


Order = Reload | HoldRequests | OpenModel | DropModel | TellSwap | TakeTurn


class OrderReader:
    """The receiving end.

    Args:
        fd: Of the pipe; it is closed with this.
    """

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self._unread = b""
        self._decoder: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)

    def read(self) -> list[Order]:
        """Orders since the last call."""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.fd, 65536):
                self._unread += chunk
        *lines, self._unread = self._unread.split(b"\n")
        return [self._decoder.decode(line) for line in lines if line]

    def close(self) -> None:
        """No more orders."""
        os.close(self.fd)


def send_order(fd: int, order: Order) -> None:
    """Write an order. Whoever is gone, or has read nothing for minutes, gets none: it is replaced, and its successor is
    told anew."""
    with contextlib.suppress(BlockingIOError, BrokenPipeError):
        os.write(fd, msgspec.json.encode(order) + b"\n")
