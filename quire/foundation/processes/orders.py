"""What a supervisor tells an API process while it runs: JSON lines through a pipe."""

from __future__ import annotations

import msgspec

from quire.foundation.config import Config
from quire.foundation.processes.launch import LaunchConfig, SwapStatus
from quire.foundation.processes.pipe_lines import LineReader, decoded


class Reload(msgspec.Struct, frozen=True, tag=True):
    """Serve what the settings say, which were read again. `asked` are the settings before choices were made."""

    asked: Config


class HoldRequests(msgspec.Struct, frozen=True, tag=True):
    """Let new requests wait for `hold_timeout` seconds, and disconnect from the served model once its open requests
    have ended, which get `drain_timeout` seconds."""

    drain_timeout: float
    hold_timeout: float


class OpenModel(msgspec.Struct, frozen=True, tag=True):
    """Serve this model once its engines are ready; open requests of the one before then get `drain_timeout` seconds."""

    launch: LaunchConfig
    drain_timeout: float


class DropModel(msgspec.Struct, frozen=True, tag=True):
    """Forget the model of this generation, which will never be ready."""

    generation: int


class TellSwap(msgspec.Struct, frozen=True, tag=True):
    """Tell how a swap proceeds, for whoever asks."""

    status: SwapStatus


Order = Reload | HoldRequests | OpenModel | DropModel | TellSwap


_decoder: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)


def read_orders(lines: LineReader) -> list[Order]:
    """Orders since the last call. An order that cannot be read is logged and left out."""
    return decoded(lines.read(), _decoder, "An order of the supervisor")
