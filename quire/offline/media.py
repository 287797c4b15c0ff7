"""Media of prompts and conversations that `LLM` gets, as the engine takes them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from quire.errors import RequestError
from quire.foundation.config import Config
from quire.foundation.messages.to_engine import MediaSpan, Medium, MediumKind
from quire.media.fetch import MediaAccess, scheme_of
from quire.media.model_audio import load_model_audio
from quire.media.model_images import NO_SETTINGS, ImageSettings
from quire.media.model_media import ModelMedia, load_model_media
from quire.media.parts import PLACEHOLDERS, kind_of, value_of
from quire.media.placement import NAMES
from quire.text.tokenizer import Tokenizer


class LocalMedia:
    """Media for the model of an engine in this process.

    Args:
        config: Resolved settings.
    """

    def __init__(self, config: Config) -> None:
        self._media = load_model_media(config)
        self._audio = load_model_audio(config)
        self._access = MediaAccess.of(config)

    def placeholders(self, tokenizer: Tokenizer) -> dict[MediumKind, str]:
        """Return the texts of tokens that stand for media, by the kinds that the model reads."""
        return {
            kind: tokenizer.decode([mark.placeholder], skip_special_tokens=False)
            for kind, mark in self._media.marks.items()
        }

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
        """Return a prompt's tokens with room for its media, and where these are.

        Args:
            tokens: The prompt, with a placeholder for each medium.
            data: `multi_modal_data`: by kind, a medium or a list of them: `{"image": picture}`,
                `{"audio": [(samples, rate), …]}`.
            settings: `mm_processor_kwargs`: settings of the image processor that the prompt replaces.

        Raises:
            RequestError: The model reads no such media, one cannot be read, or placeholders are missing.
        """
        if not isinstance(data, Mapping) or (data.keys() - set(NAMES)):
            named = f" with '{min(data.keys() - set(NAMES))}'" if isinstance(data, Mapping) else ""
            raise RequestError(
                f"multi_modal_data{named} is not supported: it is {{'image': picture or list of pictures}}, or the "
                f"like with {' and '.join(list(NAMES)[1:])}.",
                param="multi_modal_data",
            )
        values = [(kind, value) for kind, given in data.items() for value in _several(kind, given)]
        return self._placed(tokens, values, ImageSettings.of(settings))

    def of_conversation(
        self, tokens: list[int], values: Sequence[tuple[MediumKind, Any]]
    ) -> tuple[list[int], list[MediaSpan]]:
        """Return a rendered conversation's tokens with room for its media, and where these are."""
        return self._placed(tokens, values)

    def _placed(
        self, tokens: list[int], values: Sequence[tuple[MediumKind, Any]], settings: ImageSettings = NO_SETTINGS
    ) -> tuple[list[int], list[MediaSpan]]:
        if not values:
            return tokens, []
        try:
            self._media.check_counts([kind for kind, _ in values])
        except RequestError as error:
            error.param = "multi_modal_data"
            raise
        media = self._media.with_settings(settings)
        return media.placed(tokens, [self._medium(media, kind, value) for kind, value in values])

    def _medium(self, media: ModelMedia, kind: MediumKind, value: Any) -> Medium:
        if not isinstance(value, str):
            return media.of_value(kind, value)
        if scheme_of(value) in ("http", "https"):
            with ThreadPoolExecutor(1) as thread:  # this one may have an event loop that runs, as in a notebook
                return media.of_value(kind, thread.submit(asyncio.run, self._access.fetch(value, kind)).result())
        return media.of_value(kind, self._access.read(value, kind))


def _several(kind: str, given: Any) -> Sequence[Any]:
    """Return the media of a kind that a prompt gives: a pair of samples and their rate is one sound, one of frames
    and their rate one video."""
    if given is None:
        return ()
    return given if isinstance(given, list) or (isinstance(given, tuple) and kind == "image") else (given,)


def without_media(
    messages: Iterable[Mapping[str, Any]], placeholders: Mapping[MediumKind, str] | None
) -> tuple[list[dict[str, Any]], list[tuple[MediumKind, Any]]]:
    """Return messages as a chat template takes them, and their media in order, with their kinds.

    Args:
        messages: A conversation, as plain data.
        placeholders: The texts of tokens of media, for templates that take texts; None for those that go through parts.
    """
    plain, values = list[dict[str, Any]](), list[tuple[MediumKind, Any]]()
    for number, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, list) or not any(_kind_of(part) for part in content):
            plain.append(dict(message))
            continue
        parts = list[Any]()
        for place, part in enumerate(content):
            if (kind := _kind_of(part)) is not None:
                values.append((kind, value_of(part, f"messages[{number}].content[{place}]")))
                shown = PLACEHOLDERS[kind] if placeholders is None else {"text": placeholders.get(kind, "")}
                parts.append(shown)
            else:
                parts.append(part)
        if placeholders is not None:
            texts = [part.get("text", "") if isinstance(part, Mapping) else part for part in parts]
            plain.append({**message, "content": "\n".join(map(str, texts))})
        else:
            plain.append({**message, "content": parts})
    return plain, values


def _kind_of(part: Any) -> MediumKind | None:
    return kind_of(part) if isinstance(part, Mapping) else None
