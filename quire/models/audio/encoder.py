"""Whisper's encoder, and the keys and values that a decoder's layers make of its states (Radford et al. 2022)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.models.audio.audio_spec import SpeechSpec
from quire.models.blocks import build_block
from quire.models.families.family import ModuleNames
from quire.models.layer_spec import CrossSpec, NormSpec
from quire.models.layers.factory import LayerFactory
from quire.models.spec import ModelSpec
from quire.models.vision.image_attention import ImageAttention
from quire.models.vision.tower import layers_spec, read_weight
from quire.models.weights.checkpoint import Checkpoint, WeightSpec
from quire.models.weights.tensor_options import TensorOptions

_ENCODER = "encoder"
_EPS = 1e-5
_MODULES = ModuleNames(
    layer=f"{_ENCODER}.layers.{{}}",
    norms=("self_attn_layer_norm", "final_layer_norm"),
    out="self_attn.out_proj",
    up=("fc1",),
    down="fc2",
)
UNBIASED = ("self_attn.k_proj",)
"""Ends of names of modules that have no bias where others of their product have one."""


class FrameEmbeddings:
    """Features to the encoder's stream: two convolutions, the second of which halves their number, and positions.

    Args:
        spec: The encoder.
        options: The device and dtype of weights.
    """

    def __init__(self, spec: SpeechSpec, options: TensorOptions) -> None:
        self._spec = spec
        self._options = options
        self._weights: list[Tensor] = []

    def weight_specs(self) -> Iterator[WeightSpec]:
        h, mels = self._spec.hidden, self._spec.mel.mels
        yield WeightSpec(f"{_ENCODER}.conv1.weight", (h, mels, 3))
        yield WeightSpec(f"{_ENCODER}.conv1.bias", (h,))
        yield WeightSpec(f"{_ENCODER}.conv2.weight", (h, h, 3))
        yield WeightSpec(f"{_ENCODER}.conv2.bias", (h,))
        yield WeightSpec(f"{_ENCODER}.embed_positions.weight", (self._spec.length, h))

    def load_weights(self, checkpoint: Checkpoint) -> None:
        self._weights = [read_weight(checkpoint, spec, self._options) for spec in self.weight_specs()]

    def __call__(self, features: Tensor) -> Tensor:
        """Embed: features [pieces, mels, frames] float32 → [pieces · length, hidden]."""
        first, first_bias, second, second_bias, positions = self._weights
        x = F.gelu(F.conv1d(features.to(first.dtype), first, first_bias, padding=1))
        x = F.gelu(F.conv1d(x, second, second_bias, stride=2, padding=1))
        return (x.transpose(1, 2) + positions).reshape(-1, self._spec.hidden)


class SpeechEncoder:
    """Features to the keys and values that each of a decoder's layers attends to.

    Args:
        spec: The encoder.
        decoder: The model whose layers attend to its states.
        build: Builds its layers; `build.layers` are loaded later.
    """

    def __init__(self, spec: SpeechSpec, decoder: ModelSpec, build: LayerFactory) -> None:
        self._spec = spec
        norms = NormSpec("layer", _EPS, number=2, bias=True)
        layers = layers_spec("WhisperEncoder", _MODULES, spec, norms)
        self._embed = build.remember(FrameEmbeddings(spec, build.options))
        self._blocks = [build_block(layers, build, layer) for layer in range(spec.layers)]
        self._norm = build.stream_norm(f"{_ENCODER}.layer_norm", spec.hidden, layers.norm)
        self._cross: list[CrossSpec] = [layer.cross for layer in decoder.layers if layer.cross is not None]
        _, key, value = decoder.family.modules.cross_qkv
        names = [decoder.layer_name(layer).removeprefix("model.") for layer in range(len(self._cross))]
        self._projections = [
            (build.whole(f"{name}.{key}", own.width, own.hidden, bias=False),
             build.whole(f"{name}.{value}", own.width, own.hidden, bias=True))
            for name, own in zip(names, self._cross, strict=True)
        ]  # fmt: skip

    def states(self, features: Tensor) -> Tensor:
        """Compute the encoder's states: features [pieces, mels, frames] float32 → [pieces, length, hidden]."""
        x, delta = self._embed(features), None
        places = torch.arange(len(x), device=x.device).view(len(features), -1)
        attention = ImageAttention([(places,)] * self._spec.layers)
        for block in self._blocks:
            x, delta = block(x, delta, None, attention)
        return self._norm(x, delta).view(len(features), self._spec.length, self._spec.hidden)

    def keys_and_values(self, states: Tensor) -> Sequence[tuple[Tensor, Tensor]]:
        """Return each layer's keys and values [length, heads, d] of states [length, hidden]."""
        return [
            (keys(states).view(own.length, own.heads, own.head_dim),
             values(states).view(own.length, own.heads, own.head_dim))
            for (keys, values), own in zip(self._projections, self._cross, strict=True)
        ]  # fmt: skip
