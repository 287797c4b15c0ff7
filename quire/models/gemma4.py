"""Gemma 4: layers that get a vector of each token beside the stream, experts beside an MLP, and a factor behind each
layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor

from quire.compute.attention.backend import AttentionBackend
from quire.compute.collectives.delta import Delta, Stream, added
from quire.compute.kernels.dispatch import kernel
from quire.models.blocks import Block
from quire.models.decoder import Decoder
from quire.models.layer_spec import LayerInputSpec, MixtureSpec
from quire.models.layers.factory import LayerFactory
from quire.models.layers.mlp import GATED
from quire.models.layers.norm import RMS
from quire.models.layers.rotary import Angles, Positions
from quire.models.projections import build_dense_mlp, build_experts, build_mixer, norm_names
from quire.models.spec import ModelSpec
from quire.models.weights.checkpoint import Checkpoint, WeightSpec

_PAD = 0
"""The token of padding, of all Gemma 4 models."""


class LayerInputs:
    """Vectors of a step's tokens for all layers: each token's own, and a projection of its embedding, normed.

    Args:
        spec: The model, whose layers have inputs.
        build: Builds the layers.
    """

    def __init__(self, spec: ModelSpec, build: LayerFactory) -> None:
        (width,) = {layer.input.width for layer in spec.layers if layer.input is not None}
        self._shape = len(spec.layers), width
        self._scale = spec.hidden**-0.5
        self._known = spec.layer_input_vocab if spec.layer_input_vocab < spec.vocab_size else None
        of_all = spec.layer_input_width
        self._vectors = build.embedding(
            "model.embed_tokens_per_layer", spec.layer_input_vocab, of_all, scale=width**0.5
        )
        self._projection = build.whole("model.per_layer_model_projection", of_all, spec.hidden, bias=False)
        self._norm = build.norm("model.per_layer_projection_norm", width, RMS(spec.norm.eps, spec.norm.unit_offset))
        self._multiply = kernel("multiply", build.options.device.type)

    def __call__(self, tokens: Tensor, x: Tensor) -> Tensor:
        """Return the inputs [tokens, layers, width] of tokens [tokens] int64 with embeddings x [tokens, hidden]."""
        if self._known is not None:  # other tokens have the vectors of token 0
            tokens = torch.where(tokens < self._known, tokens, 0)
        own, projected = self._vectors(tokens), self._projection(x)
        self._multiply(projected, self._scale)
        inputs = added(self._norm(projected.view(-1, *self._shape)).view(own.shape), own)
        self._multiply(inputs, 2.0**-0.5)
        return inputs.view(-1, *self._shape)


class GatedInput:
    """The part of a layer that reads its input: norm(out(act(gate(x)) · input)).

    Args:
        spec: The model.
        build: Builds the layers.
        layer: The layer's number.
        names: The names of gate, output projection and norm in the layer.
    """

    def __init__(self, spec: ModelSpec, build: LayerFactory, layer: int, names: tuple[str, str, str]) -> None:
        own, name = cast(LayerInputSpec, spec.layers[layer].input), spec.layer_name(layer)
        gate, out, norm = (f"{name}.{each}" for each in names)
        self._gate = build.whole(gate, own.width, own.hidden, bias=False)
        self._out = build.whole(out, own.hidden, own.width, bias=False)
        self._norm = build.stream_norm(norm, own.hidden, spec.layers[layer].norms)
        self._activate = kernel(GATED[own.activation], build.options.device.type)

    def __call__(self, x: Tensor, own: Tensor) -> Tensor:
        """Compute what is added to a stream: x [tokens, hidden] and inputs [tokens, width] → [tokens, hidden]."""
        gated = torch.empty_like(own, memory_format=torch.contiguous_format)
        self._activate(torch.cat((self._gate(x), own), 1), gated)
        return self._norm(self._out(gated))


class LayerFactor:
    """A learned number of a layer.

    Args:
        name: The name of the checkpoint's tensor.

    Attributes:
        value: The number, once it is loaded.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.value = 1.0

    def weight_specs(self) -> Iterator[WeightSpec]:
        yield WeightSpec(self._name, (1,), any_rank=True)

    def load_weights(self, checkpoint: Checkpoint) -> None:
        value = torch.empty((1,), dtype=torch.float32)
        checkpoint.read(self._name, value)
        self.value = float(value)


