"""Media of requests: fetched in the event loop, read in processes of low priority, placed among a prompt's tokens."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

from quire.errors import RequestError
from quire.foundation.config import Config
from quire.foundation.messages.to_engine import MediaSpan, Medium, MediumKind
from quire.media.fetch import MediaAccess, scheme_of
from quire.media.model_images import NO_SETTINGS, ImageSettings
from quire.media.model_media import ModelMedia
from quire.serving.api.large_requests.readers import LargeRequestReaders, ReadMedium
from quire.serving.api.schemas.chat import MediumPart

MAX_UUID = 256
"""Maximum number of characters of a medium's uuid."""
MAX_SETTINGS = 4_096
"""Maximum number of characters that a request's settings of media have as JSON."""
_GIB = 2**30


class AskedMedia(NamedTuple):
    """What a request says about its media beside them.

    Attributes:
        settings: How they are read.
        owner: Whose uuids name them: requests of the same tenant and salt share these.
    """

    settings: ImageSettings = NO_SETTINGS
    owner: str = ""


class RequestMedia:
    """Reads media for one model, and keeps those that were read last.

    A medium is found again by its data: URL, or, where a request brings none, by the uuid that an earlier request of
    the same owner gave it.

    Args:
        media: What the model makes of media.
        config: Resolved settings.
        readers: Processes that read them.
    """

    def __init__(self, media: ModelMedia, config: Config, readers: LargeRequestReaders) -> None:
        self._media = media
        self._access = MediaAccess.of(config)
        self._readers = readers
        self._most_bytes = int(config.media.mm_processor_cache_gb * _GIB)
        self._read_lately: OrderedDict[bytes, Medium] = OrderedDict()  # by digests of URLs, or of owners and uuids
        self._kept_bytes = 0

    @property
    def kinds(self) -> tuple[MediumKind, ...]:
        """The kinds of media that the model reads."""
        return tuple(self._media.by_kind)

    @property
    def placeholders(self) -> dict[MediumKind, int]:
        """By kind that the model reads, the token that prompts have for a medium."""
        return {kind: mark.placeholder for kind, mark in self._media.marks.items()}

    def check_count(self, parts: Sequence[MediumPart], longest: int) -> None:
        """Raise a RequestError for more media than are allowed, or fit into `longest` tokens."""
        if parts:
            try:
                self._media.check_counts([part.kind for part in parts], longest)
            except RequestError as error:
                error.param = parts[-1].place
                raise

    async def placed(
        self, tokens: Sequence[int], parts: Sequence[MediumPart], asked: AskedMedia
    ) -> tuple[list[int], list[MediaSpan]]:
        """Return a rendered prompt's tokens with room for its media, and where these are.

        Raises:
            RequestError: A medium may not or cannot be read; `param` is its part.
            OverloadedError: Too many large requests are being read.
        """
        texts = tuple(json.dumps(dict(each), sort_keys=True) for each in asked.settings)
        if max(map(len, texts)) > MAX_SETTINGS:
            raise RequestError(f"mm_processor_kwargs and media_io_kwargs have at most {MAX_SETTINGS} characters.")
        media = await asyncio.gather(*(self._read(part, texts, asked.owner) for part in parts))
        try:
            return self._media.placed(tokens, media)
        except RequestError as error:
            error.param = "messages"
            raise

    async def _read(self, part: MediumPart, settings: tuple[str, ...], owner: str) -> Medium:
        name = b"" if part.uuid is None else _key(part.kind, *settings, owner, _checked(part.uuid, part.place))
        if part.url is None:
            if (kept := self._find(name)) is None:
                raise RequestError(
                    f"{part.place}: no {part.kind} of the uuid {part.uuid!r} is kept here any more: send the "
                    f"{part.kind} as well.",
                    param=part.place,
                )
            return kept
        scheme, content = scheme_of(part.url), b""
        key = _key(part.kind, *settings, part.url) if scheme == "data" else b""
        medium = self._find(key)
        if medium is None:
            try:
                if scheme in ("http", "https"):
                    content = await self._access.fetch(part.url, part.kind)
                answer = await self._readers.ask(ReadMedium(part.kind, "" if content else part.url, content, *settings))
            except RequestError as error:
                if error.param in (None, "file"):  # as decoders call what they read
                    error.param = part.place
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
        if (before := self._read_lately.pop(key, None)) is not None:  # of a medium that had this uuid, or the same one
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
