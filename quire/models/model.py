"""The interface between runner and model, and the builder of a model from its spec."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire.compute.attention.backend import AttentionBackend
from quire.compute.collectives.delta import Stream, StreamSink, StreamSource
from quire.errors import ConfigError
from quire.models.layers.factory import LayerFactory
from quire.models.layers.rotary import Positions
from quire.models.lent import Lent
from quire.models.spec import ModelSpec


class MediaVectors(NamedTuple):
    """What stands in place of the embeddings of tokens that stand for images.

    Attributes:
        places: [n] int64, indices of these tokens in the step.
        vectors: [n, hidden]; wider by `hidden` for each of the first layers whose output images are added to
            (DeepStack, Meng et al. 2024).
    """

    places: Tensor
    vectors: Tensor


class Model(Protocol):
    """A decoder: tokens to hidden states, and hidden states to logits for the positions that are read.

    Attributes:
        has_logits: Whether the model makes logits; False if another pipeline stage does.
    """

    @property
    def has_logits(self) -> bool: ...

    def hidden(
        self, tokens: Tensor, positions: Positions, attention: AttentionBackend, media: MediaVectors | None = None
    ) -> Tensor:
        """Compute normed hidden states: tokens [tokens] int64 → [tokens, hidden].

        The backend must have been prepared for these rows. `media` takes the place of some tokens' embeddings.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits: hidden states [n, hidden] → [n, vocab_size], in the model's dtype."""
        ...


class DecoderParts(Protocol):
    """A decoder in parts, so that a pipeline stage can compute some of them."""

    def embed(self, tokens: Tensor, positions: Positions) -> Stream:
        """Return the stream before the first block for tokens [tokens] int64."""
        ...

    def blocks(self, stream: Stream, positions: Positions, attention: AttentionBackend) -> Iterator[Stream]:
        """Yield the stream after each of this rank's blocks, in order; the next block overwrites it."""
        ...

    def finish(self, stream: Stream) -> Tensor:
        """Norm the stream after the last block, and return hidden states [tokens, hidden]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits: hidden states [n, hidden] → [n, vocab_size], in the model's dtype."""
        ...


class StreamReader(Protocol):
    """Reads the residual streams of a step while the model computes it."""

    def read(self, number: int, stream: Stream) -> None:
        """Read the stream that enters layer `number`, or leaves the last layer if `number` is the number of layers.

        The reader must copy what it needs, since the next layer overwrites the stream.
        """
        ...

    def finish(self, hidden: Tensor) -> None:
        """End the step; all its streams have been read. `hidden` are the normed states of the last one."""
        ...


class Stage:
    """A Model, or the part of one that a pipeline stage computes.

    Args:
        decoder: This rank's part.
        before: Receives the stream from the previous stage; None: this is the first stage.
        after: Sends the stream to the next stage; None: this is the last stage. The other stages return the stream
            itself as hidden states.
        deep: The layers, counted from 0, whose inputs images add vectors to.

    Attributes:
        reader: Reads the streams of a model that is not divided into stages; None: nothing reads them.
        has_logits: Whether this is the last stage. In all others, `logits` returns its argument.
    """

    def __init__(
        self, decoder: DecoderParts, before: StreamSource | None, after: StreamSink | None, deep: Sequence[int] = ()
    ) -> None:
        self._decoder = decoder
        self._deep = deep
        self._before = before
        self._after = after
        self.reader: StreamReader | None = None
        self.has_logits = after is None
        self.embed = decoder.embed

    def hidden(
        self, tokens: Tensor, positions: Positions, attention: AttentionBackend, media: MediaVectors | None = None
    ) -> Tensor:
        before, after = self._before, self._after
        stream = self._decoder.embed(tokens, positions) if before is None else before.receive(len(tokens))
        deep: Sequence[Tensor] = ()
        if media is not None:
            first, *deep = torch.split(media.vectors, stream.x.shape[1], dim=1)
            stream.x.index_copy_(0, media.places, first)
        blocks = self._decoder.blocks(stream, positions, attention)
        if media is not None and deep:
            own = getattr(self._decoder, "with_vectors", None)  # of decoders that are one block
            blocks = own(blocks, media.places, deep) if own else self._with_vectors(blocks, media.places, deep)
        stream = self._through_blocks(stream, blocks)
        if after is None:
            hidden = self._decoder.finish(stream)
            if self.reader is not None:
                self.reader.finish(hidden)
            return hidden
        after.send(stream)
        return stream.x

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits: hidden states [n, hidden] → [n, vocab_size]. All stages but the last return `hidden`."""
        return self._decoder.logits(hidden) if self.has_logits else hidden

    def _through_blocks(self, stream: Stream, blocks: Iterator[Stream]) -> Stream:
        reader, last = self.reader, stream
        if reader is not None:
            reader.read(0, last)
        for number, last in enumerate(blocks, 1):
            if reader is not None:
                reader.read(number, last)
        return last

    def _with_vectors(self, blocks: Iterator[Stream], places: Tensor, deep: Sequence[Tensor]) -> Iterator[Stream]:
        """Yield the stream after each block, with the vectors of images added to what some layers read."""
        rest = dict(zip(self._deep, deep, strict=True))
        for number, stream in enumerate(blocks, 1):
            if number in rest:
                stream.x.index_add_(0, places, rest.pop(number))
            yield stream
        if rest:
            raise ConfigError("Images are added to what more layers read than the first pipeline stage has.")


def build_model(
    spec: ModelSpec,
    factory: LayerFactory,
    before: StreamSource | None = None,
    after: StreamSink | None = None,
    lent: Lent | None = None,
) -> Stage:
    """Build a model of this spec without its weights, which `factory.layers` load.

    Args:
        spec: The model's configuration.
        factory: Builds the model's layers.
        before, after: The links to the previous and the next pipeline stage; None: there is no such stage.
        lent: What the target model lends to a draft head; None: the model is not a draft head.
    """
    module, name = spec.family.decoder.split(":")
    build = getattr(importlib.import_module(module), name)
    decoder: DecoderParts = build(spec, factory) if spec.head is None else build(spec, factory, lent)
    return Stage(decoder, before, after, getattr(spec.vision, "deep", ()))
