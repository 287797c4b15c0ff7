"""What one layer of a decoder is: a mixer of tokens, an MLP or experts, and norms. Frozen plain data without torch.

Each part says how many weights it has, what it stores of a token, what a rank's part of it is, and over how many ranks
it can be divided. All that is planned for a model is a sum or a maximum over its layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from quire.models.rope_spec import RopeSpec


class Weights(NamedTuple):
    """Numbers of weights.

    Attributes:
        linear: In projections, which are what quantization changes.
        other: In biases, norms and routers.
    """

    linear: int
    other: int = 0


@dataclass(frozen=True)
class AttentionSpec:
    """Attention over a KV cache.

    Attributes:
        inputs: Width of what queries, keys and values are projected from.
        outputs: Width of what comes out: the residual stream's.
        heads, kv_heads: Query heads, and KV heads, which divide them.
        head_dim: Width of one head; `heads * head_dim` may differ from `inputs`.
        window: How many tokens a token sees, itself included; None for all before it.
        scale: What products of queries and keys are multiplied with.
        cap: Bound c of scores: c · tanh(x / c). None for no bound.
        rope: How positions turn queries and keys; None if they do not.
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
        """Number of weights."""
        qkv = self.query_width + 2 * self.kv_width
        biases = self.qkv_bias * qkv + self.out_bias * self.outputs
        return Weights(self.inputs * qkv + self.query_width * self.outputs, biases + self.qk_norm * 2 * self.head_dim)

    @property
    def cached_elements(self) -> int:
        """Elements of the KV cache that a token takes: its keys and values."""
        return 2 * self.kv_width

    @property
    def score_flops(self) -> int:
        """Floating-point operations for each pair of a query and a position that it sees."""
        return 4 * self.query_width

    def divides(self, size: int) -> bool:
        """Whether the heads can be divided over so many ranks; KV heads that are fewer are several ranks' at once."""
        return self.heads % size == 0 and (self.kv_heads % size == 0 or size % self.kv_heads == 0)

    def divided(self, size: int) -> AttentionSpec:
        """One of `size` ranks' part."""
        return replace(self, heads=self.heads // size, kv_heads=max(1, self.kv_heads // size))


@dataclass(frozen=True)
class MlpSpec:
    """down(act(up(x))), or with a gate down(act(gate(x)) · up(x)).

    Attributes:
        hidden: Width of the residual stream.
        width: Width between the projections.
        activation: config.json's name of the activation.
        gated: Whether there is a gate.
        bias: Whether the projections have biases.
    """

    hidden: int
    width: int
    activation: str = "silu"
    gated: bool = True
    bias: bool = False

    def weights(self) -> Weights:
        """Number of weights."""
        up = (2 if self.gated else 1) * self.width
        return Weights(self.hidden * (up + self.width), self.bias * (up + self.hidden))

    def divides(self, size: int) -> bool:
        """Whether the width can be divided over so many ranks."""
        return self.width % size == 0

    def divided(self, size: int) -> MlpSpec:
        """One of `size` ranks' part."""
        return replace(self, width=self.width // size)


@dataclass(frozen=True)
class MixtureSpec:
    """Gated experts in place of an MLP (mixture of experts), to some of which a router sends each token.

    Attributes:
        hidden: Width of the residual stream.
        width: Width of one expert.
        count: How many experts the router chooses from.
        chosen: How many experts each token goes to.
        renormalise: Whether the weights of the chosen experts are scaled to the sum 1.
        of_others: How many of the experts other ranks have; 0 in a whole model.
        engines: How many engines' tokens come to these experts.
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
        """How many experts' weights are here."""
        return self.count - self.of_others

    @property
    def expert_weights(self) -> int:
        """Number of weights of one expert."""
        return 3 * self.hidden * self.width

    def weights(self) -> Weights:
        """Number of weights of the experts that are here, and of the router."""
        return Weights(self.own * self.expert_weights, self.hidden * self.count)

    def divides(self, size: int) -> bool:
        """Whether each expert's width can be divided over so many ranks."""
        return self.width % size == 0

    def divided(self, size: int) -> MixtureSpec:
        """One of `size` ranks' part, which has a part of each expert."""
        return replace(self, width=self.width // size)


@dataclass(frozen=True)
class NormSpec:
    """Norms of the residual stream.

    Attributes:
        kind: A root mean square norm, or a layer norm, which has a bias.
        eps: What is added to the mean square or the variance.
        unit_offset: Whether weights are stored less one.
        number: How many there are.
    """

    kind: Literal["rms", "layer"]
    eps: float
    unit_offset: bool = False
    number: int = 1

    def weights(self, hidden: int) -> Weights:
        """Number of weights for a stream so wide."""
        return Weights(0, self.number * hidden * (2 if self.kind == "layer" else 1))


@dataclass(frozen=True)
class LayerSpec:
    """One layer.

    Attributes:
        mixer: What lets tokens see one another.
        mlp: What is computed of each token by itself.
        norms: The layer's norms of the residual stream.
    """

    mixer: AttentionSpec
    mlp: MlpSpec | MixtureSpec
    norms: NormSpec

    def weights(self) -> Weights:
        """Number of weights."""
        parts = self.mixer.weights(), self.mlp.weights(), self.norms.weights(self.mixer.outputs)
        return Weights(sum(part.linear for part in parts), sum(part.other for part in parts))

    def divided(self, size: int) -> LayerSpec:
        """One of `size` ranks' part."""
        return replace(self, mixer=self.mixer.divided(size), mlp=self.mlp.divided(size))

    @property
    def kind(self) -> LayerSpec:
        """The layer without what changes numbers only: layers of one kind run the same kernels."""
        return replace(self, mixer=replace(self.mixer, scale=1.0))
