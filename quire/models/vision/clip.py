"""CLIP's tower and LLaVA's projector: images to vectors of the text model's width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.compute.kernels.dispatch import kernel
from quire.models.blocks import build_block
from quire.models.families.family import ModuleNames
from quire.models.layer_spec import NormSpec
from quire.models.layers.factory import LayerFactory
from quire.models.layers.mlp import PLAIN
from quire.models.vision.image_attention import ImageAttention
from quire.models.vision.pixel_settings import CHANNELS
from quire.models.vision.tower import Pixels, layers_spec, read_weight
from quire.models.vision.vision_spec import ClipSpec
from quire.models.weights.checkpoint import Checkpoint, WeightSpec
from quire.models.weights.tensor_options import TensorOptions

_TOWER = "vision_tower"
_PROJECTOR = "multi_modal_projector"
_MODULES = ModuleNames(
    layer=f"{_TOWER}.encoder.layers.{{}}",
    norms=("layer_norm1", "layer_norm2"),
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.out_proj",
    up=("mlp.fc1",),
    down="mlp.fc2",
)


class PatchEmbeddings:
    """Patches of pixels to the tower's stream, behind the class token, with the embeddings of their positions.

    Args:
        spec: The tower.
        options: The device and dtype of weights.
    """

    def __init__(self, spec: ClipSpec, options: TensorOptions) -> None:
        self._spec = spec
        self._options = options
        self._patch: Tensor
        self._class: Tensor
        self._positions: Tensor

    def weight_specs(self) -> Iterator[WeightSpec]:
        h, patch = self._spec.hidden, self._spec.patch_size
        yield WeightSpec(f"{_TOWER}.embeddings.patch_embedding.weight", (h, CHANNELS, patch, patch))
        yield WeightSpec(f"{_TOWER}.embeddings.class_embedding", (h,))
        yield WeightSpec(f"{_TOWER}.embeddings.position_embedding.weight", (self._spec.patches + 1, h))

    def load_weights(self, checkpoint: Checkpoint) -> None:
        patch, own_class, positions = self.weight_specs()
        self._patch = read_weight(checkpoint, patch, self._options).flatten(1)
        self._class = read_weight(checkpoint, own_class, self._options)
        self._positions = read_weight(checkpoint, positions, self._options)

    def __call__(self, pixels: Tensor) -> Tensor:
        """Embed: pixels [images, 3, size, size] → [images · (patches + 1), hidden]."""
        size, side = self._spec.patch_size, self._spec.image_size // self._spec.patch_size
        used = pixels[:, :, : side * size, : side * size]
        patches = used.reshape(-1, CHANNELS, side, size, side, size).permute(0, 2, 4, 1, 3, 5)
        x = F.linear(patches.reshape(len(pixels), side * side, -1), self._patch)
        own_class = self._class.expand(len(pixels), 1, -1)
        return (torch.cat((own_class, x), dim=1) + self._positions).view(-1, self._spec.hidden)


class ClipTower:
    """Images to the vectors that stand in place of their placeholder tokens.

    Args:
        spec: The tower and the projector.
        build: Builds their layers; its `layers` are loaded later.
    """

    def __init__(self, spec: ClipSpec, build: LayerFactory) -> None:
        self._spec = spec
        options, norms = build.options, NormSpec("layer", spec.eps, number=2, bias=True)
        tower = layers_spec("CLIPVisionModel", _MODULES, spec, norms)
        self._embed = build.remember(PatchEmbeddings(spec, options))
        self._norm = build.stream_norm(f"{_TOWER}.pre_layrnorm", spec.hidden, tower.norm)
        self._blocks = [build_block(tower, build, layer) for layer in range(spec.layers)]
        bias = spec.projector_bias
        self._first = build.whole(f"{_PROJECTOR}.linear_1", spec.outputs, spec.hidden, bias)
        self._second = build.whole(f"{_PROJECTOR}.linear_2", spec.outputs, spec.outputs, bias)
        self._activation = kernel(PLAIN[spec.projector_activation], options.device.type)
        self._pixels = Pixels(spec.pixels, options)

    def __call__(self, images: Sequence[Tensor]) -> list[Tensor]:
        """Compute vectors: images [size, size, 3] uint8 → [tokens, outputs] each."""
        spec, pixels = self._spec, self._pixels(torch.stack(list(images)))
        x, delta = self._norm(self._embed(pixels)), None
        patches = torch.arange(len(x), device=x.device).view(len(images), -1)
        attention = ImageAttention([(patches,)] * spec.layers)
        for block in self._blocks:
            x, delta = block(x, delta, None, attention)
        states = x if delta is None else x + (delta if isinstance(delta, Tensor) else delta.total())
        states = states.view(len(images), spec.patches + 1, spec.hidden)
        if not spec.keeps_class:
            states = states[:, 1:]
        inner = self._first(states.reshape(-1, spec.hidden))
        self._activation(inner, out := torch.empty_like(inner))
        return list(self._second(out).view(len(images), spec.tokens, spec.outputs))
