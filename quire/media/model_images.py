"""What a model makes of images: from bytes or pictures to what its tower takes, and to tokens of a prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.errors import CheckpointError, ConfigError, RequestError
from quire.foundation.config import Config
from quire.foundation.config.media import background_of
from quire.foundation.messages.to_engine import Medium, MediumTensor
from quire.media.decode import Colour, as_rgb, check_pillow, decode
from quire.media.placement import Marks
from quire.models.config_file import processor_settings
from quire.models.vision.module_spec import ModuleVisionSpec
from quire.models.vision.pixel_settings import SAMPLING
from quire.models.vision.vision_spec import ClipSpec, QwenVisionSpec, VisionSpec, read_vision

if TYPE_CHECKING:
    from PIL.Image import Image

    from quire.media.pixels import ImageProcessor


_OF_REQUESTS = "mm_processor_kwargs"


class ImageSettings(NamedTuple):
    """What a request says about its images.

    Attributes:
        processor: Settings of the image processor that it replaces (`mm_processor_kwargs`).
        io: How files are read (`media_io_kwargs`); empty: as the server says.
    """

    processor: Mapping[str, Any] = MappingProxyType({})
    io: Mapping[str, Any] = MappingProxyType({})

    @classmethod
    def of(cls, processor: Mapping[str, Any] | None, io: Mapping[str, Any] | None = None) -> ImageSettings:
        """Make settings of fields that may be missing."""
        return cls(processor or {}, io or {})


NO_SETTINGS = ImageSettings()


@dataclass(frozen=True)
class ModelImages:
    """Images for one model.

    Attributes:
        spec: The model's tower.
        processor: Makes its pixels of pictures.
        limit: Most images of a prompt; None: as many as fit.
        stored: The settings of the checkpoint's image processor.
        replaced: Those that the server replaces.
        background: What shows through transparent pixels; None: transparency is left out.
    """

    spec: VisionSpec
    processor: ImageProcessor
    limit: int | None = None
    stored: Mapping[str, Any] = field(default_factory=dict)
    replaced: Mapping[str, Any] = field(default_factory=dict)
    background: Colour | None = None

    def with_settings(self, settings: ImageSettings) -> ModelImages:
        """Return these images under a request's settings. Raises RequestError for those that are not served, or make
        images larger than the server's do."""
        try:
            background = background_of(settings.io) if settings.io else self.background
        except ValueError as error:
            raise RequestError(f"media_io_kwargs: {error}.", param="media_io_kwargs") from None
        if not settings.processor:
            return replace(self, background=background)
        both = {**self.replaced, **settings.processor}
        try:
            processor = _processor(self.spec, self.stored, both)
            most, allowed = (self.spec.most_tokens(each) for each in (both, self.replaced))
        except ConfigError as error:
            raise RequestError(error.message.removeprefix("--mm-processor-kwargs: "), param=_OF_REQUESTS) from None
        except (ValueError, TypeError) as error:
            raise RequestError(f"{_OF_REQUESTS}: {error}.", param=_OF_REQUESTS) from None
        if most > allowed:
            raise RequestError(
                f"{_OF_REQUESTS}: images would have up to {most:,} tokens, and this server's have {allowed:,}: ask for "
                "fewer pixels.",
                param=_OF_REQUESTS,
            )
        return replace(self, processor=processor, background=background)

    @property
    def marks(self) -> Marks:
        """How prompts show images."""
        behind = self.spec.tokens_behind if isinstance(self.spec, ModuleVisionSpec) else None
        return Marks(self.spec.placeholder, self.spec.image_token, behind)

    @property
    def least_tokens(self) -> int:
        """Fewest tokens of an image."""
        return self.spec.least_tokens

    def of_file(self, content: bytes) -> Medium:
        """Return the image of a file's content. Raises RequestError if it cannot be read."""
        return self._medium(decode(content, self.background))

    def of_picture(self, picture: Any) -> Medium:
        """Return the image of a Pillow picture, or of an array [height, width, 3] uint8. Raises RequestError for
        anything else."""
        import numpy as np
        from PIL import Image

        if isinstance(picture, np.ndarray):
            if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3 or not picture.size:
                raise RequestError("An image as an array has the shape [height, width, 3] and the dtype uint8.")
            picture = Image.fromarray(picture)
        if not isinstance(picture, Image.Image):
            raise RequestError(f"An image is a PIL.Image or an array, got {type(picture).__name__}.")
        return self._medium(as_rgb(picture, self.background))

    def _medium(self, image: Image) -> Medium:
        picture = self.processor.picture(image)
        (height, width), content = picture.pixels.shape[:2], picture.pixels.tobytes()
        tensors = {
            name: MediumTensor(each.dtype.str, each.shape, each.tobytes()) for name, each in picture.tensors.items()
        }
        digest = sha256(self._settings + f"{height} {width}".encode() + b"\0" + content)
        for name, each in tensors.items():
            digest.update(f"\0{name} {each.dtype} {each.shape}\0".encode() + each.content)
        shape = picture.tokens, content, picture.rows, picture.columns
        rest = picture.places, picture.text
        return Medium(digest.digest(), height, width, *shape, tensors, *rest, two_sided=picture.two_sided)

    @cached_property
    def _settings(self) -> bytes:
        return json.dumps(self.processor.settings, sort_keys=True).encode()


