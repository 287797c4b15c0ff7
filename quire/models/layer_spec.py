"""Describes one layer of a model as frozen plain data without torch: attention, an MLP or experts, and norms.

Each part says how many weights it has, what it caches of a token, over how many ranks it can be divided, and what one
rank's part is. All plans for a model are sums or maximums over its layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from quire.compute.kernels.activations import SILU, Activation
from quire.compute.kernels.routing import Routing
from quire.models.recurrent_spec import NoMixerSpec, RecurrentSpec
from quire.models.rope_spec import RopeSpec
from quire.models.state_space_spec import Mamba2Spec
from quire.models.weight_numbers import Weights
from quire.scheduling.kvcache.cache_groups import FULL, CacheForm, Chunk, Plane, Reach, Window


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
        two_sided: Whether a token also sees the tokens behind it, with a window as many as before it. All tokens of a
            text are computed in one step then, and a layer's keys and values are of no use behind it.
        values: What becomes of values, as in `NormRopeForm`: they are projected, or also normed head by head without
            weights; or they are the keys' projection, normed so.
        value_dim: Width of a head's values, if they are narrower than `head_dim`; the cache has zeros behind them.
        value_scale: Factor of such values.
        source: The number of the layer whose keys and values are read; None: the layer has its own.
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
    two_sided: bool = False
    values: Literal["projected", "normed", "keys"] = "projected"
    value_dim: int | None = None
    value_scale: float = 1.0
    source: int | None = None

    @property
    def reach(self) -> Reach:
        """Return how far back tokens look."""
        if self.chunk is not None:
            return Chunk(self.chunk)
        return FULL if self.window is None else Window(self.window)

    @property
    def query_width(self) -> int:
        """Width of the queries of all heads."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of the keys of all KV heads; the cache has values as wide."""
        return self.kv_heads * self.head_dim

    @property
    def kv_projected(self) -> tuple[int, ...]:
        """Widths of the projections of the input to keys and values."""
        widths = self.kv_width, self.kv_heads * (self.value_dim or self.head_dim)
        return () if self.source is not None else widths[:1] if self.values == "keys" else widths

    @property
    def output_width(self) -> int:
        """Width of the results of all heads."""
        return self.heads * (self.value_dim or self.head_dim)

    @property
    def kv_projections(self) -> int:
        """Number of projections of the input to keys and values."""
        return len(self.kv_projected)

    @property
    def gate_width(self) -> int:
        """Width of the gate's projection; 0: there is no gate."""
        return 0 if self.gate is None else self.heads if self.gate.by_head else self.query_width

    def weights(self) -> Weights:
        qkv, norm = self.query_width + sum(self.kv_projected), self.qk_norm
        other = self.qkv_bias * qkv + self.out_bias * self.outputs + self.sinks * self.heads
        if norm is not None:
            other += norm.number(self.heads, self.head_dim)
            other += norm.number(self.kv_heads, self.head_dim) if self.source is None else 0
        return Weights(self.inputs * (qkv + self.gate_width) + self.output_width * self.outputs, other)

    @property
    def form(self) -> CacheForm:
        """Return what the layer caches of a token: nothing if it reads another layer's keys and values."""
        heads = self.kv_heads, self.head_dim
        if self.source is not None:
            return CacheForm()
        return CacheForm((Plane("keys", heads), Plane("values", heads)))

    def state_form(self) -> tuple[Plane, ...]:
        """Return the tensors of one sequence's state: none, as all that is cached belongs to a token."""
        return ()

    @property
    def read_width(self) -> int:
        """Elements of a token that attention reads, from its own cache or another layer's."""
        return 2 * self.kv_width

    @property
    def rotated(self) -> int:
        """Width of what RoPE rotates, or a share of it."""
        return self.head_dim

    @property
    def adapted_projections(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of each projection that adapters may change."""
        inner = self.query_width, *self.kv_projected, self.gate_width
        return (*((self.inputs, each) for each in inner if each), (self.output_width, self.outputs))

    @property
    def buffers(self) -> tuple[int, ...]:
        """Elements of a token in each of the buffers that attention holds at once."""
        changed = (self.query_width + self.kv_width) * (1 if self.qk_norm is None else 2)  # normed, then rotated
        projected = self.query_width + 2 * self.kv_width + self.gate_width
        return projected, changed, self.query_width, self.query_width

    @property
    def gpu_elements(self) -> int:
        """Elements of a token that attention holds at once on a GPU."""
        return 3 * self.query_width + 2 * self.kv_width + self.gate_width

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
class LatentSpec:
    """Attention whose keys and values are made of latents, one for each token (MLA; DeepSeek-AI 2024, "DeepSeek-V2",
    section 2.1).

    A head's key has a part that is made of the latent, and one that is rotated, which all heads share.

    Attributes:
        inputs: Width of the input.
        outputs: Width of the output, which is the residual stream's.
        heads: Number of query heads.
        query_rank: Width of the latent that queries are made of; None: they are made of the input.
        rank: Width of the latent that keys and values are made of.
        nope: Width of the part of a head that is not rotated.
        rotated: Width of the part that is rotated.
        value_dim: Width of a head's values.
        scale: Factor of the products of queries and keys.
        rope: How positions rotate queries and keys.
        query_scale: The factor of queries by their positions; None: no factor.
        bias: Whether the projections of the input and the output projection have biases.
        eps: Added to the mean squares of latents, which are normed.
        gate: The gate of the output, of whole heads; None: there is no gate.
    """

    inputs: int
    outputs: int
    heads: int
    query_rank: int | None
    rank: int
    nope: int
    rotated: int
    value_dim: int
    scale: float = 1.0
    rope: RopeSpec | None = None
    query_scale: QueryScaleSpec | None = None
    bias: bool = False
    eps: float = 1e-6
    gate: GateSpec | None = None

    reach: ClassVar[Reach] = FULL
    two_sided: ClassVar[bool] = False
    window: ClassVar[int | None] = None
    cap: ClassVar[float | None] = None
    slopes: ClassVar[tuple[float, ...]] = ()
    kv_heads: ClassVar[int] = 1
    source: ClassVar[int | None] = None

    @property
    def head_dim(self) -> int:
        """Width of a head's queries and keys."""
        return self.nope + self.rotated

    @property
    def cached_width(self) -> int:
        """Width of what the cache has of a token: the shared part of keys, which is rotated, and the latent."""
        return self.rotated + self.rank

    @property
    def form(self) -> CacheForm:
        """Return what the layer caches of a token."""
        return CacheForm((Plane("latents", (self.cached_width,)),))

    def state_form(self) -> tuple[Plane, ...]:
        """Return the tensors of one sequence's state: none, as all that is cached belongs to a token."""
        return ()

    @property
    def read_width(self) -> int:
        """Elements of a token that attention reads."""
        return self.cached_width

    @property
    def projections(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of each projection, of which the last but one makes keys and values of latents."""
        queries = self.heads * self.head_dim
        of_queries: tuple[tuple[int, int], ...] = ((self.inputs, queries),)
        if self.query_rank is not None:
            of_queries = (self.inputs, self.query_rank), (self.query_rank, queries)
        expanded = self.rank, self.heads * (self.nope + self.value_dim)
        return (*of_queries, (self.inputs, self.cached_width), expanded, (self.heads * self.value_dim, self.outputs))

    @property
    def adapted_projections(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of each projection that adapters may change."""
        *before, _, out = self.projections
        return (*before, *([] if self.gate is None else [(self.inputs, self.heads)]), out)

    @property
    def buffers(self) -> tuple[int, ...]:
        """Elements of a token in each of the buffers that attention holds at once."""
        absorbed = self.heads * self.cached_width
        return self.heads * self.head_dim, absorbed + 2 * self.cached_width, absorbed, absorbed

    @property
    def gpu_elements(self) -> int:
        """Elements of a token that attention holds at once on a GPU."""
        return sum(self.buffers)

    @property
    def score_flops(self) -> int:
        """Floating-point operations for each pair of a query and a position that it sees."""
        return 2 * self.heads * (self.cached_width + self.rank)

    def weights(self) -> Weights:
        linear = sum(inputs * outputs for inputs, outputs in self.projections)
        linear += 0 if self.gate is None else self.inputs * self.heads
        of_queries = self.query_rank or 0
        biases = self.bias * (of_queries + self.cached_width + self.outputs)
        return Weights(linear, of_queries + self.rank + biases)

    def divides(self, size: int) -> bool:
        """Whether the heads can be divided over `size` ranks, all of which have the whole latents."""
        return self.heads % size == 0

    def divided(self, size: int) -> LatentSpec:
        """Return the part of one of `size` ranks."""
        return replace(self, heads=self.heads // size)


@dataclass(frozen=True)
class HybridSpec(AttentionSpec):
    """Attention beside a selective state space, which read the same input (Falcon-LLM Team 2025, "Falcon-H1").

    Attributes:
        beside: The selective state space.
        factors: Factors of queries, keys and values.
    """

    beside: Mamba2Spec | None = None
    factors: tuple[float, float, float] = (1.0, 1.0, 1.0)

    @property
    def state_space(self) -> Mamba2Spec:
        """The selective state space."""
        assert self.beside is not None
        return self.beside

    def weights(self) -> Weights:
        own, other = super().weights(), self.state_space.weights()
        return Weights(own.linear + other.linear, own.other + other.other)

    def state_form(self) -> tuple[Plane, ...]:
        """Return the tensors of one sequence's state."""
        return self.state_space.state_form()

    @property
    def adapted_projections(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of each projection that adapters may change."""
        return *super().adapted_projections, *self.state_space.adapted_projections

    @property
    def buffers(self) -> tuple[int, ...]:
        """Elements of a token in each of the buffers that the layer holds at once."""
        return *super().buffers, *self.state_space.buffers

    @property
    def gpu_elements(self) -> int:
        """Elements of a token that the layer holds at once on a GPU."""
        return super().gpu_elements + self.state_space.gpu_elements

    def divides(self, size: int) -> bool:
        """Whether the heads of both can be divided over `size` ranks."""
        return super().divides(size) and self.state_space.divides(size)

    def divided(self, size: int) -> HybridSpec:
        """Return the part of one of `size` ranks."""
        own = replace(self, heads=self.heads // size, kv_heads=max(1, self.kv_heads // size))
        return replace(own, beside=self.state_space.divided(size))


Mixer = AttentionSpec | LatentSpec | RecurrentSpec | NoMixerSpec
"""The part of a layer through which tokens see one another."""


@dataclass(frozen=True)
class MlpSpec:
    """An MLP: down(act(up(x))), or with a gate down(act(gate(x)) · up(x)).

    Attributes:
        hidden: Width of the residual stream.
        width: Width between the projections.
        activation: config.json's name of the activation.
        gated: Whether there is a gate.
        bias: Whether the projections have biases.
        down_bias: Whether `down` has a bias even if the others have none.
        factors: Factors of what the gate's activation takes and of ups; empty: 1 each.
        limit: The activated gate is at most this, and ups between this and its negative; None: there is no limit.
        sparsity: The share of gates that are 0, if these are normally distributed. What becomes 0 depends on all gates
            of a token, so that ranks do not divide a sparse MLP.
    """

    hidden: int
    width: int
    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    down_bias: bool = False
    factors: tuple[float, ...] = ()
    limit: float | None = None
    sparsity: float = 0.0

    def weights(self) -> Weights:
        up = (2 if self.gated else 1) * self.width
        parameters = 4 if self.activation == "xielu" else 0
        biases = self.bias * up + (self.bias or self.down_bias) * self.hidden
        return Weights(self.hidden * (up + self.width), biases + parameters)

    def divides(self, size: int) -> bool:
        """Whether the width can be divided over `size` ranks, or each has all of it."""
        return self.sparsity > 0 or self.width % size == 0

    def divided(self, size: int) -> MlpSpec:
        """Return the part of one of `size` ranks."""
        return self if self.sparsity > 0 else replace(self, width=self.width // size)


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
    """Experts in place of an MLP (mixture of experts); a router sends each token to some of them.

    Attributes:
        hidden: Width of the residual stream.
        width: Width of one expert.
        count: How many experts the router chooses from.
        routing: How the router sends tokens to experts.
        shared: The expert of all tokens; None: there is none.
        activation: What makes one value of a gate and an up of an expert, or of an up alone.
        biases: Whether the products of experts have biases.
        of_others: How many of the experts are on other ranks; 0 in a whole model.
        engines: How many engines send their tokens to these experts.
        router_norm: Whether the router reads a norm of the stream of its own, with weights.
        latent: Width of what experts read and write, which two projections share among all experts; 0: `hidden`.
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
    router_norm: bool = False
    latent: int = 0

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
        return (self.activation.products + 1) * self.expert_inputs * self.width

    @property
    def expert_inputs(self) -> int:
        """Width of what experts read and write."""
        return self.latent or self.hidden

    def weights(self) -> Weights:
        """Number of weights of this rank's experts, of the router, and of the shared expert."""
        linear, other = (0, 0) if self.shared is None else self.shared.weights()
        linear += 2 * self.hidden * self.latent
        routing = self.routing
        router = self.count * (self.hidden + routing.bias + routing.correction + routing.scaled)
        router += self.router_norm * self.hidden
        biases = self.own * self.biases * (self.activation.products * self.width + self.expert_inputs)
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

    def without_shared(self) -> MixtureSpec:
        """Return the experts alone."""
        return replace(self, shared=None)

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
        place: Where they stand: before attention and MLP, behind each, around each, before both, which run in
            parallel, on the sums of the stream and each (`on sums`), before the layer's only part (`alone`), before
            attention, attention to an encoder's states, and MLP (`before, with cross`), or before each, which add to
            what is normed (`on normed`).
        kept: Factors of what is normed, where attention and MLP add to it.
    """

    kind: Literal["rms", "layer"]
    eps: float
    unit_offset: bool = False
    number: int = 1
    weight: bool = True
    bias: bool = False
    place: Literal["before", "behind", "around", "parallel", "on sums", "alone", "before, with cross", "on normed"] = (
        "before"
    )
    kept: tuple[float, float] = (1.0, 1.0)

    def weights(self, hidden: int) -> Weights:
        """Number of weights if the stream is `hidden` wide."""
        return Weights(0, self.number * hidden * (self.weight + self.bias))


@dataclass(frozen=True)
class LayerInputSpec:
    """A vector of each token that a layer gets beside the stream (per-layer embeddings, as in Gemma 3n): the stream's
    projection to its width gates it, and it is projected back.

    Attributes:
        hidden: Width of the stream.
        width: Width of the vector.
        activation: config.json's name of what the projection goes through.
    """

    hidden: int
    width: int
    activation: str

    def weights(self) -> Weights:
        return Weights(2 * self.hidden * self.width)


@dataclass(frozen=True)
class StreamsSpec:
    """Several streams of a token, of which a layer computes the first, and a low-rank path beside attention.

    Attributes:
        hidden: Width of a stream.
        count: Number of streams.
        rank: Width of the path.
    """

    hidden: int
    count: int
    rank: int

    def weights(self) -> Weights:
        routing = self.count * (self.hidden + self.count + self.count**2)
        return Weights(2 * self.hidden * self.rank + routing, 3 * self.hidden)


@dataclass(frozen=True)
class CrossSpec:
    """Attention of a decoder's tokens to the states that an encoder has made, as many for each sequence (Vaswani et al.
    2017, section 3.2.3).

    Keys and values of the states are computed once for each sequence, and cached as long as it runs.

    Attributes:
        hidden: Width of the stream and of the encoder's states.
        heads: Number of heads.
        head_dim: Width of a head.
        length: Number of states of a sequence.
    """

    hidden: int
    heads: int
    head_dim: int
    length: int

    @property
    def width(self) -> int:
        """Width of all heads."""
        return self.heads * self.head_dim

    @property
    def cached_elements(self) -> int:
        """Elements of the keys and values of one sequence."""
        return 2 * self.length * self.width

    def weights(self) -> Weights:
        """Number of weights of the projections of queries and outputs; keys and values are made behind the encoder."""
        return Weights(2 * self.hidden * self.width, self.width + self.hidden)


@dataclass(frozen=True)
class SharedBlockSpec:
    """A block of attention and an MLP that several layers share, before a mixer of the layer's own (Glorioso et al.
    2024, "The Zamba2 Suite", section 2). It reads the stream beside the tokens' embeddings, and what it makes is
    projected and added to the mixer's input alone.

    Attributes:
        source: The number of the first layer with the block, whose names its weights have.
        use: How many layers with a shared block come before this one.
        rank: The rank of what each layer adds to the block's projections.
        of_attention: Whether it is added to queries, keys and values too.
        stores: Whether the layer's own weights include the block's.
    """

    source: int
    use: int
    rank: int
    of_attention: bool
    stores: bool

    def weights(self, own: AttentionSpec, mlp: MlpSpec) -> Weights:
        """Number of weights of the layer, its mixer aside."""
        h, rank = mlp.hidden, self.rank
        attention = AttentionSpec.weights(own)
        shared = attention.linear + sum(mlp.weights()) if self.stores else 0
        added = self.of_attention * rank * (3 * own.inputs + own.query_width + 2 * own.kv_width)
        added += rank * (h + 2 * mlp.width)
        return Weights(shared + added + h * h, h + self.stores * (own.inputs + h))


@dataclass(frozen=True)
class LayerSpec:
    """One layer of a decoder.

    Attributes:
        mixer: The attention, through which tokens see one another.
        mlp: The part that treats each token by itself.
        norms: The layer's norms of the residual stream.
        input: What the layer gets of each token beside the stream; None: nothing.
        scaled: Whether a learned number multiplies the stream behind the layer.
        streams: The streams of which the layer computes one; None: there is only one.
        cross: The attention to an encoder's states, between `mixer` and `mlp`; None: there is none.
        shared: The block of attention and an MLP that other layers have too; None: attention and MLP are the layer's.
    """

    mixer: Mixer
    mlp: MlpSpec | MixtureSpec
    norms: NormSpec
    input: LayerInputSpec | None = None
    scaled: bool = False
    streams: StreamsSpec | None = None
    cross: CrossSpec | None = None
    shared: SharedBlockSpec | None = None

    def weights(self) -> Weights:
        if self.shared is not None:
            assert isinstance(self.mixer, HybridSpec) and isinstance(self.mlp, MlpSpec)
            own, around = self.mixer.state_space.weights(), self.shared.weights(self.mixer, self.mlp)
            return Weights(own.linear + around.linear, own.other + around.other)
        parts = [self.mixer.weights(), self.mlp.weights(), self.norms.weights(self.mixer.outputs)]
        parts += [part.weights() for part in (self.input, self.streams, self.cross) if part is not None]
        return Weights(sum(part.linear for part in parts), sum(part.other for part in parts) + self.scaled)

    def divided(self, size: int) -> LayerSpec:
        """Return the part of one of `size` ranks."""
        return replace(self, mixer=self.mixer.divided(size), mlp=self.mlp.divided(size))

    @property
    def kind(self) -> LayerSpec:
        """The layer without properties that change only numbers; layers of one kind run the same kernels."""
        mixer = self.mixer
        return replace(
            self, mixer=replace(mixer, scale=1.0) if isinstance(mixer, AttentionSpec | LatentSpec) else mixer
        )


def with_parts(layer: LayerSpec, **parts: Mapping[str, Any]) -> LayerSpec:
    """Return the layer with other properties in some parts: `with_parts(layer, mixer={"qkv_bias": True})`."""
    return replace(layer, **{part: replace(getattr(layer, part), **values) for part, values in parts.items()})
