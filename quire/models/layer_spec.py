"""Describes one layer of a decoder as frozen plain data without torch: attention, an MLP or experts, and norms.

Each part says how many weights it has, what it caches of a token, over how many ranks it can be divided, and what one
rank's part is. All plans for a model are sums or maximums over its layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from quire.compute.kernels.activations import SILU, Activation
from quire.compute.kernels.routing import Routing
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
class QKNormSpec:
    """The norms of queries and keys, with the epsilon of the layer's other norms.

    Attributes:
        kind: `rms` for a root mean square norm, or `layer` for a layer norm.
        whole: Whether all heads of queries, and all of keys, are normed together; otherwise, each by itself.
        weights: Whether all heads share the weights of one, or each head has its own, which may be stored in one tensor
            or in a module for each head (`by module`), or there are none.
        bias: Whether a layer norm has biases.
        behind_rope: Whether the rotation comes before the norm.
    """

    kind: Literal["rms", "layer"] = "rms"
    whole: bool = False
    weights: Literal["shared", "by head", "by module", "none"] = "shared"
    bias: bool = False
    behind_rope: bool = False

    def number(self, heads: int, head_dim: int) -> int:
        """Return the number of weights and biases of `heads` heads."""
        own = {"shared": 1, "none": 0}.get(self.weights, heads) * head_dim
        return own * (2 if self.bias else 1)


@dataclass(frozen=True)
class GateSpec:
    """A gate of attention's output: σ or softplus of a projection of attention's input.

    Attributes:
        activation: What the projection's outputs go through.
        by_head: Whether one number gates a head; otherwise, each of its elements has its own.
    """

    activation: Literal["sigmoid", "softplus"]
    by_head: bool = False


@dataclass(frozen=True)
class QueryScaleSpec:
    """A factor of queries that grows with their positions: 1 + growth · ln(1 + ⌊(position + first) / length⌋)."""

    growth: float
    length: int
    first: int = 0


@dataclass(frozen=True)
class AttentionSpec:
    """Attention over a KV cache.

    Attributes:
        inputs: Width of the input of the query, key and value projections.
        outputs: Width of the output, which is the residual stream's.
        heads, kv_heads: Numbers of query heads and KV heads; `heads` is a multiple of `kv_heads`.
        head_dim: Width of one head; `heads * head_dim` may differ from `inputs`.
        window: How many tokens a token sees, itself included; None: as `chunk` says.
        chunk: Positions are divided into chunks of this length, and a token sees the tokens of its own chunk up to
            itself; None: all tokens before it.
        scale: Factor of the products of queries and keys.
        cap: Bound c of scores, c · tanh(x / c); None: no bound.
        rope: How positions rotate queries and keys; None: they do not.
        qk_norm: The norms of queries and keys; None: they are not normed.
        qkv_bias, out_bias: Whether the projections have biases.
        clip: The bound of the magnitudes of queries, keys and values; None: no bound.
        gate: The gate of the output; None: there is no gate.
        query_scale: The factor of queries by their positions; None: no factor.
        slopes: For each head of the undivided layer, what scores fall by with each position of distance (ALiBi); empty:
            they do not depend on distances.
        sinks: Whether each query head has a learned score that its softmax starts with.
    """

    inputs: int
    outputs: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    chunk: int | None = None
    scale: float = 1.0
    cap: float | None = None
    rope: RopeSpec | None = None
    qk_norm: QKNormSpec | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    clip: float | None = None
    gate: GateSpec | None = None
    query_scale: QueryScaleSpec | None = None
    slopes: tuple[float, ...] = ()
    sinks: bool = False

    @property
    def reach(self) -> int | None:
        """Return how many tokens a token sees at most, itself included; None: all before it."""
        return self.window if self.chunk is None else self.chunk

    @property
    def query_width(self) -> int:
        """Width of the queries of all heads."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of the keys of all KV heads; values are as wide."""
        return self.kv_heads * self.head_dim

    @property
    def gate_width(self) -> int:
        """Width of the gate's projection; 0: there is no gate."""
        return 0 if self.gate is None else self.heads if self.gate.by_head else self.query_width

    def weights(self) -> Weights:
        qkv, norm = self.query_width + 2 * self.kv_width, self.qk_norm
        other = self.qkv_bias * qkv + self.out_bias * self.outputs + self.sinks * self.heads
        if norm is not None:
            other += norm.number(self.heads, self.head_dim) + norm.number(self.kv_heads, self.head_dim)
        return Weights(self.inputs * (qkv + self.gate_width) + self.query_width * self.outputs, other)

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
class SharedExpert:
    """An MLP beside a layer's experts, which all tokens go to.

    Attributes:
        mlp: The MLP.
        gated: Whether its output is multiplied by σ of a learned projection of the input to one number.
        factor: Factor of the sum of experts and the MLP.
    """

    mlp: MlpSpec
    gated: bool = False
    factor: float = 1.0

    def weights(self) -> Weights:
        linear, other = self.mlp.weights()
        return Weights(linear, other + self.gated * self.mlp.hidden)


@dataclass(frozen=True)
class MixtureSpec:
    """Gated experts in place of an MLP (mixture of experts); a router sends each token to some of them.

    Attributes:
        hidden: Width of the residual stream.
        width: Width of one expert.
        count: How many experts the router chooses from.
        routing: How the router sends tokens to experts.
        shared: The expert of all tokens; None: there is none.
        activation: What makes one value of a gate and an up of an expert.
        biases: Whether the products of experts have biases.
        of_others: How many of the experts are on other ranks; 0 in a whole model.
        engines: How many engines send their tokens to these experts.
    """

    hidden: int
    width: int
    count: int
    routing: Routing
    shared: SharedExpert | None = None
    activation: Activation = SILU
    biases: bool = False
    of_others: int = 0
    engines: int = 1

    @property
    def chosen(self) -> int:
        """How many experts each token goes to."""
        return self.routing.chosen

    @property
    def own(self) -> int:
        """Number of experts whose weights are on this rank."""
        return self.count - self.of_others

    @property
    def expert_weights(self) -> int:
        """Number of weights of one expert."""
        return 3 * self.hidden * self.width

    def weights(self) -> Weights:
        """Number of weights of this rank's experts, of the router, and of the shared expert."""
        linear, other = (0, 0) if self.shared is None else self.shared.weights()
        router = self.count * (self.hidden + self.routing.bias + self.routing.correction)
        biases = self.own * self.biases * (2 * self.width + self.hidden)
        return Weights(self.own * self.expert_weights + linear, router + biases + other)

    def divides(self, size: int, *, whole_experts: bool = False) -> bool:
        """Whether `size` ranks can have a part of each expert, or some whole experts each."""
        if self.shared is not None and not self.shared.mlp.divides(size):
            return False
        return size <= self.count if whole_experts else self.width % size == 0

    def divided(self, size: int) -> MixtureSpec:
        """Return the part of one of `size` ranks, which has a part of each expert."""
        return replace(self, width=self.width // size, shared=self._divided_shared(size))

    def with_whole_experts(self, size: int, own: int, engines: int) -> MixtureSpec:
        """Return the part of one of `size` ranks that has `own` of the experts, to which `engines` send tokens."""
        return replace(self, of_others=self.count - own, engines=engines, shared=self._divided_shared(size))

    def _divided_shared(self, size: int) -> SharedExpert | None:
        return None if self.shared is None else replace(self.shared, mlp=self.shared.mlp.divided(size))


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
    """Return the layer with other properties in some parts: `with_parts(layer, mixer={"qkv_bias": True})`."""
    return replace(layer, **{part: replace(getattr(layer, part), **values) for part, values in parts.items()})
