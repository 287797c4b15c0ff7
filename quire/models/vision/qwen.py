"""The towers of Qwen2-VL (Wang et al. 2024, section 2.1) and Qwen2.5-VL (Bai et al. 2025, section 2.1), whose images
have any size: patches with rotary positions in two dimensions, of which squares of four become one vector.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.compute.kernels.dispatch import kernel
from quire.models.blocks import build_block
from quire.models.families.family import ModuleNames
from quire.models.layer_spec import NormSpec
from quire.models.layers.factory import LayerFactory
from quire.models.layers.rotary import Angles
from quire.models.spec import ModelSpec
from quire.models.vision.image_attention import ImageAttention, Segments
from quire.models.vision.pixel_settings import CHANNELS
from quire.models.vision.tower import Pixels, layers_spec, read_weight
from quire.models.vision.vision_spec import QwenVisionSpec
from quire.models.weights.checkpoint import Checkpoint, WeightSpec
from quire.models.weights.tensor_options import TensorOptions

_TOWER = "visual"
_THETA = 10000.0
_KEPT_GRIDS = 64
_NAMES = ModuleNames(layer=f"{_TOWER}.blocks.{{}}", norms=("norm1", "norm2"), qkv=("attn.qkv",), out="attn.proj")


class PatchProduct:
    """Patches of pixels, of two frames each, to the tower's stream; an image is two frames that are alike."""

    def __init__(self, spec: QwenVisionSpec, options: TensorOptions) -> None:
        self._spec = spec
        self._options = options
        self._weight: Tensor

    def weight_specs(self) -> Iterator[WeightSpec]:
        spec = self._spec
        shape = spec.hidden, CHANNELS, spec.frames, spec.patch_size, spec.patch_size
        yield WeightSpec(f"{_TOWER}.patch_embed.proj.weight", shape)

    def load_weights(self, checkpoint: Checkpoint) -> None:
        (weight,) = self.weight_specs()
        self._weight = read_weight(checkpoint, weight, self._options).flatten(1)

    def __call__(self, pixels: Tensor) -> Tensor:
        """Embed: pixels [3, height, width] of an image, or [frames, 3, height, width] of a slice of a video → [patches,
        hidden], square by square of those that are merged."""
        spec, size, merge = self._spec, self._spec.patch_size, self._spec.merge
        rows, columns = (length // size // merge for length in pixels.shape[-2:])
        squares = pixels.reshape(-1, CHANNELS, rows, merge, size, columns, merge, size).permute(2, 5, 3, 6, 1, 0, 4, 7)
        patches = squares.reshape(rows * columns * merge**2, CHANNELS, -1, size, size)
        patches = patches.expand(-1, -1, spec.frames, -1, -1)
        return F.linear(patches.reshape(len(patches), -1), self._weight)


class QwenTower:
    """Images to the vectors that stand in place of their placeholder tokens.

    Args:
        spec: The tower.
        build: Builds its layers; `layers` of it are loaded later.
    """

    def __init__(self, spec: QwenVisionSpec, build: LayerFactory) -> None:
        self._spec = spec
        self._device = build.options.device
        tower, merged = _tower_spec(spec), spec.hidden * spec.merge**2
        self._embed = build.remember(PatchProduct(spec, build.options))
        self._blocks = [build_block(tower, build, layer) for layer in range(spec.layers)]
        self._norm = build.stream_norm(f"{_TOWER}.merger.ln_q", spec.hidden, tower.norm)
        self._first = build.whole(f"{_TOWER}.merger.mlp.0", merged, merged, bias=True)
        self._gelu = kernel("gelu_exact", self._device.type)
        self._second = build.whole(f"{_TOWER}.merger.mlp.2", spec.outputs, merged, bias=True)
        self._pixels = Pixels(spec.pixels, build.options)
        self._grid = lru_cache(_KEPT_GRIDS)(self._new_grid)

    def __call__(self, images: Sequence[Tensor]) -> list[Tensor]:
        """Compute vectors: images [height, width, 3], or videos [frames, height, width, 3], uint8 → [tokens, outputs]
        each."""
        return [self._vectors(image) if image.dim() == 3 else self._of_video(image) for image in images]

    def _of_video(self, video: Tensor) -> Tensor:
        """Compute a video's slices one by one: patches see those of their own slice alone."""
        return torch.cat([self._vectors(each) for each in torch.split(video, self._spec.frames)])

    def _vectors(self, image: Tensor) -> Tensor:
        """Compute the vectors of an image [height, width, 3], or of a slice of a video [frames, height, width, 3]."""
        spec = self._spec
        rows, columns = (length // spec.patch_size for length in image.shape[-3:-1])
        angles, segments = self._grid(rows, columns)
        attention = ImageAttention(segments)
        x, delta = self._embed(self._pixels(image)), None
        for block in self._blocks:
            x, delta = block(x, delta, angles, attention)
        merged = self._norm(x, delta).view(-1, spec.hidden * spec.merge**2)
        inner = self._first(merged)
        self._gelu(inner, out := torch.empty_like(inner))
        return self._second(out)

    def _new_grid(self, rows: int, columns: int) -> tuple[Angles, list[Segments]]:
        """Return the angles of patches in a grid, and each layer's segments."""
        spec = self._spec
        whole: Segments = (torch.arange(rows * columns, device=self._device).unsqueeze(0),)
        windows: Segments = [each.to(self._device) for each in _windows(spec, rows, columns)] if spec.window else ()
        by_layer = [windows if spec.window and number not in spec.whole_layers else whole
                    for number in range(spec.layers)]  # fmt: skip
        cos, sin = (each.to(self._device) for each in _angles(spec, rows, columns))
        return Angles(cos, sin), by_layer


def _by_square(grid: Tensor, merge: int) -> Tensor:
    """Return the values of patches [rows, columns] in the order of the squares that are merged."""
    rows, columns = grid.shape
    return grid.view(rows // merge, merge, columns // merge, merge).transpose(1, 2).flatten()


def _angles(spec: QwenVisionSpec, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [patches, d / 2] fp32: half of the frequencies go by row, half by column."""
    width = spec.hidden // spec.heads // 2
    frequencies = 1.0 / _THETA ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    places = torch.stack([_by_square(row, spec.merge), _by_square(column, spec.merge)], dim=1)
    angles = (places.unsqueeze(-1).float() * frequencies).flatten(1)
    return angles.cos(), angles.sin()


def _windows(spec: QwenVisionSpec, rows: int, columns: int) -> list[Tensor]:
    """Return the patches of each window, [windows, patches] for each number of patches."""
    merge, side = spec.merge, spec.window // spec.merge // spec.patch_size
    squares = torch.arange(rows * columns // merge**2).view(rows // merge, columns // merge)
    by_length: dict[int, list[Tensor]] = {}
    for band in torch.split(squares, side, dim=0):
        for window in torch.split(band, side, dim=1):
            patches = (window.reshape(-1, 1) * merge**2 + torch.arange(merge**2)).flatten()
            by_length.setdefault(len(patches), []).append(patches)
    return [torch.stack(each) for each in by_length.values()]


def _tower_spec(spec: QwenVisionSpec) -> ModelSpec:
    """Return the tower's layers as an encoder's."""
    up = ("mlp.gate_proj", "mlp.up_proj") if spec.gated else ("mlp.fc1",)
    names = replace(_NAMES, up=up, down="mlp.down_proj" if spec.gated else "mlp.fc2")
    norms = NormSpec("rms" if spec.gated else "layer", spec.eps, number=2, bias=not spec.gated)
    return layers_spec("Qwen2VLVisionModel", names, spec, norms, gated=spec.gated)
