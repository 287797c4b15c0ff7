"""The architecture of GPT-2: learned positions, layer norms, and an MLP without a gate."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from quire.compute.attention.backend import AttentionBackend
from quire.compute.collectives.delta import Delta, Stream
from quire.models.layer_spec import MlpSpec
from quire.models.layers.attention import Heads
from quire.models.layers.factory import LayerFactory, Outputs
from quire.models.layers.rotary import Positions
from quire.models.projections import attention_layer
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
        name, hidden, own = f"transformer.h.{layer}", spec.hidden, spec.layers[layer]
        assert isinstance(own.mlp, MlpSpec)
        width, eps = own.mlp.width, own.norms.eps
        heads = Heads(own.mixer.heads, own.mixer.kv_heads, own.mixer.head_dim)
        self._attention_norm = build.layer_norm(f"{name}.ln_1", hidden, eps)
        self._attention = build.attention(
            attention_layer(spec, build, layer),
            heads,
            build.qkv((f"{name}.attn.c_attn",), heads, hidden, True, transposed=True),
            build.row_parallel(f"{name}.attn.c_proj", hidden, Outputs(heads.query, heads.width), True, transposed=True),
        )
        self._mlp_norm = build.layer_norm(f"{name}.ln_2", hidden, eps)
        up = build.column_parallel((f"{name}.mlp.c_fc",), (width,), hidden, True, transposed=True)
        down = build.row_parallel(f"{name}.mlp.c_proj", hidden, width, True, transposed=True)
        self._mlp = build.plain_mlp(up, down, width, own.mlp.activation)

    def __call__(self, x: Tensor, delta: Delta | None, attention: AttentionBackend) -> Delta:
        """Add `delta` to x [tokens, hidden] in place, and return the next delta, which is not added yet."""
        delta = self._attention(self._attention_norm(x, delta), None, attention)
        return self._mlp(self._mlp_norm(x, delta))
