"""What a supervisor tells an API process while it runs: JSON lines through a pipe. Plain data, and both ends of it."""

from __future__ import annotations

import logging

import msgspec

from quire.foundation.config import Config
from quire.foundation.processes.launch import LaunchConfig
from quire.foundation.processes.pipe_lines import LineReader, LineWriter, decoded
from quire.foundation.processes.swap_reports import SwapStatus

logger = logging.getLogger(__name__)


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


Order = Reload | HoldRequests | OpenModel | DropModel | TellSwap


class OrderReader:
    """The receiving end.

    Args:
        fd: Of the pipe; it is closed with this.
    """

    def __init__(self, fd: int) -> None:
        self._lines = LineReader(fd)
        self.fd = fd
        self._decoder: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)

    def read(self) -> list[Order]:
        """Orders since the last call. One that cannot be read is left out, and logged."""
        orders = []
        for order in decoded(self._lines.read(), self._decoder):
            if isinstance(order, Exception):
                logger.error("An order of the supervisor cannot be read, and is left out: %s.", order)
            else:
                orders.append(order)
        return orders

    def close(self) -> None:
        """Close the pipe: no more orders are read."""
        self._lines.close()


class OrderWriter:
    """The sending end. A process that is gone, or has read nothing for a long time, gets no more orders: it is
    replaced, and its successor is told anew.

    Args:
        fd: Of the pipe; it is closed with this.
    """

    def __init__(self, fd: int) -> None:
        self._lines = LineWriter(fd)

    def send(self, order: Order) -> None:
        """Give an order; never waits."""
        self._lines.send(msgspec.json.encode(order))

    def close(self) -> None:
        """Close the pipe: there are no more orders. More calls do nothing."""
        self._lines.close()
