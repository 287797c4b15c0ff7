"""Reads what a model's tower for images is from config.json. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import CheckpointError
from quire.models.config_file import ConfigFile, processor_settings
from quire.models.vision.module_spec import ModuleVisionSpec
from quire.models.vision.pixel_settings import CHANNELS, PixelValues

_LLAVA = "LlavaForConditionalGeneration"
_QWEN2 = "Qwen2VLForConditionalGeneration"
_QWEN25 = "Qwen2_5_VLForConditionalGeneration"


@dataclass(frozen=True)
class ClipSpec:
    """CLIP's tower (Radford et al. 2021) and LLaVA's projector to the width of the text model (Liu et al. 2023).

    Attributes:
        image_token: The token that stands for each of an image's vectors.
        pixels: How pixels become numbers.
        image_size: Height and width of images, in pixels.
        patch_size: Height and width of patches, each of which is a token of the tower.
        hidden: Width of the tower's stream.
        width: Width between the products of its MLPs.
        layers: How many of the tower's layers are computed.
        heads: Number of its heads.
        activation, eps: Of its MLPs and norms.
        keeps_class: Whether the state of the class token is one of an image's vectors.
        projector_activation, projector_bias: Of the projector.
        outputs: Width of an image's vectors.
    """

    image_token: int
    pixels: PixelValues
    image_size: int
    patch_size: int
    hidden: int
    width: int
    layers: int
    heads: int
    activation: str
    eps: float
    keeps_class: bool
    projector_activation: str
    projector_bias: bool
    outputs: int

    @property
    def placeholder(self) -> int:
        """The token that prompts have for an image."""
        return self.image_token

    @property
    def video_token(self) -> None:
        """The token that stands for each of a video's vectors: there is none."""

    @property
    def patches(self) -> int:
        """Number of patches of an image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def tokens(self) -> int:
        """Number of an image's vectors, and so of its tokens in a prompt."""
        return self.patches + self.keeps_class

    @property
    def least_tokens(self) -> int:
        """Fewest tokens of an image."""
        return self.tokens

    def most_tokens(self, replaced: Mapping[str, Any]) -> int:
        """Return the most tokens of an image, with these settings of the processor replaced."""
        return self.tokens

    def activations(self, tokens: int, together: int) -> int:
        """Return the elements that images of so many tokens take at once, of which `together` are computed."""
        return together * (self.patches + 1) * (7 * self.hidden + 2 * self.width)

    @property
    def num_parameters(self) -> int:
        """Number of weights that are loaded."""
        h, out = self.hidden, self.outputs
        embeddings = h * CHANNELS * self.patch_size**2 + h + (self.patches + 1) * h + 2 * h
        layer = 4 * (h * h + h) + 2 * h * self.width + self.width + h + 4 * h
        return embeddings + self.layers * layer + h * out + out * out + 2 * out * self.projector_bias


