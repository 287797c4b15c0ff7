"""What engine and ranks say to one another: the engine to all of them at once, and each rank to the engine."""

from __future__ import annotations

import zlib

import msgspec

from quire.foundation.messages.workers import DeviceLimits, Order, OrderDone, Plan, Result


class Blocks(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """KV blocks on the device and on the host, and states, that a rank has room for, or, in return, that all ranks
    get."""

    device: int
    host: int
    states: int = 0


class Offer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What a rank tells all others at the start, where they share memory of their cards."""

    data: bytes


class Offers(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What all ranks have offered, by rank."""

    data: list[bytes]


class Bitmasks(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """TokenBitmasks for ranks: the engine's may be views, which a decoder cannot tell from bytes."""

    step: int
    rows: list[int]
    bits: list[bytes]


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Tells ranks that there is no more to do."""


class StepDone(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What a rank says of a step whose result another rank sends.

    Attributes:
        step: The step's number.
        tokens: The `fingerprint` of its result; 0 if nothing is sampled.
        ready_host_blocks: This rank's, as in Result.
    """

    step: int
    tokens: int = 0
    ready_host_blocks: int = 0


ToRanks = Plan | Bitmasks | Blocks | Offers | Order | Stop
FromRank = Blocks | DeviceLimits | Offer | OrderDone | Result | StepDone


def fingerprint(result: Result) -> int:
    """A checksum of what a rank has sampled in a step: it differs if ranks have sampled different tokens."""
    return zlib.crc32(msgspec.msgpack.encode((result.counts, result.tokens, len(result.errors))))
