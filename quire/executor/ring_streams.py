"""The stream between two pipeline stages of one machine, through a ring of messages."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.collectives.stream import StageLinks, Stream
from quire.executor.message_ring import RingReader, RingWriter
from quire.executor.stage_rings import open_reader, open_writer
from quire.processes.launch import StageEnds


class RingSink:
    """To the next stage."""

    def __init__(self, ring: RingWriter) -> None:
        self._ring = ring

    def send(self, stream: Stream) -> None:
        assert stream.delta is not None, "a stage without blocks"
        self._ring.write(b"".join(map(_bytes, (stream.x, stream.delta))))


class RingSource:
    """From the stage before.

    Args:
        ring: What a RingSink writes to.
        hidden, dtype: Of the stream.
    """

    def __init__(self, ring: RingReader, hidden: int, dtype: torch.dtype) -> None:
        self._ring = ring
        self._hidden = hidden
        self._dtype = dtype

    def receive(self, tokens: int) -> Stream:
        both = torch.frombuffer(bytearray(self._ring.read()), dtype=self._dtype)
        x, delta = both.view(2, tokens, self._hidden).unbind()
        return Stream(x, delta)


def ring_links(ends: StageEnds, hidden: int, dtype: torch.dtype) -> StageLinks:
    """A rank's links to the stages beside its own."""
    return StageLinks(
        None if ends.before is None else RingSource(open_reader(ends.before), hidden, dtype),
        None if ends.after is None else RingSink(open_writer(ends.after)),
    )


def _bytes(x: Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()