def load_model_images(config: Config) -> ModelImages | None:
    """Return what a model makes of images under resolved settings; None if it reads text alone.

    Raises:
        ConfigError: Pillow is not installed, or --mm-processor-kwargs has something that is not served.
        CheckpointError: The settings of the checkpoint's image processor are not served.
    """
    directory, replaced = Path(config.model.model), config.media.mm_processor_kwargs
    is_wanted = not config.model.language_model_only and config.media.most_of("image") != 0
    reads = (directory / "config.json").is_file() and is_wanted
    spec = _tower_of(config) if reads and read_vision(directory) is not None else None
    if spec is None:
        if replaced and not config.model.language_model_only:
            raise ConfigError("--mm-processor-kwargs: this model reads text alone.", param="mm_processor_kwargs")
        return None
    check_pillow()
    if spec.video_token is not None:  # the others are of videos
        replaced = {name: value for name, value in replaced.items() if name not in SAMPLING}
    stored, background = processor_settings(directory, "image_processor"), background_of(config.media.media_io_kwargs)
    return ModelImages(
        spec, _processor(spec, stored, replaced), config.media.most_of("image"), stored, replaced, background
    )


def _tower_of(config: Config) -> VisionSpec | None:
    from quire.models.spec import spec_of  # with all families, which servers of text alone need not wait for

    return spec_of(config.model).vision


def _processor(spec: VisionSpec, settings: Mapping[str, Any], replaced: Mapping[str, Any]) -> ImageProcessor:
    from quire.media.clip_processor import ClipProcessor  # which import numpy
    from quire.media.module_processor import ModuleProcessor
    from quire.media.qwen_processor import QwenProcessor

    kinds: dict[type[VisionSpec], Any] = {
        ClipSpec: ClipProcessor,
        QwenVisionSpec: QwenProcessor,
        ModuleVisionSpec: ModuleProcessor,
    }
    kind, known = kinds[type(spec)], kinds[type(spec)].SETTINGS
    if unknown := sorted(replaced.keys() - set(known)):
        raise ConfigError(
            f"--mm-processor-kwargs: '{unknown[0]}' is not supported, only {', '.join(known)}."
            if known
            else "--mm-processor-kwargs: this model's processor is transformers' own, with the checkpoint's settings.",
            param="mm_processor_kwargs",
        )
    if "size" in replaced:  # which earlier names would replace in turn
        settings = {name: value for name, value in settings.items() if name not in ("min_pixels", "max_pixels")}
    try:
        both = {**settings, **replaced}
        found: ImageProcessor = kind(spec, both)
        return found
    except ValueError as error:
        if replaced:
            raise ConfigError(f"--mm-processor-kwargs: {error}.", param="mm_processor_kwargs") from None
        raise CheckpointError(
            f"The settings of the checkpoint's image processor are not served: {error}. --language-model-only serves "
            "its text model."
        ) from None
