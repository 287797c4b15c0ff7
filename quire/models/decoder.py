"""The decoder family: Llama and what differs from it by flags. Architecture only."""

from __future__ import annotations

from torch import Tensor

from quire.attention.backend import AttentionBackend
from quire.layers.attention import Heads
from quire.layers.factory import LayerFactory
from quire.layers.rotary import Angles, Rotary
from quire.models.frequencies import rotary_frequencies
from quire.models.spec import ModelSpec


class Decoder:
    """Embedding, blocks, norm and head."""

    def __init__(self, spec: ModelSpec, build: LayerFactory) -> None:
        self._embed = build.embedding("model.embed_tokens", spec.vocab_size, spec.hidden)
        self._rotary = Rotary(rotary_frequencies(spec.rope, spec.head_dim), build.place)
        self._blocks = [Block(spec, build, layer) for layer in range(spec.layers)]
        self._norm = build.norm("model.norm", spec.hidden, spec.norm_eps)
        tied = self._embed if spec.tie_embeddings else None
        self._head = build.head("lm_head", tied, spec.vocab_size, spec.hidden)

    def hidden(self, tokens: Tensor, positions: Tensor, attention: AttentionBackend) -> Tensor:
        """See Model."""
        x, delta = self._embed(tokens), None
        angles = self._rotary(positions)
        for block in self._blocks:
            delta = block(x, delta, angles, attention)
        return self._norm(x, delta)

    def logits(self, hidden: Tensor) -> Tensor:
        """See Model."""
        return self._head(hidden)


class Block:
    """x += attention(norm(x)); x += mlp(norm(x)).

    Each sum is left to the next norm, which adds and normalises in one pass: `delta` is what is still to be added.
    """

    def __init__(self, spec: ModelSpec, build: LayerFactory, layer: int) -> None:
        name = f"model.layers.{layer}"
        heads = Heads(spec.heads, spec.kv_heads, spec.head_dim)
        self._attention_norm = build.norm(f"{name}.input_layernorm", spec.hidden, spec.norm_eps)
        self._attention = build.attention(f"{name}.self_attn", layer, spec.hidden, heads, spec.qkv_bias, spec.out_bias)
        self._mlp_norm = build.norm(f"{name}.post_attention_layernorm", spec.hidden, spec.norm_eps)
        self._mlp = build.mlp(f"{name}.mlp", spec.hidden, spec.intermediate, spec.activation, spec.mlp_bias)

    def __call__(self, x: Tensor, delta: Tensor | None, angles: Angles, attention: AttentionBackend) -> Tensor:
        """The stream x [tokens, hidden], changed in place, and the delta still to be added → the next delta."""
        delta = self._attention(self._attention_norm(x, delta), angles, attention)
        return self._mlp(self._mlp_norm(x, delta))
