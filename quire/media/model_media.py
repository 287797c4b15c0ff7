"""All that a model reads beside text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.errors import RequestError
from quire.foundation.config import Config
from quire.foundation.messages.to_engine import MediaSpan, Medium, MediumKind
from quire.media.model_images import ImageSettings, ModelImages, load_model_images
from quire.media.model_sounds import ModelSounds, load_model_sounds
from quire.media.model_videos import ModelVideos, load_model_videos
from quire.media.placement import NAMES, Marks, placed
from quire.models.vision.pixel_settings import SAMPLING

ReadKind = ModelImages | ModelSounds | ModelVideos
"""What a model makes of a kind of media."""


@dataclass(frozen=True)
class ModelMedia:
    """Media for one model.

    Attributes:
        images: What it makes of images; None: it sees none.
        sounds: What it makes of sounds; None: it hears none.
        videos: What it makes of videos; None: it sees none.
    """

    images: ModelImages | None = None
    sounds: ModelSounds | None = None
    videos: ModelVideos | None = None

    @property
    def by_kind(self) -> Mapping[MediumKind, ReadKind]:
        """What the model makes of each kind that it reads."""
        kinds: dict[MediumKind, ReadKind | None]
        kinds = {"image": self.images, "audio": self.sounds, "video": self.videos}
        return {kind: each for kind, each in kinds.items() if each is not None}

    @property
    def marks(self) -> dict[MediumKind, Marks]:
        """How prompts show the kinds that the model reads."""
        return {kind: each.marks for kind, each in self.by_kind.items()}

    def of_kind(self, kind: str) -> ReadKind:
        """Return what the model makes of a kind. Raises RequestError if it does not read it."""
        found = self.by_kind.get(kind)  # type: ignore[call-overload]
        if found is None:
            read = " and ".join(("text", *(NAMES[each] for each in self.by_kind)))
            raise RequestError(f"This model reads {read} alone: leave {NAMES.get(kind, kind)} out.")
        served: ReadKind = found
        return served

    def with_settings(self, settings: ImageSettings) -> ModelMedia:
        """Return these media under a request's settings. Raises RequestError for those that are not served."""
        if self.images is None:
            if settings.processor:
                raise RequestError("mm_processor_kwargs: this model sees no images.", param="mm_processor_kwargs")
            return self
        own = {name: value for name, value in settings.processor.items() if name not in SAMPLING}
        images = self.images.with_settings(settings._replace(processor=own))
        if self.videos is None:
            if len(own) < len(settings.processor):
                raise RequestError("mm_processor_kwargs: this model sees no videos.", param="mm_processor_kwargs")
            return replace(self, images=images)
        return replace(self, images=images, videos=self.videos.with_settings(settings.processor))

    def check_counts(self, kinds: Sequence[str], longest: int | None = None) -> None:
        """Raise a RequestError for media of a kind that is not read, and for more than are allowed, or fit into
        `longest` tokens."""
        least = 0
        for kind in dict.fromkeys(kinds):
            own, count, name = self.of_kind(kind), kinds.count(kind), NAMES[kind]
            if own.limit is not None and count > own.limit:
                raise RequestError(
                    f"A prompt may have at most {own.limit} {name} on this server, this one has {count}."
                )
            least += count * own.least_tokens
            if longest is not None and least > longest:
                raise RequestError(
                    f"{count} {name} of at least {own.least_tokens} tokens each do not fit into the context of "
                    f"{longest} tokens: send fewer."
                )

    def placed(self, tokens: Sequence[int], media: Sequence[Medium]) -> tuple[list[int], list[MediaSpan]]:
        """Return a prompt with all tokens of its media in place of their placeholders, and where they are. Raises
        RequestError if there are more or fewer placeholders than media."""
        return placed(tokens, media, self.marks)

    def of_value(self, kind: str, value: Any) -> Medium:
        """Return the medium of a file's content, a picture or samples. Raises RequestError if it cannot be read."""
        own = self.of_kind(kind)
        if isinstance(value, bytes):
            return own.of_file(value)
        return own.of_samples(value) if isinstance(own, ModelSounds) else own.of_picture(value)


def load_model_media(config: Config) -> ModelMedia:
    """Return what a model makes of media under resolved settings.

    Raises:
        ConfigError: A package is missing, or --mm-processor-kwargs has something that is not served.
        CheckpointError: The settings of the checkpoint's processor are not served.
    """
    images = load_model_images(config)
    videos = None if images is None else load_model_videos(config, images)
    return ModelMedia(images, load_model_sounds(config), videos)
