"""Parts of messages that are images, in all forms that clients send."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import RequestError

IMAGE_TYPES = ("image_url", "input_image", "image", "image_pil")
"""Types of parts that are images: OpenAI's of chats and of responses, transformers', and vLLM's."""
PLACEHOLDER = {"type": "image"}
"""What a chat template that goes through parts gets of an image."""


def image_of(part: Mapping[str, Any], place: str) -> Any:
    """Return what a part has as its image: a URL, or, offline, a picture. Raises RequestError if it has none.

    Args:
        place: What the client calls the part.
    """
    for name in ("image_url", "image_pil", "image", "url"):
        found = part.get(name)
        if isinstance(found, Mapping):
            found = found.get("url")
        if found is not None:
            return found
    if part.get("file_id"):
        raise RequestError(f"{place}: images of files are not read: send the image as a data: URL.", param=place)
    raise RequestError(
        f"{place} has no image: send {{'image_url': {{'url': 'data:image/png;base64,…'}}}}.", param=place
    )


def url_of(part: Mapping[str, Any], place: str) -> tuple[str | None, str | None]:
    """Return the URL that a part has as its image, and its uuid; None: it has none. Raises RequestError if both are
    missing."""
    uuid = part.get("uuid")
    if uuid is not None and not isinstance(uuid, str):
        raise RequestError(f"{place}: the uuid of an image must be a text.", param=place)
    if uuid is not None and all(part.get(name) is None for name in ("image_url", "image", "url", "file_id")):
        return None, uuid
    found = image_of(part, place)
    if not isinstance(found, str):
        raise RequestError(f"{place}: the URL of an image must be a text.", param=place)
    return found, uuid
