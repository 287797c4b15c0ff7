"""GET /: the page with a playground and the live picture of the engine, without anything from elsewhere.

Owns what a browser may do with its files, which lie in `quire/serving/api/page`: which address a file has, how long it
is kept, and what the page may load.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.responses import Response

from quire.serving.api.serving import Serving

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Nothing from elsewhere, no script in the document, and no text that becomes markup."""
SECURITY_HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}
KEPT = "public, max-age=31536000, immutable"
ASKED_AGAIN = "no-cache"
_TYPES = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
_DOCUMENT = "index.html"
_VERSION = b"{version}"


@dataclass(frozen=True)
class PageFile:
    """A script, a style or an image."""

    content: bytes
    media_type: str


class PageFiles:
    """All files, read once.

    Attributes:
        version: A digest of all of them; part of their addresses, so that browsers can keep them for good.
        document: The page itself, which names its files by this version.
    """

    def __init__(self) -> None:
        directory = resources.files("quire.serving.api").joinpath("page")
        contents = {file.name: file.read_bytes() for file in directory.iterdir() if file.is_file()}
        digest = hashlib.sha256()
        for name in sorted(contents):
            digest.update(name.encode() + b"\0" + contents[name] + b"\0")
        self.version = digest.hexdigest()[:16]
        self.document = contents.pop(_DOCUMENT).replace(_VERSION, self.version.encode())
        self._files = {
            name: PageFile(content, _TYPES[suffix])
            for name, content in contents.items()
            if (suffix := name.rpartition(".")[2]) in _TYPES
        }

    def find(self, name: str) -> PageFile | None:
        """The file of this name."""
        return self._files.get(name)

    def kept(self, version: str) -> str:
        """Cache-Control of a file that was asked for under a version. While servers of two versions share an address,
        a page may ask the other one: it gets the file, and asks again next time."""
        return KEPT if version == self.version else ASKED_AGAIN


def add_page(app: FastAPI, serving: Serving) -> None:
    """The front page and its files."""
    files = PageFiles()

    @app.get("/", include_in_schema=False)
    @app.head("/", include_in_schema=False)
    async def page() -> Response:
        """Chat in the browser, and what the engine does."""
        headers = {**SECURITY_HEADERS, "Cache-Control": ASKED_AGAIN}
        return Response(files.document, media_type="text/html", headers=headers)

    @app.get("/page/{version}/{name}", include_in_schema=False)
    async def file(version: str, name: str) -> Response:
        """A script, a style or an image of the page."""
        if (found := files.find(name)) is None:
            raise HTTPException(404)
        headers = {**SECURITY_HEADERS, "Cache-Control": files.kept(version)}
        return Response(found.content, media_type=found.media_type, headers=headers)