class MlpBesideExperts:
    """norm(mlp(norm(x))) + norm(experts(norm(x))), where the router reads a norm of its own."""

    def __init__(self, spec: ModelSpec, build: LayerFactory, layer: int, mixture: MixtureSpec) -> None:
        assert mixture.shared is not None, "the MLP stands beside the experts"
        kind, name, before = spec.layers[layer].norms, spec.layer_name(layer), norm_names(spec, layer)[2]
        self._mlp = build_dense_mlp(mixture.shared.mlp, spec, build, layer)
        self._before_mlp = build.stream_norm(before, spec.hidden, kind, self._mlp.row_form)
        self._after_mlp = build.stream_norm(f"{name}.post_feedforward_layernorm_1", spec.hidden, kind)
        routed = RMS(kind.eps, tensor="scale", factor=spec.hidden**-0.5)
        self._before_router = build.norm(f"{name}.router", spec.hidden, routed)
        self._before_experts = build.stream_norm(f"{name}.pre_feedforward_layernorm_2", spec.hidden, kind)
        self._experts = build_experts(mixture.without_shared(), spec, build, layer)
        self._after_experts = build.stream_norm(f"{name}.post_feedforward_layernorm_2", spec.hidden, kind)

    def __call__(self, x: Tensor, delta: Delta) -> Tensor:
        """Add `delta` to x [tokens, hidden] in place, and return the sum of both parts."""
        of_mlp = self._after_mlp(self._mlp(self._before_mlp.rows(x, delta)))
        of_experts = self._experts(self._before_experts(x), self._before_router(x))
        return added(of_mlp, self._after_experts(of_experts))


class Gemma4Block:
    """x += norm(attention(norm(x))); x += norm(mlp(norm(x))); x += what the layer's input adds; x *= a factor."""

    def __init__(self, spec: ModelSpec, build: LayerFactory, layer: int) -> None:
        own, names = spec.layers[layer], norm_names(spec, layer)
        kind = own.norms
        self._attention = build_mixer(spec, build, layer)
        self._before_attention = build.stream_norm(names[0], spec.hidden, kind, self._attention.row_form)
        self._after_attention = build.stream_norm(names[1], spec.hidden, kind)
        self._mlp: Callable[[Tensor, Delta], Delta]
        if isinstance(own.mlp, MixtureSpec):
            self._mlp = MlpBesideExperts(spec, build, layer, own.mlp)
        else:
            mlp = build_dense_mlp(own.mlp, spec, build, layer)
            before = build.stream_norm(names[2], spec.hidden, kind, mlp.row_form)
            self._mlp = lambda x, delta: mlp(before.rows(x, delta))
        self._after_mlp = build.stream_norm(names[3], spec.hidden, kind)
        inner = ("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm")
        self._input = None if own.input is None else GatedInput(spec, build, layer, inner)
        self._factor = build.remember(LayerFactor(f"{spec.layer_name(layer)}.layer_scalar"))
        self._multiply = kernel("multiply", build.options.device.type)

    def __call__(
        self,
        x: Tensor,
        delta: Delta | None,
        angles: Angles | None,
        attention: AttentionBackend,
        own: Tensor | None = None,
    ) -> Stream:
        """Compute the layer as `Block` does; `own` is its input [tokens, width], if it has one."""
        rows = self._before_attention.rows(x, delta)
        summand = self._after_attention(self._attention(rows, angles, attention))
        summand = self._after_mlp(self._mlp(x, summand))
        if self._input is not None:
            assert own is not None
            summand = self._input(added(x, summand), own)
        for part in (x, summand):
            self._multiply(part, self._factor.value)
        return Stream(x, summand)


class Gemma4(Decoder):
    """A decoder of Gemma 4 blocks."""

    def __init__(self, spec: ModelSpec, build: LayerFactory) -> None:
        super().__init__(spec, build, self._build_block)
        self._layer_inputs = LayerInputs(spec, build) if spec.layer_input_width else None
        self._tokens: Tensor | None = None
        self._image_token = spec.vision.image_token if spec.vision is not None else None

    def _build_block(self, spec: ModelSpec, build: LayerFactory, layer: int) -> Block:
        return Gemma4Block(spec, build, layer)

    def embed(self, tokens: Tensor, positions: Positions) -> Stream:
        if self._layer_inputs is not None and self._image_token is not None:  # an image has the pad's own vectors
            tokens = torch.where(tokens == self._image_token, _PAD, tokens)
        stream = super().embed(tokens, positions)
        self._tokens = tokens
        return stream

    def blocks(self, stream: Stream, positions: Positions, attention: AttentionBackend) -> Iterator[Stream]:
        tokens, self._tokens = self._tokens, None
        inputs = None  # they read the stream, in which images have their vectors by now
        if self._layer_inputs is not None and tokens is not None:
            inputs = self._layer_inputs(tokens, stream.x)
        for number, (block, angles) in enumerate(zip(self._blocks, self._rotaries(positions), strict=True)):
            own = None if inputs is None else inputs[:, number]
            stream = cast(Gemma4Block, block)(*stream, angles, attention, own)
            yield stream
