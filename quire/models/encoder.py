"""An encoder: embeddings of tokens, positions and token types; blocks; and maybe a norm and a head."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quire.compute.attention.backend import AttentionBackend
from quire.compute.collectives.delta import Stream, added
from quire.models.blocks import Block, build_block
from quire.models.layers.factory import LayerFactory
from quire.models.layers.rotary import Positions
from quire.models.layers.text_head import TextHeadLayers
from quire.models.rope import Rotaries
from quire.models.spec import ModelSpec


class Encoder:
    """Every architecture whose layers see whole texts, to both sides of a token."""

    def __init__(self, spec: ModelSpec, build: LayerFactory) -> None:
        names, first, last = spec.family.modules, build.at(first=True), build.at(last=True)
        width = spec.embedding_width or spec.hidden
        self._words = first.embedding(names.embedding, spec.vocab_size, width, spec.embedding_scale)
        self._positions = self._types = self._projection = self._embedding_norm = self._norm = self._head = None
        if spec.learned_positions:
            count = spec.max_model_len + spec.position_offset
            self._positions = first.positions(names.positions, count, width, spec.position_offset)
        self._reads_types = spec.token_types > 1
        if spec.token_types:
            self._types = first.positions(names.token_types, spec.token_types, width)
        if spec.embedding_norm:
            self._embedding_norm = first.stream_norm(names.embedding_norm, width, spec.norm)
        if spec.embedding_width:
            self._projection = first.whole(names.embedding_projection, spec.hidden, width, bias=True)
        own = build.own_layers(len(spec.layers))
        self._rotaries = Rotaries(spec.layers[own.start : own.stop], build.options)
        built: dict[str, Block] = {}  # layers that share their weights are one
        for layer in own:
            if spec.layer_name(layer) not in built:
                built[spec.layer_name(layer)] = build_block(spec, build, layer)
        self._blocks = [built[spec.layer_name(layer)] for layer in own]
        if names.norm:
            self._norm = last.stream_norm(names.norm, spec.hidden, spec.norm)
        if spec.text_head is not None:
            self._head = TextHeadLayers(spec.text_head, spec.hidden, spec.norm, last)

    def embed(self, tokens: Tensor, positions: Positions) -> Stream:
        x = self._words(tokens)
        if self._types is not None:
            types = positions.types if self._reads_types else None
            added(x, self._types(torch.zeros_like(tokens) if types is None else types))
        delta = None if self._positions is None else self._positions(positions.own)
        if self._embedding_norm is not None:
            x, delta = self._embedding_norm(x, delta), None
        if self._projection is not None:
            x = self._projection(x)
        return Stream(x, delta)

    def blocks(self, stream: Stream, positions: Positions, attention: AttentionBackend) -> Iterator[Stream]:
        for block, angles in zip(self._blocks, self._rotaries(positions), strict=True):
            stream = block(*stream, angles, attention)
            yield stream

    def finish(self, stream: Stream) -> Tensor:
        return stream.x if self._norm is None else self._norm(*stream)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the head's values of states [n, hidden] → [n, outputs]; without a head, the states themselves."""
        return hidden if self._head is None else self._head(hidden)
