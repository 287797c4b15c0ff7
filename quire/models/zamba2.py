"""Zamba2: blocks of attention and an MLP that layers share, before selective state spaces of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from quire.compute.attention.backend import AttentionBackend
from quire.compute.collectives.delta import Delta, Stream, added, total_of
from quire.compute.kernels.reference.quantized_rows import Rows
from quire.compute.mesh import Span
from quire.models.blocks import Block, build_block
from quire.models.decoder import Decoder
from quire.models.layer_spec import HybridSpec, LayerSpec, MlpSpec, NormSpec, SharedBlockSpec
from quire.models.layers.attention import Heads
from quire.models.layers.factory import LayerFactory, Outputs
from quire.models.layers.linear import Projection
from quire.models.layers.mlp import MLP
from quire.models.layers.norm import LayerNorm, RMSNorm
from quire.models.layers.rotary import Angles, Positions
from quire.models.projections import attention_layer, norm_rope_form
from quire.models.quantization.scheme import RowForm
from quire.models.recurrent import build_recurrent
from quire.models.spec import ModelSpec
from quire.models.weights.shards import Cut


class WithLowRank:
    """A Projection to whose outputs a layer adds products of its own, of low rank.

    Args:
        base: Computes the outputs, of which each part has a product of its own.
        into: Projects the input to the products' latents, side by side.
        out: Projects each latent to its part of the outputs.
        rank: The width of a latent.
    """

    row_form: RowForm | None = None

    def __init__(self, base: Projection, into: Projection, out: tuple[Projection, ...], rank: int) -> None:
        self._base = base
        self._into = into
        self._out = out
        self._rank = rank

    def __call__(self, x: Rows) -> Tensor:
        y, latents = self._base(x), torch.split(self._into(x), self._rank, dim=1)
        parts = [project(latent) for project, latent in zip(self._out, latents, strict=True)]
        return y.add_(parts[0] if len(parts) == 1 else torch.cat(parts, 1))

    def pending(self, x: Rows) -> Tensor:
        return self(x)

    def silu_and_mul(self, x: Rows) -> Tensor:
        raise NotImplementedError


class SharedWeights:
    """The weights of a block that layers share, which are built once.

    Args:
        own: The block's attention and state space.
        mlp: The block's MLP.
        kind: The block's norms.
        build: Builds the layers.
        name: What the names of the block's modules begin with.
    """

    def __init__(self, own: HybridSpec, mlp: MlpSpec, kind: NormSpec, build: LayerFactory, name: str) -> None:
        inner = f"{name}.self_attn"
        self.heads = Heads(own.heads, own.kv_heads, own.head_dim)
        names = tuple(f"{inner}.{each}_proj" for each in "qkv")
        self.qkv = build.qkv(names, self.heads, own.inputs, own.qkv_bias)
        self.out = build.row_parallel(f"{inner}.o_proj", own.outputs, Outputs(own.heads, own.head_dim), own.out_bias)
        feed = f"{name}.feed_forward"
        self.gate_up = build.gate_up((f"{feed}.gate_up_proj",), mlp.width, mlp.hidden, mlp.bias, mlp.activation)
        self.down = build.row_parallel(f"{feed}.down_proj", mlp.hidden, mlp.width, mlp.bias)
        self.before_attention = build.stream_norm(f"{name}.input_layernorm", own.inputs, kind)
        self.before_mlp = build.stream_norm(f"{name}.pre_ff_layernorm", own.outputs, kind)


def _low_rank(build: LayerFactory, base: Projection, names: Mapping[str, Cut], inputs: int, rank: int) -> WithLowRank:
    """Add products of low rank to the parts of a projection; `names` has this rank's outputs of each."""
    whole = Cut(rank, (Span(0, rank),))
    into = build.rows_of({f"{name}.0": whole for name in names}, inputs, bias=False)
    out = tuple(build.rows_of({f"{name}.1": cut}, rank, bias=False) for name, cut in names.items())
    return WithLowRank(base, into, out, rank)


def _cut(build: LayerFactory, *parts: Outputs) -> Cut:
    """Return this rank's outputs of a module that has these parts side by side."""
    spans, begin = [], 0
    for units, width in parts:
        own = build.part(units)
        spans.append(Span(begin + own.start * width, own.count * width))
        begin += units * width
    return Cut(begin, tuple(spans))


