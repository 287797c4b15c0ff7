"""Describes one layer of a decoder as frozen plain data without torch: attention, an MLP or experts, and norms.

Each part says how many weights it has, what it caches of a token, over how many ranks it can be divided, and what one
rank's part is. All plans for a model are sums or maximums over its layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from quire.models.rope_spec import RopeSpec


class Weights(NamedTuple):
    """Numbers of weights.

    Attributes:
        linear: Number in projections, which are the weights that quantization changes.
        other: Number in biases, norms and routers.
    """

    linear: int
    other: int = 0


@dataclass(frozen=True)
class AttentionSpec:
    """Attention over a KV cache.

    Attributes:
        inputs: Width of the input of the query, key and value projections.
        outputs: Width of the output, which is the residual stream's.
        heads, kv_heads: Numbers of query heads and KV heads; `heads` is a multiple of `kv_heads`.
        head_dim: Width of one head; `heads * head_dim` may differ from `inputs`.
        window: How many tokens a token sees, itself included; None: all tokens before it.
        scale: Factor of the products of queries and keys.
        cap: Bound c of scores, c · tanh(x / c); None: no bound.
        rope: How positions rotate queries and keys; None: they do not.
        qk_norm: Whether queries and keys are normed, head by head.
        qkv_bias, out_bias: Whether the projections have biases.
    """

    inputs: int
    outputs: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    scale: float = 1.0
    cap: float | None = None
    rope: RopeSpec | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False

    @property
    def query_width(self) -> int:
        """Width of the queries of all heads."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of the keys of all KV heads; values are as wide."""
        return self.kv_heads * self.head_dim

    def weights(self) -> Weights:
        qkv = self.query_width + 2 * self.kv_width
        biases = self.qkv_bias * qkv + self.out_bias * self.outputs
        return Weights(self.inputs * qkv + self.query_width * self.outputs, biases + self.qk_norm * 2 * self.head_dim)

    @property
    def cached_elements(self) -> int:
        """Number of KV cache elements of one token: its keys and values in this layer."""
        return 2 * self.kv_width

    @property
    def score_flops(self) -> int:
        """Floating-point operations for each pair of a query and a position that it sees."""
        return 4 * self.query_width

    def divides(self, size: int) -> bool:
        """Whether the heads can be divided over `size` ranks. If there are fewer KV heads than ranks, several ranks
        share one.
        """
        return self.heads % size == 0 and (self.kv_heads % size == 0 or size % self.kv_heads == 0)

    def divided(self, size: int) -> AttentionSpec:
        """Return the part of one of `size` ranks."""
        return replace(self, heads=self.heads // size, kv_heads=max(1, self.kv_heads // size))


@dataclass(frozen=True)
class MlpSpec:
    """An MLP: down(act(up(x))), or with a gate down(act(gate(x)) · up(x)).

    Attributes:
        hidden: Width of the residual stream.
        width: Width between the projections.
        activation: config.json's name of the activation.
    """

    hidden: int
    width: int
    activation: str = "silu"
    gated: bool = True
    bias: bool = False

    def weights(self) -> Weights:
        up = (2 if self.gated else 1) * self.width
        parameters = 4 if self.activation == "xielu" else 0
        return Weights(self.hidden * (up + self.width), self.bias * (up + self.hidden) + parameters)

    def divides(self, size: int) -> bool:
        """Whether the width can be divided over `size` ranks."""
        return self.width % size == 0

    def divided(self, size: int) -> MlpSpec:
        """Return the part of one of `size` ranks."""
        return replace(self, width=self.width // size)


@dataclass(frozen=True)
class MixtureSpec:
    """Gated experts in place of an MLP (mixture of experts); a router sends each token to some of them.

    Attributes:
        hidden: Width of the residual stream.
        width: Width of one expert.
        count: How many experts the router chooses from.
        chosen: How many experts each token goes to.
        renormalise: Whether the weights of the chosen experts are scaled to the sum 1.
        of_others: How many of the experts are on other ranks; 0 in a whole model.
        engines: How many engines send their tokens to these experts.
    """

    hidden: int
    width: int
    count: int
    chosen: int
    renormalise: bool
    of_others: int = 0
    engines: int = 1

    @property
    def own(self) -> int:
        """Number of experts whose weights are on this rank."""
        return self.count - self.of_others

    @property
    def expert_weights(self) -> int:
        """Number of weights of one expert."""
        return 3 * self.hidden * self.width

    def weights(self) -> Weights:
        """Number of weights of this rank's experts and of the router."""
        return Weights(self.own * self.expert_weights, self.hidden * self.count)

    def divides(self, size: int) -> bool:
        """Whether each expert's width can be divided over `size` ranks."""
        return self.width % size == 0

    def divided(self, size: int) -> MixtureSpec:
        """Return the part of one of `size` ranks, which has a part of each expert."""
        return replace(self, width=self.width // size)


@dataclass(frozen=True)
class NormSpec:
    """The norms of the residual stream in one layer.

    Attributes:
        kind: `rms` for a root mean square norm, or `layer` for a layer norm.
        eps: Added to the mean square or the variance.
        unit_offset: Whether weights are stored minus one.
        weight, bias: Whether the norms have weights and biases; a bias is only a layer norm's.
        number: Number of norms.
        place: Where they stand: before attention and MLP, behind each, around each, or before both, which run in
            parallel.
    """

    kind: Literal["rms", "layer"]
    eps: float
    unit_offset: bool = False
    number: int = 1
    weight: bool = True
    bias: bool = False
    place: Literal["before", "behind", "around", "parallel"] = "before"

    def weights(self, hidden: int) -> Weights:
        """Number of weights if the stream is `hidden` wide."""
        return Weights(0, self.number * hidden * (self.weight + self.bias))


@dataclass(frozen=True)
class LayerSpec:
    """One layer of a decoder.

    Attributes:
        mixer: The attention, through which tokens see one another.
        mlp: The part that treats each token by itself.
        norms: The layer's norms of the residual stream.
    """

    mixer: AttentionSpec
    mlp: MlpSpec | MixtureSpec
    norms: NormSpec

    def weights(self) -> Weights:
        parts = self.mixer.weights(), self.mlp.weights(), self.norms.weights(self.mixer.outputs)
        return Weights(sum(part.linear for part in parts), sum(part.other for part in parts))

    def divided(self, size: int) -> LayerSpec:
        """Return the part of one of `size` ranks."""
        return replace(self, mixer=self.mixer.divided(size), mlp=self.mlp.divided(size))

    @property
    def kind(self) -> LayerSpec:
        """The layer without properties that change only numbers; layers of one kind run the same kernels."""
        return replace(self, mixer=replace(self.mixer, scale=1.0))


def with_parts(layer: LayerSpec, **parts: Mapping[str, Any]) -> LayerSpec:
    """Return the layer with other properties in some parts: `with_parts(layer, mixer={"qk_norm": True})`."""
    return replace(layer, **{part: replace(getattr(layer, part), **values) for part, values in parts.items()})
