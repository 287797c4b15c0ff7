"""Gemma 3n: a token has several streams (AltUp; Baykal et al. 2023, "Alternating Updates for Efficient Transformers").

A layer predicts all streams, computes the first one, and corrects the others by what it changed. A low-rank path stands
beside attention (LAuReL; Menghani et al. 2024).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from statistics import NormalDist
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.compute.attention.backend import AttentionBackend
from quire.compute.collectives.delta import Delta, Stream, total_of
from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.quantized_rows import Rows
from quire.models.blocks import Block
from quire.models.decoder import Decoder
from quire.models.gemma4 import GatedInput, LayerInputs
from quire.models.layer_spec import MlpSpec, StreamsSpec
from quire.models.layers.factory import LayerFactory
from quire.models.layers.mlp import GATED
from quire.models.layers.norm import RMS
from quire.models.layers.rotary import Angles, Positions
from quire.models.projections import build_dense_mlp, build_mixer, norm_names
from quire.models.spec import ModelSpec
from quire.models.weights.checkpoint import Checkpoint, WeightSpec
from quire.models.weights.tensor_options import TensorOptions

_LEAST_SQUARE = 1e-5


class SparseMlp:
    """An MLP whose gates are cut: those below a bound become 0, so that a share of normally distributed ones does.

    Every rank has all of it, because the bound depends on all gates of a token.
    """

    def __init__(self, mlp: MlpSpec, name: str, build: LayerFactory) -> None:
        self._gate, self._up = (build.whole(f"{name}.{part}_proj", mlp.width, mlp.hidden, False) for part in _PARTS)
        self._down = build.whole(f"{name}.down_proj", mlp.hidden, mlp.width, bias=False)
        self._deviations = NormalDist().inv_cdf(mlp.sparsity)
        self._activate = kernel(GATED[mlp.activation], build.options.device.type)

    def __call__(self, x: Rows) -> Delta:
        gate, up = self._gate(x), self._up(x)
        bound = gate.mean(-1, keepdim=True) + self._deviations * gate.std(-1, keepdim=True, unbiased=False)
        out = torch.empty_like(gate)
        self._activate(torch.cat((F.relu(gate - bound), up), 1), out)
        return self._down(out)


_PARTS = ("gate", "up")


class StreamScale:
    """Factors of a stream's elements.

    Args:
        name: The name of the checkpoint's tensor.
        width: Width of the stream.
        options: The device and dtype.

    Attributes:
        value: [width], once it is loaded.
    """

    def __init__(self, name: str, width: int, options: TensorOptions) -> None:
        self._spec = WeightSpec(name, (width,))
        self._options = options
        self.value: Tensor

    def weight_specs(self) -> Iterator[WeightSpec]:
        yield self._spec

    def load_weights(self, checkpoint: Checkpoint) -> None:
        self.value = torch.empty(self._spec.shape, dtype=self._options.dtype, device=self._options.device)
        checkpoint.read(self._spec.name, self.value)


class AlternatingUpdates:
    """Predicts a layer's streams, and corrects them by what the layer made of the first one."""

    def __init__(self, spec: StreamsSpec, name: str, eps: float, build: LayerFactory) -> None:
        self._count, hidden = spec.count, spec.hidden
        self._norm = build.norm(f"{name}.router_norm", hidden, RMS(eps, factor=1.0 / hidden))
        self._router = build.whole(f"{name}.modality_router", spec.count, hidden, bias=False)
        self._prediction = build.whole(f"{name}.prediction_coefs", spec.count**2, spec.count, bias=False)
        self._correction = build.whole(f"{name}.correction_coefs", spec.count, spec.count, bias=False)
        self._scale = build.remember(StreamScale(f"{name}.correct_output_scale", hidden, build.options))

    def predict(self, streams: Tensor) -> Tensor:
        """Return predictions of streams [streams, tokens, hidden]."""
        mixing = self._prediction(self._routed(streams[0])).view(-1, self._count, self._count)
        return torch.einsum("ath,tia->ith", streams, mixing) + streams

    def correct(self, predictions: Tensor, x: Tensor) -> Tensor:
        """Return the streams, given their predictions and what the first one is: x [tokens, hidden]."""
        weights = self._correction(self._routed(x)) + 1.0  # [tokens, streams]
        return (x - predictions[0]) * weights.T.unsqueeze(-1) + predictions

    def scaled(self, x: Tensor) -> Tensor:
        """Return the first stream [tokens, hidden] as the layer's input gates it."""
        return x * self._scale.value

    def _routed(self, x: Tensor) -> Tensor:
        return torch.tanh(self._router(self._norm(x)).float()).to(x.dtype)


