"""The architecture of Llama and of all models that differ from it by flags only."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from quire.compute.attention.backend import AttentionBackend
from quire.compute.collectives.delta import Delta, Stream
from quire.models.layers.factory import LayerFactory
from quire.models.layers.norm import RMS
from quire.models.layers.rotary import Angles, Positions
from quire.models.projections import build_attention, build_mlp
from quire.models.rope import Rotaries
from quire.models.spec import ModelSpec


class Decoder:
    """Embedding, blocks, final norm and head."""

    def __init__(self, spec: ModelSpec, build: LayerFactory) -> None:
        modules = spec.family.modules
        self._embed = build.at(first=True, last=spec.tie_embeddings).embedding(
            modules.embedding, spec.vocab_size, spec.hidden
        )
        own = build.own_layers(len(spec.layers))
        self._rotaries = Rotaries(spec.layers[own.start : own.stop], build.options)
        self._blocks = [Block(spec, build, layer) for layer in own]
        self._norm = build.at(last=True).norm(modules.norm, spec.hidden, RMS(spec.norm.eps))
        tied = self._embed if spec.tie_embeddings else None
        self._head = build.at(last=True).head(modules.head, tied, spec.vocab_size, spec.hidden)

    def embed(self, tokens: Tensor, positions: Positions) -> Stream:
        return Stream(self._embed(tokens), None)

    def blocks(self, stream: Stream, positions: Positions, attention: AttentionBackend) -> Iterator[Stream]:
        x, delta = stream
        for block, angles in zip(self._blocks, self._rotaries(positions), strict=True):
            delta = block(x, delta, angles, attention)
            yield Stream(x, delta)

    def finish(self, stream: Stream) -> Tensor:
        return self._norm(*stream)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)


class Block:
    """x += attention(norm(x)); x += mlp(norm(x)).

    The next norm adds each sum, so that adding and norming take one pass; `delta` is the sum that is not added yet.
    """

    def __init__(self, spec: ModelSpec, build: LayerFactory, layer: int) -> None:
        norm = RMS(spec.layers[layer].norms.eps)
        before_attention, before_mlp = (f"{spec.layer_name(layer)}.{name}" for name in spec.family.modules.norms)
        self._attention = build_attention(spec, build, layer)
        self._attention_norm = build.norm(before_attention, spec.hidden, norm, self._attention.row_form)
        self._mlp = build_mlp(spec, build, layer)
        self._mlp_norm = build.norm(before_mlp, spec.hidden, norm, self._mlp.row_form)

    def __call__(self, x: Tensor, delta: Delta | None, angles: Angles | None, attention: AttentionBackend) -> Delta:
        """Add `delta` to x [tokens, hidden] in place, and return the next delta, which is not added yet."""
        delta = self._attention(self._attention_norm.rows(x, delta), angles, attention)
        return self._mlp(self._mlp_norm.rows(x, delta))
