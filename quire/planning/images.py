"""What a model's tower for images takes of the memory, and where images are served."""

from __future__ import annotations

from dataclasses import replace

from quire.errors import ConfigError
from quire.foundation.config import Config
from quire.models.spec import DTYPE_BYTES, ModelSpec
from quire.models.vision.module_spec import ModuleVisionSpec
from quire.models.vision.vision_spec import ClipSpec, QwenVisionSpec, VisionSpec
from quire.planning.footprint import format_bytes

TOGETHER = 4
"""Most images that a tower computes at once."""


def kept_vectors(config: Config, spec: ModelSpec) -> int:
    """Return how many vectors of images the worker keeps, and at most needs for one step: as many as a step has tokens,
    or those of the largest image."""
    if spec.vision is None:
        return 0
    return max(config.scheduler.max_num_batched_tokens or 0, largest_image(config, spec, spec.vision))


def largest_image(config: Config, spec: ModelSpec, vision: VisionSpec) -> int:
    """Return the most tokens that an image may have: as many as a sequence at most. Raises ConfigError if
    --mm-processor-kwargs makes no sense."""
    asked = config.model.max_model_len
    longest = asked if isinstance(asked, int) and asked > 0 else spec.max_model_len
    try:
        return min(vision.most_tokens(config.media.mm_processor_kwargs), longest)
    except ValueError as error:
        raise ConfigError(f"--mm-processor-kwargs: {error}.", param="mm_processor_kwargs") from None


def largest_size(config: Config, spec: ModelSpec, vision: VisionSpec) -> tuple[int, int]:
    """Return height and width, in pixels, of an image of the most tokens."""
    if isinstance(vision, ClipSpec):
        return vision.image_size, vision.image_size
    assert isinstance(vision, QwenVisionSpec), "a tower of transformers' modules, which GPUs do not compute"
    return vision.square, largest_image(config, spec, vision) * vision.square


def tower_bytes(config: Config, spec: ModelSpec) -> int:
    """Return the bytes of the tower's weights, of the vectors that are kept, and of what the tower computes at once;
    0: there is none."""
    vision = spec.vision
    if vision is None or not spec.has_tower:
        return 0
    activations = vision.activations(largest_image(config, spec, vision), TOGETHER)
    elements = vision.num_parameters + kept_vectors(config, spec) * vision.outputs + activations
    return elements * DTYPE_BYTES[config.model.dtype]


def memory_of_images(config: Config, spec: ModelSpec) -> str:
    """Return what the report's line about images says of memory; empty if none are read."""
    if spec.vision is None:
        return ""
    kept = kept_vectors(config, spec)
    cache = kept * spec.vision.outputs * DTYPE_BYTES[config.model.dtype]
    whole = format_bytes(tower_bytes(config, spec))
    return f"; the tower takes {whole}, {format_bytes(cache)} of it for vectors of {kept:,} tokens, which are kept"


def for_images(config: Config, spec: ModelSpec, *, gpus: int) -> tuple[Config, ModelSpec, list[str]]:
    """Return the settings and the spec with images left out where they are not wanted or not served, and the line of
    the report about them; no line for models without a tower. `gpus` is how many compute the model; 0: a CPU does."""
    if spec.vision is None:
        return config, spec, []
    if config.media.max_images == 0:
        why = "none: --limit-mm-per-prompt"
    elif gpus > 1:
        why = "none: a model that GPUs divide reads text alone; --language-model-only says so too"
    elif gpus and isinstance(spec.vision, ModuleVisionSpec):
        why = "none: a tower of transformers' modules computes on CPUs alone so far; --language-model-only says so too"
    else:
        most = largest_image(config, spec, spec.vision)
        _check_together(config, spec.vision)
        return config, spec, [f"images      {'up to ' if spec.vision.least_tokens < most else ''}{most:,} tokens each"]
    left_out = replace(config, model=replace(config.model, language_model_only=True))
    return left_out, replace(spec, vision=None), [f"images      {why}"]


def _check_together(config: Config, vision: VisionSpec) -> None:
    """Raise a ConfigError if a step has no room for all tokens of an image, which see one another."""
    together = vision.longest if isinstance(vision, ModuleVisionSpec) else 0
    if together > (config.scheduler.max_num_batched_tokens or together):
        raise ConfigError(
            f"--max-num-batched-tokens is {config.scheduler.max_num_batched_tokens}, and the {together} tokens of an "
            f"image are computed in one step: give at least {together}.",
            param="max_num_batched_tokens",
        )
