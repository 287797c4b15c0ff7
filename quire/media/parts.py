"""Parts of messages that are images, sounds or videos, in all forms that clients send."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import RequestError
from quire.foundation.messages.to_engine import MediumKind

KINDS: dict[str, MediumKind] = {
    **dict.fromkeys(("image_url", "input_image", "image", "image_pil"), "image"),
    **dict.fromkeys(("audio_url", "input_audio", "audio"), "audio"),
    **dict.fromkeys(("video_url", "video"), "video"),
}
"""Kinds of media by the types of their parts: OpenAI's of chats and of responses, transformers', and vLLM's."""
PLACEHOLDERS: dict[MediumKind, dict[str, str]] = {
    "image": {"type": "image"},
    "audio": {"type": "audio", "audio": ""},  # some templates ask for the key
    "video": {"type": "video", "video": ""},
}
"""What a chat template that goes through parts gets of a medium."""
_VALUES: dict[MediumKind, tuple[str, ...]] = {
    "image": ("image_url", "image_pil", "image", "url"),
    "audio": ("audio_url", "input_audio", "audio", "url"),
    "video": ("video_url", "video", "url"),
}
_SEND = {
    "image": "{'image_url': {'url': 'data:image/png;base64,…'}}",
    "audio": "{'input_audio': {'data': '…', 'format': 'wav'}}",
    "video": "{'video_url': {'url': 'data:video/mp4;base64,…'}}",
}
ARTICLES: dict[MediumKind, str] = {"image": "an image", "audio": "a sound", "video": "a video"}
"""What a medium of a kind is called."""


def kind_of(part: Mapping[str, Any]) -> MediumKind | None:
    """Return the kind of medium that a part is; None: it is something else."""
    kind = part.get("type")
    return KINDS.get(kind) if isinstance(kind, str) else None


def value_of(part: Mapping[str, Any], place: str) -> Any:
    """Return what a part of a kind has: a URL, or, offline, a picture or samples. Raises RequestError if it has none.

    Args:
        part: The part, with its `type`.
        place: What the client calls the part.
    """
    kind = kind_of(part)
    assert kind is not None, "a part of no kind"
    for name in _VALUES[kind]:
        found = part.get(name)
        if isinstance(found, Mapping):
            found = _data_url(found, place) if "data" in found and kind == "audio" else found.get("url")
        if found is not None:
            return found
    if part.get("file_id"):
        raise RequestError(
            f"{place}: {kind}s of files are not read: send the {kind} as a data: URL.".replace("audios", "sounds"),
            param=place,
        )
    raise RequestError(f"{place} has no {kind}: send {_SEND[kind]}.", param=place)


def url_of(part: Mapping[str, Any], place: str) -> tuple[str | None, str | None]:
    """Return the URL that a part has, and its uuid; None: it has none. Raises RequestError if both are missing."""
    kind = kind_of(part)
    assert kind is not None, "a part of no kind"
    uuid = part.get("uuid")
    if uuid is not None and not isinstance(uuid, str):
        raise RequestError(f"{place}: the uuid of {ARTICLES[kind]} must be a text.", param=place)
    if uuid is not None and all(part.get(name) is None for name in (*_VALUES[kind], "file_id")):
        return None, uuid
    found = value_of(part, place)
    if not isinstance(found, str):
        raise RequestError(f"{place}: the URL of {ARTICLES[kind]} must be a text.", param=place)
    return found, uuid


def _data_url(found: Mapping[str, Any], place: str) -> str:
    """Return OpenAI's `input_audio` as a URL; its format is found in the data."""
    data = found["data"]
    if not isinstance(data, str):
        raise RequestError(f"{place}: the data of a sound must be a text in base64.", param=place)
    return data if data.startswith("data:") else f"data:audio;base64,{data}"