@dataclass(frozen=True)
class QwenVisionSpec:
    """The tower of Qwen2-VL or, if `gated`, of Qwen2.5-VL.

    Attributes:
        image_token: The token that stands for each of an image's vectors.
        pixels: How pixels become numbers.
        patch_size: Height and width of patches, in pixels.
        frames: How many pictures a patch has, one behind the other in time; an image is shown as often.
        merge: Height and width, in patches, of the squares that become one vector.
        hidden: Width of the tower's stream.
        width: Width between the products of its MLPs.
        layers: Number of its layers.
        heads: Number of its heads.
        gated: Whether MLPs have gates and norms are root mean square norms.
        activation, eps: Of its MLPs and norms.
        window: Height and width, in pixels, of the windows that patches see; 0: they see the whole image.
        whole_layers: Layers in which patches see the whole image nevertheless.
        outputs: Width of an image's vectors.
        min_pixels, max_pixels: Between which images are resized.
        video_token: The token that stands for each of a video's vectors; None: videos are not read.
        tokens_per_second: How many positions a second of a video takes; 0: a position for each slice.
    """

    image_token: int
    pixels: PixelValues
    patch_size: int
    frames: int
    merge: int
    hidden: int
    width: int
    layers: int
    heads: int
    gated: bool
    activation: str
    eps: float
    window: int
    whole_layers: tuple[int, ...]
    outputs: int
    min_pixels: int
    max_pixels: int
    video_token: int | None = None
    tokens_per_second: float = 0.0

    @property
    def placeholder(self) -> int:
        """The token that prompts have for an image."""
        return self.image_token

    @property
    def square(self) -> int:
        """Height and width of the pixels that become one vector."""
        return self.patch_size * self.merge

    @property
    def least_tokens(self) -> int:
        """Fewest tokens of an image."""
        return 1

    def most_tokens(self, replaced: Mapping[str, Any]) -> int:
        """Return the most tokens of an image, with these settings of the processor replaced."""
        own = {} if "size" in replaced else {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        most = pixel_bounds({**own, **replaced})[1]
        return max(1, most // self.square**2)

    def activations(self, tokens: int, together: int) -> int:
        """Return the elements that an image of so many tokens takes; images are computed one by one."""
        patches = tokens * self.merge**2
        return patches * (8 * self.hidden + 3 * self.width + 2 * CHANNELS * self.frames * self.patch_size**2)

    @property
    def num_parameters(self) -> int:
        """Number of weights that are loaded."""
        h, merged = self.hidden, self.hidden * self.merge**2
        norm, ups = (h, 2) if self.gated else (2 * h, 1)
        layer = 4 * (h * h + h) + (ups + 1) * h * self.width + ups * self.width + h + 2 * norm
        patch = h * CHANNELS * self.frames * self.patch_size**2
        return patch + self.layers * layer + norm + merged * (merged + 1) + self.outputs * (merged + 1)


VisionSpec = ClipSpec | QwenVisionSpec | ModuleVisionSpec
"""A tower for images."""


def pixel_bounds(settings: Mapping[str, Any]) -> tuple[int, int]:
    """Return between how many pixels an image processor of Qwen2-VL resizes images. Raises ValueError if they are no
    positive whole numbers, or the first is larger."""
    size = settings.get("size") or {}
    if not isinstance(size, Mapping):
        raise ValueError(f"size is {size!r}, it must have a shortest_edge and a longest_edge")
    least = settings.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels") or _MIN_PIXELS
    most = settings.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels") or _MAX_PIXELS
    if not all(type(each) is int and 0 < each < 2**31 for each in (least, most)) or least > most:
        raise ValueError(f"min_pixels {least!r} and max_pixels {most!r} must be whole numbers, the first no larger")
    return least, most


MAX_VIDEO_TOKENS = 16_384
"""Most tokens of a video."""
_MIN_PIXELS = 56 * 56
_MAX_PIXELS = 28 * 28 * 1280


def read_vision(directory: Path) -> VisionSpec | None:
    """Return the tower that a checkpoint's config.json describes; None if it has none, or one that is not served.

    Raises:
        CheckpointError: A key of the tower is missing or makes no sense.
    """
    fields = ConfigFile(directory / "config.json")
    names, tower = fields.get("architectures", []), fields.get("vision_config")
    if not isinstance(names, list) or not (isinstance(tower, dict) or isinstance(fields.get("vq_config"), dict)):
        return None
    if isinstance(tower, dict):  # else images become tokens of a codebook
        for name in (_QWEN2, _QWEN25):
            if name in names:
                return _qwen(fields, tower, processor_settings(directory, "image_processor"), gated=name == _QWEN25)
        clip = _clip(fields, tower, processor_settings(directory, "image_processor")) if _LLAVA in names else None
        if clip is not None:
            return clip
    from quire.models.vision.modules import read_modules  # the specs of all models, which no model of text wants

    return read_modules(directory, names)


def _clip(fields: ConfigFile, tower: Mapping[str, Any], settings: Mapping[str, Any]) -> ClipSpec | None:
    layer = fields.get("vision_feature_layer", -2)
    strategy = fields.get("vision_feature_select_strategy", "default")
    if tower.get("model_type") != "clip_vision_model" or not isinstance(layer, int) or strategy not in _STRATEGIES:
        return None
    sizes = {name: _count(fields, tower, name, default) for name, default in _CLIP.items()}
    count = sizes["num_hidden_layers"]
    computed = layer if layer >= 0 else count + 1 + layer
    if not 0 < computed <= count:
        raise fields.wrong("vision_feature_layer", f"names none of {count} layers")
    return ClipSpec(
        image_token=_image_token(fields),
        pixels=PixelValues.of(settings),
        image_size=sizes["image_size"],
        patch_size=sizes["patch_size"],
        hidden=sizes["hidden_size"],
        width=sizes["intermediate_size"],
        layers=computed,
        heads=sizes["num_attention_heads"],
        activation=str(tower.get("hidden_act", "quick_gelu")),
        eps=float(tower.get("layer_norm_eps", 1e-5)),
        keeps_class=strategy == "full",
        projector_activation=str(fields.get("projector_hidden_act", "gelu")),
        projector_bias=fields.flag("multimodal_projector_bias", True),
        outputs=_count(fields, fields.get("text_config"), "hidden_size", _TEXT_WIDTH),
    )


def _qwen(
    fields: ConfigFile, tower: Mapping[str, Any], settings: Mapping[str, Any], *, gated: bool
) -> QwenVisionSpec | None:
    width_of_text = _TEXT_WIDTH_QWEN if gated else tower.get("hidden_size", _TEXT_WIDTH_QWEN)
    sizes = {name: _count(fields, tower, name, default) for name, default in _QWEN.items()}
    hidden = _count(fields, tower, "hidden_size" if gated else "embed_dim", 3584 if gated else 1280)
    if gated:
        width = _count(fields, tower, "intermediate_size", 3420)
    else:
        width = int(hidden * float(tower.get("mlp_ratio", 4)))
    try:
        least, most = pixel_bounds(settings)
    except ValueError as error:
        raise CheckpointError(f"The checkpoint's image processor: {error}.") from None
    whole = tower.get("fullatt_block_indexes", (7, 15, 23, 31))
    return QwenVisionSpec(
        image_token=_image_token(fields),
        pixels=PixelValues.of(settings),
        patch_size=sizes["patch_size"],
        frames=sizes["temporal_patch_size"],
        merge=sizes["spatial_merge_size"],
        hidden=hidden,
        width=width,
        layers=sizes["depth"],
        heads=sizes["num_heads"],
        gated=gated,
        activation=str(tower.get("hidden_act", "silu" if gated else "quick_gelu")),
        eps=1e-6,
        window=_count(fields, tower, "window_size", 112) if gated else 0,
        whole_layers=tuple(whole) if gated else (),
        outputs=_count(fields, tower, "out_hidden_size", width_of_text) if gated else int(width_of_text),
        min_pixels=least,
        max_pixels=most,
        video_token=_video_token(fields),
        tokens_per_second=float(tower.get("tokens_per_second", 4)) if gated else 0.0,
    )


_STRATEGIES = ("default", "full")
_CLIP = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 32,
}
_TEXT_WIDTH = 4096
_QWEN = {"depth": 32, "num_heads": 16, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
_TEXT_WIDTH_QWEN = 3584


def _count(fields: ConfigFile, values: Mapping[str, Any], name: str, default: int) -> int:
    value = values.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise fields.refused("vision_config", f"'{name}' of a part is {value!r}, it must be a positive integer.")
    return value


def _video_token(fields: ConfigFile) -> int | None:
    value = fields.get("video_token_id")
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _image_token(fields: ConfigFile) -> int:
    for name in ("image_token_id", "image_token_index"):
        value = fields.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    raise CheckpointError("config.json has no image_token_id, which tells where images stand: download it again.")
