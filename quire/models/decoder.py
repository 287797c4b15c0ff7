"""A decoder: embeddings of tokens, and maybe of positions; blocks; norm; and head."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from quire.compute.attention.backend import AttentionBackend
from quire.compute.collectives.delta import Stream
from quire.models.blocks import Block, build_block
from quire.models.layers.factory import LayerFactory
from quire.models.layers.rotary import Positions
from quire.models.layers.text_head import TextHeadLayers
from quire.models.rope import Rotaries
from quire.models.spec import ModelSpec


class Decoder:
    """Every architecture whose layers are attention and an MLP or experts. `block` builds one layer."""

    def __init__(
        self,
        spec: ModelSpec,
        build: LayerFactory,
        block: Callable[[ModelSpec, LayerFactory, int], Block] = build_block,
    ) -> None:
        modules, last = spec.family.modules, build.at(last=True)
        self._embed = build.at(first=True, last=spec.tie_embeddings).embedding(
            modules.embedding, spec.vocab_size, spec.hidden, spec.embedding_scale
        )
        self._positions = None
        if spec.learned_positions:
            count = spec.max_model_len + spec.position_offset
            self._positions = build.at(first=True).positions(
                modules.positions, count, spec.hidden, spec.position_offset
            )
        self._embedding_norm = None
        if spec.embedding_norm:
            self._embedding_norm = build.at(first=True).stream_norm(modules.embedding_norm, spec.hidden, spec.norm)
        own = build.own_layers(len(spec.layers))
        self._rotaries = Rotaries(spec.layers[own.start : own.stop], build.options)
        self._blocks = [block(spec, build, layer) for layer in own]
        self._norm = last.stream_norm(modules.norm, spec.hidden, spec.norm)
        self._logits = self._build_head(spec, last)

    def _build_head(self, spec: ModelSpec, build: LayerFactory) -> Callable[[Tensor], Tensor] | None:
        if spec.text_head is not None:
            return TextHeadLayers(spec.text_head, spec.hidden, spec.norm, build)
        if not spec.generates:
            return None
        tied = self._embed if spec.tie_embeddings else None
        head = build.head(spec.family.modules.head, tied, spec.vocab_size, spec.hidden, spec.head_bias)
        return build.changed_logits(head, spec.logit_scale, spec.logit_cap)

    def embed(self, tokens: Tensor, positions: Positions) -> Stream:
        if self._embedding_norm is not None:
            return Stream(self._embedding_norm(self._embed(tokens)), None)
        return Stream(self._embed(tokens), None if self._positions is None else self._positions(positions.own))

    def blocks(self, stream: Stream, positions: Positions, attention: AttentionBackend) -> Iterator[Stream]:
        for block, angles in zip(self._blocks, self._rotaries(positions), strict=True):
            stream = block(*stream, angles, attention)
            yield stream

    def finish(self, stream: Stream) -> Tensor:
        return self._norm(*stream)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden if self._logits is None else self._logits(hidden)
