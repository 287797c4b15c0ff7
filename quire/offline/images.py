"""Images of prompts and conversations that `LLM` gets, as the engine takes them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from quire.errors import RequestError
from quire.foundation.config import Config
from quire.foundation.messages.to_engine import MediaSpan, Medium
from quire.media.fetch import MediaAccess, scheme_of
from quire.media.model_audio import load_model_audio
from quire.media.model_images import NO_SETTINGS, ImageSettings, ModelImages, load_model_images
from quire.media.parts import IMAGE_TYPES, PLACEHOLDER, image_of
from quire.text.tokenizer import Tokenizer

_KIND = "image"


class LocalImages:
    """Images for the model of an engine in this process.

    Args:
        config: Resolved settings.
    """

    def __init__(self, config: Config) -> None:
        self._images = load_model_images(config)
        self._audio = load_model_audio(config)
        self._access = MediaAccess.of(config)

    def placeholder(self, tokenizer: Tokenizer) -> str:
        """Return the text of an image's token; empty for models that read text alone."""
        return (
            "" if self._images is None else tokenizer.decode([self._images.spec.placeholder], skip_special_tokens=False)
        )

    def heard(self, data: Any) -> Medium | None:
        """Return the sound of a prompt; None if the model cannot hear.

        Args:
            data: `multi_modal_data`: `{"audio": samples}` or `{"audio": (samples, rate)}`.

        Raises:
            RequestError: There is no sound, something else, or more than the model hears at once.
        """
        if self._audio is None:
            return None
        if not isinstance(data, Mapping) or data.keys() != {"audio"}:
            raise RequestError(
                "multi_modal_data of a model that hears is {'audio': (samples, rate)}.", param="multi_modal_data"
            )
        return self._audio.of_samples(data["audio"])

    def placed(
        self, tokens: list[int], data: Any, settings: Mapping[str, Any] | None = None
    ) -> tuple[list[int], list[MediaSpan]]:
        """Return a prompt's tokens with room for its images, and where these are.

        Args:
            tokens: The prompt, with a placeholder for each image.
            data: `multi_modal_data`: `{"image": picture}` or `{"image": [picture, …]}`.
            settings: `mm_processor_kwargs`: settings of the image processor that the prompt replaces.

        Raises:
            RequestError: The model reads text alone, an image cannot be read, or placeholders are missing.
        """
        if not isinstance(data, Mapping) or (others := data.keys() - {_KIND}):
            named = f" with '{min(others)}'" if isinstance(data, Mapping) else ""
            raise RequestError(
                f"multi_modal_data{named} is not supported: it is {{'image': picture or list of pictures}}.",
                param="multi_modal_data",
            )
        given = data.get(_KIND)
        pictures = [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
        return self._placed(tokens, pictures, ImageSettings.of(settings))

    def of_conversation(self, tokens: list[int], pictures: Sequence[Any]) -> tuple[list[int], list[MediaSpan]]:
        """Return a rendered conversation's tokens with room for its images, and where these are."""
        return self._placed(tokens, pictures)

    def _placed(
        self, tokens: list[int], pictures: Sequence[Any], settings: ImageSettings = NO_SETTINGS
    ) -> tuple[list[int], list[MediaSpan]]:
        if not pictures:
            return tokens, []
        if self._images is None:
            raise RequestError("This model reads text alone: leave images out.", param="multi_modal_data")
        self._images.check_count(len(pictures))
        images = self._images.with_settings(settings)
        return images.placed(tokens, [self._medium(images, picture) for picture in pictures])

    def _medium(self, images: ModelImages, picture: Any) -> Medium:
        if not isinstance(picture, str):
            return images.of_picture(picture)
        if scheme_of(picture) in ("http", "https"):
            with ThreadPoolExecutor(1) as thread:  # this one may have an event loop that runs, as in a notebook
                return images.of_file(thread.submit(asyncio.run, self._access.fetch(picture)).result())
        return images.of_file(self._access.read(picture))


def without_images(
    messages: Iterable[Mapping[str, Any]], placeholder: str | None
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return messages as a chat template takes them, and their images in order.

    Args:
        messages: A conversation, as plain data.
        placeholder: The text of an image's token, for templates that take texts; None for those that go through parts.
    """
    plain, pictures = list[dict[str, Any]](), list[Any]()
    for number, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, list) or not any(_is_image(part) for part in content):
            plain.append(dict(message))
            continue
        parts = list[Any]()
        for place, part in enumerate(content):
            if _is_image(part):
                pictures.append(image_of(part, f"messages[{number}].content[{place}]"))
                parts.append(PLACEHOLDER if placeholder is None else {"type": "text", "text": placeholder})
            else:
                parts.append(part)
        if placeholder is not None:
            parts = [part.get("text", "") if isinstance(part, Mapping) else part for part in parts]
        plain.append({**message, "content": parts if placeholder is None else "\n".join(map(str, parts))})
    return plain, pictures


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in IMAGE_TYPES
