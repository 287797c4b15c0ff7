"""The stream between two pipeline stages, as messages through a ring or over a network."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.compute.collectives.delta import StageLinks, Stream
from quire.foundation.processes.launch import StageEnds
from quire.runtime.executor.message_ring import MessageReader, MessageWriter
from quire.runtime.executor.stage_rings import open_reader, open_writer


class MessageSink:
    """Sends streams to the next stage."""

    def __init__(self, link: MessageWriter) -> None:
        self._link = link

    def send(self, stream: Stream) -> None:
        x, delta = stream.tensors()
        assert delta is not None, "a stage without blocks"
        self._link.write(_bytes(x) + _bytes(delta))


class MessageSource:
    """Receives streams from the stage before.

    Args:
        link: What a MessageSink writes to.
        hidden, dtype: Of the stream.
    """

    def __init__(self, link: MessageReader, hidden: int, dtype: torch.dtype) -> None:
        self._link = link
        self._hidden = hidden
        self._dtype = dtype

    def receive(self, tokens: int) -> Stream:
        both = torch.frombuffer(bytearray(self._link.read()), dtype=self._dtype)
        x, delta = both.view(2, tokens, self._hidden).unbind()
        return Stream(x, delta)


def stage_links(ends: StageEnds, hidden: int, dtype: torch.dtype) -> StageLinks:
    """A rank's links to the stages beside its own."""
    return StageLinks(
        None if ends.before is None else MessageSource(open_reader(ends.before), hidden, dtype),
        None if ends.after is None else MessageSink(open_writer(ends.after)),
    )


def _bytes(x: Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()
