"""Finds out how a checkpoint's images become tokens, and how large its tower is, without weights.

Run as a program by processes that do not import torch: prints a ModuleVisionSpec, or an error, as JSON.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from PIL import Image

from quire.errors import CheckpointError, RequestError
from quire.models.config_file import processor_settings
from quire.models.fallback.classes import read_config, text_config_of
from quire.models.fallback.image_processor import CheckpointProcessor, processor_class
from quire.models.fallback.inspection import answer
from quire.models.fallback.tower import build_tower_model
from quire.models.vision.module_spec import ModuleVisionSpec, VideoLayout
from quire.models.vision.pixel_settings import PixelValues

_TOKENS = ("image_token_id", "image_token_index", "img_context_token_id", "image_patch_id")
_SIZES = ((1, 1), (336, 336), (2048, 2048), (4096, 1024), (1024, 4096))
"""Width and height of the images by which the fewest and most tokens are found."""
_TWO_SIDED = ("Gemma3ForConditionalGeneration",)
"""Architectures whose images' tokens see one another."""
_IN_WINDOWS = ("Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration")
"""Architectures whose images' tokens see one another in layers with a window, where the text model's config says so."""
_MIDDLE = (0.5, 0.5, 0.5)
_STATES = 24
"""Elements that a tower computes at once for each element of its stream."""


def describe(directory: Path) -> ModuleVisionSpec:
    """Describe the tower of a checkpoint.

    Raises:
        CheckpointError: transformers cannot compute it, or has no processor for it.
    """
    config = read_config(directory)
    architecture = str((config.architectures or [""])[0])
    model = build_tower_model(directory, architecture, torch.float32)
    token = image_token_of(config)
    processor = CheckpointProcessor(directory, token)
    placeholder = processor.placeholder
    repeated = processor.repeated()
    counts, elements, vectors, tells_grid = [], 0, 0, False
    for size in _SIZES:
        try:
            found = processor.inputs(Image.new("RGB", size, (90, 120, 150)))
        except RequestError:  # some processors cannot read the smallest
            continue
        counts.append(len(found.tokens))
        vectors = max(vectors, found.tokens.count(token))
        elements = max(elements, sum(each.size for each in found.tensors.values()))
        tells_grid = "image_grid_thw" in found.tensors
    if not counts:
        raise CheckpointError(f"{architecture}'s processor reads none of the images that were tried.")
    deep = _deep_layers(config)
    positions = hasattr(model.base_model, "get_rope_index")
    if positions and not tells_grid:
        raise CheckpointError(f"{architecture}: the positions of its images follow a rule that is not built.")
    vision = getattr(config, "vision_config", config)
    see_one_another = architecture in _TWO_SIDED
    if architecture in _IN_WINDOWS:  # the smaller ones of them do not
        see_one_another = text_config_of(config).use_bidirectional_attention == "vision"
    return ModuleVisionSpec(
        directory=str(directory),
        architecture=architecture,
        image_token=token,
        placeholder=placeholder,
        outputs=text_config_of(config).hidden_size * (1 + len(deep)),
        deep=deep,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        least_tokens=max(1, min(counts)),
        largest_tokens=max(*counts, max(counts) - vectors + processor.most_vectors),
        elements=_STATES * elements,
        merge=int(getattr(vision, "spatial_merge_size", 2)) if positions else 0,
        longest=max(vectors, processor.most_vectors) if see_one_another else 0,
        in_windows=see_one_another and architecture in _IN_WINDOWS,
        video=_video_of(directory, config),
        **repeated._asdict(),
    )


def _deep_layers(config: Any) -> tuple[int, ...]:
    """Return the text model's layers whose inputs get vectors of images."""
    behind = len(getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None) or ())
    pairs = getattr(config, "deepstack_layer_map", None) or ()
    into = {*(layer for _, layer in pairs), *(getattr(config, "spatial_target_layers", None) or ())} if pairs else ()
    return tuple(sorted(into)) if into else tuple(range(1, behind + 1))


def _video_of(directory: Path, config: Any) -> VideoLayout | None:
    """Return how videos are read, if texts between their slices tell times, as Qwen3-VL's processor writes them."""
    kind = processor_class(directory)
    if kind is None or kind.__name__ != "Qwen3VLProcessor":
        return None
    names = ("video_token_id", "vision_start_token_id", "vision_end_token_id")
    token, begin, end = (getattr(config, name, None) for name in names)
    if type(token) is not int or type(begin) is not int or type(end) is not int:
        return None
    settings = {"image_mean": _MIDDLE, "image_std": _MIDDLE} | processor_settings(directory, "video_processor")
    vision = config.vision_config
    return VideoLayout(token, (begin, end), PixelValues.of(settings), vision.patch_size, vision.temporal_patch_size)


def image_token_of(config: Any) -> int:
    """Return the token that stands for a vector of an image. Raises CheckpointError if a config names none."""
    for name in _TOKENS:
        value = getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    raise CheckpointError("config.json has no image_token_id, which tells where images stand: download it again.")


if __name__ == "__main__":
    answer(describe)
