"""Images that requests bring: how many, from where, and how they are resized."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.errors import ConfigError

_KINDS = ("image", "video", "audio")
"""Kinds of media, as vLLM calls them."""


@dataclass(frozen=True)
class MediaConfig:
    """Images and sounds, for models that see or hear them."""

    limit_mm_per_prompt: dict[str, Any] = field(default_factory=dict)
    """Most images, sounds and videos of a prompt, as JSON: {"image": 4, "audio": 1}, or {"image": {"count": 4}}. 0:
    none is read, and the tower is not loaded. Default: as many as the context holds."""
    mm_processor_kwargs: dict[str, Any] = field(default_factory=dict)
    """Settings of the model's image processor that replace those of its preprocessor_config.json, as JSON."""
    media_io_kwargs: dict[str, Any] = field(default_factory=dict)
    """How files of images are read, as JSON: {"image": {"rgba_background_color": [255, 255, 255]}} says what shows
    through transparent pixels. Default: transparency is left out, as in transformers."""
    mm_processor_cache_gb: float = 0.125
    """Most pixels that an API process keeps of images that requests have brought, in GiB. 0: none."""
    allowed_media_domains: tuple[str, ...] = ()
    """Hosts that images are fetched from: names, addresses, or networks such as 10.0.0.0/8. A name may lead to public
    addresses and to those of the networks. Default: none, so that requests bring images as data: URLs."""
    allowed_local_media_path: str | None = None
    """Directory whose files requests may name as images, as file:///path. Default: none."""

    def __post_init__(self) -> None:
        for kind, limit in self.limit_mm_per_prompt.items():
            if kind not in _KINDS:
                raise ConfigError(
                    f"--limit-mm-per-prompt has no kind '{kind}': choose of {', '.join(_KINDS)}.",
                    param="limit_mm_per_prompt",
                )
            count = _count(limit)
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise ConfigError(
                    f"--limit-mm-per-prompt needs a number of at least 0 for {kind}, got {limit}.",
                    param="limit_mm_per_prompt",
                )
        if not 0 <= self.mm_processor_cache_gb < 2**20:
            raise ConfigError(
                f"--mm-processor-cache-gb must be at least 0, got {self.mm_processor_cache_gb:g}.",
                param="mm_processor_cache_gb",
            )
        try:
            background_of(self.media_io_kwargs)
        except ValueError as error:
            raise ConfigError(f"--media-io-kwargs: {error}.", param="media_io_kwargs") from None

    def most_of(self, kind: str) -> int | None:
        """Return the most media of a kind ("image", "audio" or "video") of a prompt; None for as many as fit."""
        limit: int | None = _count(self.limit_mm_per_prompt.get(kind))
        return limit


def background_of(settings: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """Return what shows through transparent pixels under these `media_io_kwargs`; None: transparency is left out.
    Raises ValueError for settings that are not served."""
    image = settings.get("image") or {}
    if unknown := [kind for kind in settings if kind not in _KINDS]:
        raise ValueError(f"there is no kind '{unknown[0]}', only {', '.join(_KINDS)}")
    if not isinstance(image, Mapping) or (image.keys() - {"rgba_background_color", "image_mode"}):
        raise ValueError("'image' has rgba_background_color and image_mode alone")
    if image.get("image_mode", "RGB") != "RGB":
        raise ValueError("image_mode must be RGB, which models read")
    colour = image.get("rgba_background_color")
    if colour is None:
        return None
    if not (isinstance(colour, list | tuple) and len(colour) == 3 and all(_is_byte(each) for each in colour)):
        raise ValueError("rgba_background_color must be three numbers from 0 to 255")
    return colour[0], colour[1], colour[2]


def _is_byte(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 255


def _count(limit: Any) -> Any:
    """Return the number of a limit in either form; vLLM's other keys say what its profiling runs are like."""
    return limit.get("count") if isinstance(limit, Mapping) else limit
