"""Images of requests: fetched in the event loop, read in processes of low priority, placed among a prompt's tokens."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

from quire.errors import RequestError
from quire.foundation.config import Config
from quire.foundation.messages.to_engine import MediaSpan, Medium
from quire.media.fetch import MediaAccess, scheme_of
from quire.media.model_images import NO_SETTINGS, ImageSettings, ModelImages
from quire.serving.api.large_requests.readers import LargeRequestReaders, ReadImage
from quire.serving.api.schemas.chat import ImagePart

MAX_UUID = 256
"""Maximum number of characters of an image's uuid."""
MAX_SETTINGS = 4_096
"""Maximum number of characters that a request's settings of images have as JSON."""
_GIB = 2**30


class AskedImages(NamedTuple):
    """What a request says about its images beside them.

    Attributes:
        settings: How they are read.
        owner: Whose uuids name them: requests of the same tenant and salt share these.
    """

    settings: ImageSettings = NO_SETTINGS
    owner: str = ""


class RequestImages:
    """Reads images for one model, and keeps those that were read last.

    An image is found again by its data: URL, or, where a request brings none, by the uuid that an earlier request of
    the same owner gave it.

    Args:
        images: What the model makes of images; None: it reads text alone.
        config: Resolved settings.
        readers: Processes that read them.
    """

    def __init__(self, images: ModelImages | None, config: Config, readers: LargeRequestReaders) -> None:
        self._images = images
        self._access = MediaAccess.of(config)
        self._readers = readers
        self._most_bytes = int(config.media.mm_processor_cache_gb * _GIB)
        self._read_lately: OrderedDict[bytes, Medium] = OrderedDict()  # by digests of URLs, or of owners and uuids
        self._kept_bytes = 0

    @property
    def are_served(self) -> bool:
        """Whether the model sees images."""
        return self._images is not None

    @property
    def token(self) -> int | None:
        """The token that prompts have for an image; None: the model reads text alone."""
        return None if self._images is None else self._images.spec.placeholder

    def check_count(self, parts: Sequence[ImagePart], longest: int) -> None:
        """Raise a RequestError for more images than are allowed, or fit into `longest` tokens."""
        if parts and self._images is not None:
            with_place = parts[-1].place
            try:
                self._images.check_count(len(parts), longest)
            except RequestError as error:
                error.param = with_place
                raise

    async def placed(
        self, tokens: Sequence[int], parts: Sequence[ImagePart], asked: AskedImages
    ) -> tuple[list[int], list[MediaSpan]]:
        """Return a rendered prompt's tokens with room for its images, and where these are.

        Raises:
            RequestError: An image may not or cannot be read; `param` is its part.
            OverloadedError: Too many large requests are being read.
        """
        assert self._images is not None, "images of a model that reads text alone"
        texts = tuple(json.dumps(dict(each), sort_keys=True) for each in asked.settings)
        if max(map(len, texts)) > MAX_SETTINGS:
            raise RequestError(f"mm_processor_kwargs and media_io_kwargs have at most {MAX_SETTINGS} characters.")
        media = await asyncio.gather(*(self._read(part, texts, asked.owner) for part in parts))
        try:
            return self._images.placed(tokens, media)
        except RequestError as error:
            error.param = "messages"
            raise

    async def _read(self, part: ImagePart, settings: tuple[str, ...], owner: str) -> Medium:
        name = b"" if part.uuid is None else _key(*settings, owner, _checked(part.uuid, part.place))
        if part.url is None:
            if (kept := self._find(name)) is None:
                raise RequestError(
                    f"{part.place}: no image of the uuid {part.uuid!r} is kept here any more: send the image as well.",
                    param=part.place,
                )
            return kept
        scheme, content = scheme_of(part.url), b""
        key = _key(*settings, part.url) if scheme == "data" else b""
        medium = self._find(key)
        if medium is None:
            try:
                if scheme in ("http", "https"):
                    content = await self._access.fetch(part.url)
                answer = await self._readers.ask(ReadImage("" if content else part.url, content, *settings))
            except RequestError as error:
                error.param = error.param or part.place
                raise
            assert answer.medium is not None
            medium = answer.medium
        for each in filter(None, (key, name)):
            self._keep(each, medium)
        return medium

    def _find(self, key: bytes) -> Medium | None:
        if (kept := self._read_lately.get(key)) is not None:
            self._read_lately.move_to_end(key)
        return kept

    def _keep(self, key: bytes, medium: Medium) -> None:
        if (before := self._read_lately.pop(key, None)) is not None:  # of an image that had this uuid, or the same one
            self._kept_bytes -= before.num_bytes
        self._read_lately[key] = medium
        self._kept_bytes += medium.num_bytes
        while self._kept_bytes > self._most_bytes:
            _, oldest = self._read_lately.popitem(last=False)
            self._kept_bytes -= oldest.num_bytes


def _key(*parts: str) -> bytes:
    digest = sha256()
    for part in parts:
        digest.update(sha256(part.encode("utf-8", "surrogatepass")).digest())
    return digest.digest()


def _checked(uuid: str, place: str) -> str:
    if not 0 < len(uuid) <= MAX_UUID:
        raise RequestError(f"{place}.uuid must be a text of 1 to {MAX_UUID} characters.", param=place)
    return uuid
