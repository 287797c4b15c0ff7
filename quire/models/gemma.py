"""The architecture of Gemma 2 and 3.

Norms stand on both sides of attention and MLP, the embedding is scaled, logits are bounded, and layers with a window
may have a rotary embedding of their own.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from quire.compute.attention.backend import AttentionBackend
from quire.compute.collectives.delta import Delta, Stream
from quire.compute.kernels.dispatch import kernel
from quire.models.layers.factory import LayerFactory
from quire.models.layers.norm import RMS
from quire.models.layers.rotary import Angles, Positions
from quire.models.projections import build_attention, build_mlp
from quire.models.rope import Rotaries
from quire.models.spec import ModelSpec


class Gemma:
    """Embedding times sqrt(hidden), blocks, norm and head."""

    def __init__(self, spec: ModelSpec, build: LayerFactory) -> None:
        self._embed = build.at(first=True, last=spec.tie_embeddings).embedding(
            "model.embed_tokens", spec.vocab_size, spec.hidden, spec.hidden**0.5
        )
        own = build.own_layers(len(spec.layers))
        self._rotaries = Rotaries(spec.layers[own.start : own.stop], build.options)
        self._blocks = [Block(spec, build, layer) for layer in own]
        self._norm = build.at(last=True).norm("model.norm", spec.hidden, RMS(spec.norm.eps, unit_offset=True))
        tied = self._embed if spec.tie_embeddings else None
        self._head = build.at(last=True).head("lm_head", tied, spec.vocab_size, spec.hidden)
        self._cap = spec.logit_cap
        self._soft_cap = kernel("soft_cap", build.options.device.type)

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
        logits = self._head(hidden)
        if self._cap is not None:
            self._soft_cap(logits, self._cap)
        return logits


class Block:
    """x += norm(attention(norm(x))); x += norm(mlp(norm(x))). The next norm adds each sum, as in decoder.Block."""

    def __init__(self, spec: ModelSpec, build: LayerFactory, layer: int) -> None:
        norm = RMS(spec.layers[layer].norms.eps, unit_offset=True)
        names = [f"{spec.layer_name(layer)}.{name}" for name in spec.family.modules.norms]
        self._attention = build_attention(spec, build, layer)
        self._before_attention = build.norm(names[0], spec.hidden, norm, self._attention.row_form)
        self._after_attention = build.norm(names[1], spec.hidden, norm)
        self._mlp = build_mlp(spec, build, layer)
        self._before_mlp = build.norm(names[2], spec.hidden, norm, self._mlp.row_form)
        self._after_mlp = build.norm(names[3], spec.hidden, norm)

    def __call__(self, x: Tensor, delta: Delta | None, angles: Angles | None, attention: AttentionBackend) -> Tensor:
        """Add `delta` to x [tokens, hidden] in place, and return the next delta, which is not added yet."""
        delta = self._after_attention(self._attention(self._before_attention.rows(x, delta), angles, attention))
        return self._after_mlp(self._mlp(self._before_mlp.rows(x, delta)))
