"""The architecture of GPT-2: learned positions, layer norms, and an MLP without a gate."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from quire.compute.attention.backend import AttentionBackend
from quire.compute.collectives.delta import Delta, Stream
from quire.models.layers.factory import LayerFactory
from quire.models.layers.rotary import Positions
from quire.models.projections import build_attention, build_mlp
from quire.models.spec import ModelSpec


class GPT2:
    """Embeddings of tokens and positions, blocks, norm and head."""

    def __init__(self, spec: ModelSpec, build: LayerFactory) -> None:
        self._embed = build.at(first=True, last=spec.tie_embeddings).embedding(
            "transformer.wte", spec.vocab_size, spec.hidden
        )
        self._positions = build.at(first=True).positions("transformer.wpe", spec.max_model_len, spec.hidden)
        self._blocks = [Block(spec, build, layer) for layer in build.own_layers(len(spec.layers))]
        self._norm = build.at(last=True).layer_norm("transformer.ln_f", spec.hidden, spec.norm.eps)
        tied = self._embed if spec.tie_embeddings else None
        self._head = build.at(last=True).head("lm_head", tied, spec.vocab_size, spec.hidden)

    def embed(self, tokens: Tensor, positions: Positions) -> Stream:
        return Stream(self._embed(tokens), self._positions(positions.own))

    def blocks(self, stream: Stream, positions: Positions, attention: AttentionBackend) -> Iterator[Stream]:
        x, delta = stream
        for block in self._blocks:
            delta = block(x, delta, attention)
            yield Stream(x, delta)

    def finish(self, stream: Stream) -> Tensor:
        return self._norm(*stream)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)


class Block:
    """x += attention(norm(x)); x += mlp(norm(x)). The next norm adds each sum, as in decoder.Block."""

    def __init__(self, spec: ModelSpec, build: LayerFactory, layer: int) -> None:
        norm = spec.layers[layer].norms
        before_attention, before_mlp = (f"{spec.layer_name(layer)}.{name}" for name in spec.family.modules.norms)
        self._attention_norm = build.layer_norm(before_attention, spec.hidden, norm.eps)
        self._attention = build_attention(spec, build, layer)
        self._mlp_norm = build.layer_norm(before_mlp, spec.hidden, norm.eps)
        self._mlp = build_mlp(spec, build, layer)

    def __call__(self, x: Tensor, delta: Delta | None, attention: AttentionBackend) -> Delta:
        """Add `delta` to x [tokens, hidden] in place, and return the next delta, which is not added yet."""
        delta = self._attention(self._attention_norm(x, delta), None, attention)
        return self._mlp(self._mlp_norm(x, delta))