class Zamba2Block:
    """x += mixer(norm(x + linear(block(x, embeddings)))), where the block is attention and an MLP behind norms.

    Args:
        spec: The model.
        build: Builds the layers.
        layer: The layer's number.
        weights: The block's weights.
        embeddings: Returns the step's embeddings of tokens.
    """

    def __init__(
        self,
        spec: ModelSpec,
        build: LayerFactory,
        layer: int,
        weights: SharedWeights,
        embeddings: Callable[[], Tensor],
    ) -> None:
        own, name = spec.layers[layer], spec.layer_name(layer)
        self._weights = weights
        self._embeddings = embeddings
        self._attention, self._mlp = self._build_shared(own, spec, build, layer)
        self._linear = build.whole(f"{name}.linear", spec.hidden, spec.hidden, bias=False)
        modules = replace(spec.family.modules, recurrent="mamba_decoder.mamba")
        inner = replace(spec, family=replace(spec.family, modules=modules))
        self._mixer = build_recurrent(inner, build, layer)
        self._norm: RMSNorm | LayerNorm = build.stream_norm(
            f"{name}.mamba_decoder.input_layernorm", spec.hidden, own.norms, self._mixer.row_form
        )

    def _build_shared(
        self, own: LayerSpec, spec: ModelSpec, build: LayerFactory, layer: int
    ) -> tuple[Callable[..., Delta], MLP]:
        """Build the shared attention and MLP with what this layer adds to their projections."""
        shared, mixer, mlp, weights = own.shared, own.mixer, own.mlp, self._weights
        assert isinstance(shared, SharedBlockSpec) and isinstance(mixer, HybridSpec) and isinstance(mlp, MlpSpec)
        block, qkv = f"{spec.layer_name(shared.source)}.shared_transformer", weights.qkv
        heads = [Outputs(each, mixer.head_dim) for each in (mixer.heads, mixer.kv_heads, mixer.kv_heads)]
        if shared.of_attention:
            begin = f"{block}.self_attn.linear"
            names = {
                f"{begin}_{part}_adapter_list.{shared.use}": _cut(build, each)
                for part, each in zip("qkv", heads, strict=True)
            }
            qkv = _low_rank(build, qkv, names, mixer.inputs, shared.rank)
        attention = build.attention(
            attention_layer(spec, build, layer), weights.heads, qkv, weights.out, None, norm_rope_form(mixer)
        )
        added_up = f"{block}.feed_forward.gate_up_proj_adapter_list.{shared.use}"
        cut = _cut(build, Outputs(mlp.width), Outputs(mlp.width))
        up = _low_rank(build, weights.gate_up, {added_up: cut}, mlp.hidden, shared.rank)
        return attention, build.gated_mlp(up, weights.down, mlp.width, mlp.activation)

    def __call__(self, x: Tensor, delta: Delta | None, angles: Angles | None, attention: AttentionBackend) -> Stream:
        x = x if delta is None else added(x, total_of(delta))
        weights, both = self._weights, torch.cat((x, self._embeddings()), 1)
        attended = total_of(self._attention(weights.before_attention(both), angles, attention))
        made = self._linear(total_of(self._mlp(weights.before_mlp(attended))))
        return Stream(x, self._mixer(self._norm(made.add_(x)), None, attention))


class Zamba2(Decoder):
    """A decoder some of whose layers share blocks of attention and an MLP, which read the tokens' embeddings too."""

    def __init__(self, spec: ModelSpec, build: LayerFactory) -> None:
        self._shared: dict[int, SharedWeights] = {}
        self._of_tokens: Tensor
        super().__init__(spec, build, self._build_block)

    def _build_block(self, spec: ModelSpec, build: LayerFactory, layer: int) -> Block:
        own = spec.layers[layer]
        if own.shared is None:
            return build_block(spec, build, layer)
        source = own.shared.source
        if source not in self._shared:
            assert isinstance(own.mixer, HybridSpec) and isinstance(own.mlp, MlpSpec)
            name = f"{spec.layer_name(source)}.shared_transformer"
            self._shared[source] = SharedWeights(own.mixer, own.mlp, own.norms, build, name)
        return Zamba2Block(spec, build, layer, self._shared[source], lambda: self._of_tokens)

    def embed(self, tokens: Tensor, positions: Positions) -> Stream:
        stream = super().embed(tokens, positions)
        self._of_tokens = stream.x.clone()
        return stream