class Gemma3nBlock:
    """One layer of Gemma 3n."""

    def __init__(self, spec: ModelSpec, build: LayerFactory, layer: int) -> None:
        own, names, name = spec.layers[layer], norm_names(spec, layer), spec.layer_name(layer)
        assert own.streams is not None and isinstance(own.mlp, MlpSpec)
        kind, rank = own.norms, own.streams.rank
        self._updates = AlternatingUpdates(own.streams, f"{name}.altup", kind.eps, build)
        self._left = build.whole(f"{name}.laurel.linear_left", rank, spec.hidden, bias=False)
        self._right = build.whole(f"{name}.laurel.linear_right", spec.hidden, rank, bias=False)
        self._after_right = build.stream_norm(f"{name}.laurel.post_laurel_norm", spec.hidden, kind)
        self._attention = build_mixer(spec, build, layer)
        self._norms = [build.stream_norm(each, spec.hidden, kind) for each in names]
        self._mlp: Callable[[Rows], Delta]
        if own.mlp.sparsity > 0:
            self._mlp = SparseMlp(own.mlp, f"{name}.mlp", build)
        else:
            self._mlp = build_dense_mlp(own.mlp, spec, build, layer)
        inner = ("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm")
        self._input = GatedInput(spec, build, layer, inner)

    def __call__(self, streams: Tensor, angles: Angles | None, attention: AttentionBackend, own: Tensor) -> Tensor:
        """Compute the layer: streams [streams, tokens, hidden] and its input [tokens, width] → streams."""
        before, after_attention, before_mlp, after_mlp = self._norms
        predictions = self._updates.predict(streams)
        x = predictions[0]
        normed = before(x)
        beside = normed + self._after_right(self._right(self._left(normed)))
        x = (x + after_attention(self._attention(normed, angles, attention)) + beside) / math.sqrt(2)
        x = x + after_mlp(total_of(self._mlp(before_mlp(x))))
        corrected = self._updates.correct(predictions, x)
        corrected[1:] += self._input(self._updates.scaled(corrected[0]), own)
        return corrected


class Gemma3n(Decoder):
    """A decoder of Gemma 3n blocks. The stream that it yields is the first of several."""

    def __init__(self, spec: ModelSpec, build: LayerFactory) -> None:
        super().__init__(spec, build, self._build_block)
        streams = spec.layers[0].streams
        assert streams is not None
        self._layer_inputs = LayerInputs(spec, build)
        self._into, self._out_of = (
            [build.whole(f"model.{name}.{n}", spec.hidden, spec.hidden, bias=False) for n in range(streams.count - 1)]
            for name in ("altup_projections", "altup_unembed_projections")
        )
        self._of_tokens: Tensor
        self._streams: Tensor

    def _build_block(self, spec: ModelSpec, build: LayerFactory, layer: int) -> Block:
        return cast(Block, Gemma3nBlock(spec, build, layer))  # which `blocks` alone calls

    def embed(self, tokens: Tensor, positions: Positions) -> Stream:
        x = super().embed(tokens, positions).x
        self._of_tokens = self._layer_inputs(tokens, x)
        self._streams = torch.stack([x, *(_as_large(project(x), x) for project in self._into)])
        return Stream(x, None)

    def blocks(self, stream: Stream, positions: Positions, attention: AttentionBackend) -> Iterator[Stream]:
        for number, (block, angles) in enumerate(zip(self._blocks, self._rotaries(positions), strict=True)):
            layer = cast(Gemma3nBlock, block)
            self._streams = layer(self._streams, angles, attention, self._of_tokens[:, number])
            yield Stream(self._streams[0], None)

    def finish(self, stream: Stream) -> Tensor:
        first, *others = self._streams.unbind()
        made = [_as_large(project(x), first) for project, x in zip(self._out_of, others, strict=True)]
        return self._norm(torch.stack([first, *made]).mean(0))


def _as_large(x: Tensor, other: Tensor) -> Tensor:
    """Return x, scaled to the mean square of another stream."""
    wanted = other.square().mean(-1, keepdim=True).sqrt()
    return x * wanted / x.square().mean(-1, keepdim=True).clamp(min=_LEAST_SQUARE).sqrt()
