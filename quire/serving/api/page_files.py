"""The files of GET /, which lie in `quire/serving/api/page`: which address each has, how long a browser keeps it, and
what the page may load, which is nothing from elsewhere."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable

from starlette.responses import Response

from quire.version import __version__

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; font-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
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
_TYPES = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml", "woff2": "font/woff2"}
_DOCUMENT = "index.html"


class PageFiles:
    """All files of GET /, read once. Their `version` is a digest, which is part of their addresses and in the document.

    Args:
        has_docs: Whether the document has links to /docs.
        has_engine: Whether it shows the live picture of an engine.
    """

    def __init__(self, *, has_docs: bool = True, has_engine: bool = True) -> None:
        contents = dict(_read(resources.files("quire.serving.api").joinpath("page")))
        digest = hashlib.sha256()
        for name in sorted(contents):
            digest.update(name.encode() + b"\0" + contents[name] + b"\0")
        self.version = digest.hexdigest()[:16]
        self._document = contents.pop(_DOCUMENT)
        facts = {
            "version": self.version,
            "quire": __version__,
            "docs": "" if has_docs else " hidden",
            "engine": "yes" if has_engine else "no",
        }
        for name, value in facts.items():
            self._document = self._document.replace(b"{%s}" % name.encode(), value.encode())
        self._contents = {name: content for name, content in contents.items() if _suffix(name) in _TYPES}

    def document(self) -> Response:
        """The answer to GET /."""
        headers = {**SECURITY_HEADERS, "Cache-Control": ASKED_AGAIN}
        return Response(self._document, media_type="text/html", headers=headers)

    def file(self, version: str, name: str) -> Response | None:
        """The answer to GET /page/{version}/{name}; None if there is no such file. While servers of two versions share
        an address, a page may ask the other one: it gets the file, and asks again next time."""
        if (content := self._contents.get(name)) is None:
            return None
        headers = {**SECURITY_HEADERS, "Cache-Control": KEPT if version == self.version else ASKED_AGAIN}
        return Response(content, media_type=_TYPES[_suffix(name)], headers=headers)


def _read(directory: Traversable, prefix: str = "") -> Iterator[tuple[str, bytes]]:
    """Every file below a directory, with its path from there."""
    for entry in directory.iterdir():
        if entry.is_dir():
            yield from _read(entry, f"{prefix}{entry.name}/")
        else:
            yield prefix + entry.name, entry.read_bytes()


def _suffix(name: str) -> str:
    return name.rpartition(".")[2]
