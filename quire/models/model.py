"""What a runner asks of a model, and how one is built from its spec."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from quire.attention.backend import AttentionBackend
from quire.collectives.stream import Stream, StreamSink, StreamSource
from quire.layers.factory import LayerFactory
from quire.layers.positions import Positions
from quire.models.lent import Lent
from quire.models.registry import ARCHITECTURES, HEADS
from quire.models.spec import ModelSpec


class Model(Protocol):
    """A decoder: tokens to hidden states, and hidden states to logits for the positions that are read.

    Attributes:
        has_logits: Whether it makes logits; not, where another stage does.
    """

    @property
    def has_logits(self) -> bool: ...

    def hidden(self, tokens: Tensor, positions: Positions, attention: AttentionBackend) -> Tensor:
        """Tokens [tokens] int64 → [tokens, hidden], normed. The backend must have been prepared for these rows."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] → [n, vocab_size] in the model's dtype."""
        ...


class Decoder(Protocol):
    """What a family offers: a decoder in parts, of which a pipeline stage computes some."""

    def embed(self, tokens: Tensor, positions: Positions) -> Stream:
        """Tokens [tokens] int64 → the stream before the first block."""
        ...

    def blocks(self, stream: Stream, positions: Positions, attention: AttentionBackend) -> Iterator[Stream]:
        """The stream behind each of this rank's blocks, in order; the next one uses it up."""
        ...

    def finish(self, stream: Stream) -> Tensor:
        """[tokens, hidden], normed, of the stream behind the last block."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """See Model."""
        ...


class StreamReader(Protocol):
    """Reads the residual streams of a step beside the model."""

    def read(self, number: int, stream: Stream) -> None:
        """The stream that enters layer `number`, or behind the last layer their number; it may not be kept."""
        ...

    def finish(self) -> None:
        """That was the last one of this step."""
        ...


class _Nobody:
    """A StreamReader."""

    def read(self, number: int, stream: Stream) -> None:
        """No."""

    def finish(self) -> None:
        """Nothing was read."""


class Stage:
    """A Model, or the part of one whose stream comes from another stage, or goes on to one.

    Args:
        decoder: This rank's part.
        before: The stage before this one; None: this is the first.
        after: The next stage; None: this is the last. Before that, there are no hidden states but the stream's.

    Attributes:
        reader: Reads the streams of a model that is whole.
        has_logits: Whether this is the last stage. Elsewhere `logits` returns what it is given.
    """

    def __init__(self, decoder: Decoder, before: StreamSource | None, after: StreamSink | None) -> None:
        self._decoder = decoder
        self._before = before
        self._after = after
        self.reader: StreamReader = _Nobody()
        self.has_logits = after is None
        self.embed = decoder.embed

    def hidden(self, tokens: Tensor, positions: Positions, attention: AttentionBackend) -> Tensor:
        before, after = self._before, self._after
        stream = self._decoder.embed(tokens, positions) if before is None else before.receive(len(tokens))
        stream = self._through_blocks(stream, positions, attention)
        if after is None:
            return self._decoder.finish(stream)
        after.send(stream)
        return stream.x

    def logits(self, hidden: Tensor) -> Tensor:
        """See Model."""
        return self._decoder.logits(hidden) if self.has_logits else hidden

    def _through_blocks(self, stream: Stream, positions: Positions, attention: AttentionBackend) -> Stream:
        """The stream behind the last block."""
        reader, last = self.reader, stream
        reader.read(0, last)
        for number, last in enumerate(self._decoder.blocks(stream, positions, attention), 1):
            reader.read(number, last)
        reader.finish()
        return last


def build_model(
    spec: ModelSpec,
    factory: LayerFactory,
    before: StreamSource | None = None,
    after: StreamSink | None = None,
    lent: Lent | None = None,
) -> Stage:
    """A model of this spec, without its weights: `factory.layers` load them.

    Args:
        spec: Of the model.
        factory: Builds its layers.
        before, after: See Stage.
        lent: What a draft head reads of the model that it is for; None: this is no head.
    """
    module, name = (ARCHITECTURES if spec.head is None else HEADS)[spec.architecture].split(":")
    build = getattr(importlib.import_module(module), name)
    decoder: Decoder = build(spec, factory) if spec.head is None else build(spec, factory, lent)
    return Stage(decoder, before, after)
