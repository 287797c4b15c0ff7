"""Reads what the URL of an image, a sound or a video names: data, files of one directory, and what allowed hosts send.

Every fetch has limits of size, time and redirects. Each redirect is checked like the URL that the client sent.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

from quire.errors import RequestError
from quire.foundation.config import Config
from quire.foundation.messages.to_engine import MediumKind
from quire.media.addresses import AllowedHosts
from quire.media.parts import ARTICLES

if TYPE_CHECKING:
    import httpx

MAX_BYTES = 64 * 2**20
"""Largest file, in bytes."""
FETCH_SECONDS = 10.0
"""Longest time in which a file must have arrived, with all redirects."""
MAX_REDIRECTS = 3
MAX_URL = 8_192
"""Longest URL that is not the data itself, in characters."""
_REDIRECTS = (301, 302, 303, 307, 308)
_KINDS = "send a data: URL, an http(s) URL, or a file: URL"


class MediaAccess:
    """What media may be read from.

    Args:
        hosts: Hosts, addresses and networks of --allowed-media-domains.
        directory: The directory of --allowed-local-media-path; None: no files are read.
    """

    def __init__(self, hosts: tuple[str, ...] = (), directory: str | None = None) -> None:
        self._hosts = AllowedHosts(hosts)
        self._directory = directory

    @classmethod
    def of(cls, config: Config) -> MediaAccess:
        """What settings allow."""
        return cls(config.media.allowed_media_domains, config.media.allowed_local_media_path)

    async def fetch(self, url: str, kind: MediumKind = "image") -> bytes:
        """Return what an http(s) URL of a medium names. Raises RequestError if it may not or cannot be fetched."""
        try:
            async with asyncio.timeout(FETCH_SECONDS):
                return await self._follow(url, kind)
        except TimeoutError:
            raise RequestError(f"The {kind} was not there within {FETCH_SECONDS:g} s.") from None

    def read(self, url: str, kind: MediumKind = "image") -> bytes:
        """Return what a data: or file: URL of a medium names. Raises RequestError if it may not or cannot be read."""
        scheme = scheme_of(url)
        if scheme == "data":
            return _within_limit(_data(url), kind)
        if scheme == "file":
            return _within_limit(self._file(url), kind)
        raise RequestError(f"This is no URL of {ARTICLES[kind]}: {_KINDS}.")

    async def _follow(self, url: str, kind: MediumKind) -> bytes:
        import httpx  # only servers that fetch media pay for it

        async with httpx.AsyncClient(follow_redirects=False, trust_env=False, timeout=FETCH_SECONDS) as client:
            for _ in range(MAX_REDIRECTS + 1):
                answer = await self._get(client, url, kind)
                if isinstance(answer, bytes):
                    return answer
                url = answer
        raise RequestError(f"The {kind}'s URL leads on more than {MAX_REDIRECTS} times.")

    async def _get(self, client: httpx.AsyncClient, url: str, kind: MediumKind) -> bytes | str:
        """Return what a URL names, or the URL that it leads to."""
        import httpx

        parsed = _parsed(url, kind)
        self._hosts.check(parsed.host)
        port = parsed.port or (443 if parsed.scheme == "https" else 80)
        address = await self._hosts.address_of(parsed.host, port)
        pinned = parsed.copy_with(host=address)  # the name server is not asked again
        headers = {"Host": parsed.netloc.decode("ascii"), "Accept": f"{kind}/*", "Accept-Encoding": "identity"}
        request = client.build_request("GET", pinned, headers=headers, extensions={"sni_hostname": parsed.host})
        try:
            answer = await client.send(request, stream=True)
            try:
                if answer.status_code in _REDIRECTS and "location" in answer.headers:
                    return str(parsed.join(answer.headers["location"]))
                return await _body(answer, kind)
            finally:
                await answer.aclose()
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise RequestError(f"The {kind} could not be fetched ({type(error).__name__}).") from None

    def _file(self, url: str) -> bytes:
        if self._directory is None:
            raise RequestError("This server reads no files: start it with --allowed-local-media-path.")
        root = os.path.realpath(self._directory)
        path = _path(url)
        outside = RequestError("The file is not in the directory of --allowed-local-media-path, or is not there.")
        if os.path.commonpath((root, os.path.realpath(path))) != root:
            raise outside
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        except (OSError, ValueError):
            raise outside from None
        try:
            opened = os.path.realpath(f"/proc/self/fd/{descriptor}")  # what a link led to when it was opened
            if os.path.commonpath((root, opened)) != root or not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise outside
            with open(descriptor, "rb", closefd=False) as file:
                return file.read(MAX_BYTES + 1)
        except OSError:
            raise outside from None
        finally:
            os.close(descriptor)


def scheme_of(url: str) -> str:
    """Return the scheme of a URL, in lower case."""
    return url[:16].partition(":")[0].lower()


def _parsed(url: str, kind: MediumKind) -> httpx.URL:
    """Parse a URL; the parser is the one that the connection is made by."""
    import httpx

    if len(url) > MAX_URL:
        raise RequestError(f"The {kind}'s URL is longer than {MAX_URL} characters.")
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, ValueError):
        raise RequestError(f"This is no URL of {ARTICLES[kind]}: {_KINDS}.") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise RequestError(f"This is no URL of {ARTICLES[kind]}: {_KINDS}.")
    if parsed.userinfo or "\\" in url:
        raise RequestError(f"The {kind}'s URL has a user name or a backslash: leave them out.")
    return parsed


async def _body(answer: httpx.Response, kind: MediumKind) -> bytes:
    if answer.status_code != 200:
        raise RequestError(f"The {kind}'s host answers with status {answer.status_code}.")
    parts, size = [], 0
    async for part in answer.aiter_raw():
        size += len(part)
        if size > MAX_BYTES:
            break
        parts.append(part)
    return _within_limit(b"".join(parts), kind, size)


def _within_limit(content: bytes, kind: MediumKind, size: int | None = None) -> bytes:
    if (len(content) if size is None else size) > MAX_BYTES:
        raise RequestError(f"The {kind} has more than {MAX_BYTES >> 20} MiB: send a smaller one.")
    return content


def _data(url: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma:
        raise RequestError("The data: URL has no comma before its data.")
    if not head.lower().endswith(";base64"):
        return unquote_to_bytes(body)
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError):
        raise RequestError("The data: URL is not valid base64.") from None


def _path(url: str) -> Path:
    rest = url[len("file:") :]
    if rest.startswith("//"):
        host, _, rest = rest[2:].partition("/")
        if host not in ("", "localhost"):
            raise RequestError("A file: URL names no host: write file:///path.")
        rest = "/" + rest
    try:
        path = os.fsdecode(unquote_to_bytes(rest))
    except UnicodeError:
        path = ""
    if not path.startswith("/") or "\0" in path:
        raise RequestError("A file: URL has an absolute path: write file:///path.")
    return Path(path)
