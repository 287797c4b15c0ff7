"""What a model's towers for images and sounds take of the memory, and where these are served."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

from quire.errors import ConfigError
from quire.foundation.config import Config
from quire.models.audio.hearing_spec import HearingSpec
from quire.models.spec import DTYPE_BYTES, ModelSpec
from quire.models.vision.module_spec import ModuleVisionSpec
from quire.models.vision.vision_spec import MAX_VIDEO_TOKENS, ClipSpec, QwenVisionSpec, VisionSpec
from quire.planning.footprint import format_bytes

TOGETHER = 4
"""Most images that a tower computes at once."""


def kept_vectors(config: Config, spec: ModelSpec) -> int:
    """Return how many vectors of media the worker keeps, and at most needs for one step: as many as a step has tokens,
    or those of the largest medium."""
    if not spec.towers:
        return 0
    largest = max(largest_image(config, spec, tower) for tower in spec.towers)
    if _sees_videos(config, spec):
        largest = max(largest, min(MAX_VIDEO_TOKENS, _longest(config, spec)))
    return max(config.scheduler.max_num_batched_tokens or 0, largest)


def largest_image(config: Config, spec: ModelSpec, vision: VisionSpec | HearingSpec) -> int:
    """Return the most tokens that an image or a sound may have: as many as a sequence at most. Raises ConfigError if
    --mm-processor-kwargs makes no sense."""
    try:
        return min(vision.most_tokens(config.media.mm_processor_kwargs), _longest(config, spec))
    except ValueError as error:
        raise ConfigError(f"--mm-processor-kwargs: {error}.", param="mm_processor_kwargs") from None


def _longest(config: Config, spec: ModelSpec) -> int:
    asked = config.model.max_model_len
    return asked if isinstance(asked, int) and asked > 0 else spec.max_model_len


def _sees_videos(config: Config, spec: ModelSpec) -> bool:
    has_token = spec.vision is not None and spec.vision.video_token is not None
    return has_token and config.media.most_of("video") != 0 and importlib.util.find_spec("av") is not None


def largest_size(config: Config, spec: ModelSpec, vision: VisionSpec) -> tuple[int, int]:
    """Return height and width, in pixels, of an image of the most tokens."""
    if isinstance(vision, ClipSpec):
        return vision.image_size, vision.image_size
    assert isinstance(vision, QwenVisionSpec), "a tower of transformers' modules, which GPUs do not compute"
    return vision.square, largest_image(config, spec, vision) * vision.square


def tower_bytes(config: Config, spec: ModelSpec) -> int:
    """Return the bytes of the towers' weights, of the vectors that are kept, and of what a tower computes at once;
    0: there is none."""
    towers = spec.towers
    if not towers or not spec.has_tower:
        return 0
    activations = max(tower.activations(largest_image(config, spec, tower), TOGETHER) for tower in towers)
    weights, outputs = sum(tower.num_parameters for tower in towers), max(tower.outputs for tower in towers)
    return (weights + kept_vectors(config, spec) * outputs + activations) * DTYPE_BYTES[config.model.dtype]


def memory_of_images(config: Config, spec: ModelSpec) -> str:
    """Return what the report's last line about media says of memory; empty if none are read."""
    if not spec.towers:
        return ""
    kept = kept_vectors(config, spec)
    cache = kept * max(tower.outputs for tower in spec.towers) * DTYPE_BYTES[config.model.dtype]
    whole = format_bytes(tower_bytes(config, spec))
    return f"; the tower takes {whole}, {format_bytes(cache)} of it for vectors of {kept:,} tokens, which are kept"


def for_images(config: Config, spec: ModelSpec, *, gpus: int) -> tuple[Config, ModelSpec, list[str]]:
    """Return the settings and the spec with media left out where they are not wanted or not served, and the lines of
    the report about them; no lines for models without towers. `gpus` is how many compute the model; 0: a CPU does."""
    vision, hearing, lines = spec.vision, spec.hearing, list[str]()
    if vision is not None:
        why = _without(config, vision, "image", gpus)
        lines.append(f"images      {why or _tokens(config, spec, vision)}")
        if why:
            vision = None
        else:
            _check_together(config, vision)
    if hearing is not None:
        why = _without(config, hearing, "audio", gpus)
        longest = f", up to {hearing.longest_s:,.0f} s"
        lines.append(f"sounds      {why or _tokens(config, spec, hearing) + longest}")
        hearing = None if why else hearing
    if lines and vision is None and hearing is None:
        config = replace(config, model=replace(config.model, language_model_only=True))
    return config, replace(spec, vision=vision, hearing=hearing), lines


def _without(config: Config, tower: VisionSpec | HearingSpec, kind: str, gpus: int) -> str:
    """Return why media of a kind are not read; empty: they are."""
    if config.media.most_of(kind) == 0:
        return "none: --limit-mm-per-prompt"
    if gpus > 1:
        return "none: a model that GPUs divide reads text alone; --language-model-only says so too"
    if gpus and isinstance(tower, ModuleVisionSpec | HearingSpec):
        return "none: a tower of transformers' modules computes on CPUs alone so far; --language-model-only says so too"
    return ""


def _tokens(config: Config, spec: ModelSpec, tower: VisionSpec | HearingSpec) -> str:
    most = largest_image(config, spec, tower)
    return f"{'up to ' if tower.least_tokens < most else ''}{most:,} tokens each"


def _check_together(config: Config, vision: VisionSpec) -> None:
    """Raise a ConfigError if a step has no room for all tokens of an image, which see one another."""
    together = vision.longest if isinstance(vision, ModuleVisionSpec) else 0
    if together > (config.scheduler.max_num_batched_tokens or together):
        raise ConfigError(
            f"--max-num-batched-tokens is {config.scheduler.max_num_batched_tokens}, and the {together} tokens of an "
            f"image are computed in one step: give at least {together}.",
            param="max_num_batched_tokens",
        )
