"""GET /: the page with a playground and the live picture of the engine. GET /docs and /redoc: the OpenAPI document.

Owns which address each file has, how long a browser keeps it, and what a page may load: nothing from elsewhere, so all
pages work without a network. The files of GET / lie in `quire/serving/api/page`.
"""

from __future__ import annotations

import hashlib
import importlib.resources
from importlib import resources
from pathlib import Path

from fastapi import FastAPI
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response

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
FILES = ("swagger-ui-bundle.js", "swagger-ui.css", "redoc.standalone.js", "favicon.png")
DOCS_POLICY = (
    "default-src 'none'; style-src 'self' 'unsafe-inline'; script-src 'self' 'unsafe-inline'; connect-src 'self'; "
    "img-src 'self' data:; font-src 'self' data:; worker-src blob:; base-uri 'none'; frame-ancestors 'none'"
)


class PageFiles:
    """All files of GET /, read once. Their `version` is a digest, which is part of their addresses and in the
    document."""

    def __init__(self) -> None:
        directory = resources.files("quire.serving.api").joinpath("page")
        contents = {file.name: file.read_bytes() for file in directory.iterdir() if file.is_file()}
        digest = hashlib.sha256()
        for name in sorted(contents):
            digest.update(name.encode() + b"\0" + contents[name] + b"\0")
        self.version = digest.hexdigest()[:16]
        self.document = contents.pop(_DOCUMENT).replace(_VERSION, self.version.encode())
        self.contents = {name: content for name, content in contents.items() if _suffix(name) in _TYPES}

    def kept(self, version: str) -> str:
        """Cache-Control of a file that was asked for under a version. While servers of two versions share an address, a
        page may ask the other one: it gets the file, and asks again next time."""
        return KEPT if version == self.version else ASKED_AGAIN


def add_page(app: FastAPI, serving: Serving) -> None:
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
        if (content := files.contents.get(name)) is None:
            raise HTTPException(404)
        headers = {**SECURITY_HEADERS, "Cache-Control": files.kept(version)}
        return Response(content, media_type=_TYPES[_suffix(name)], headers=headers)


def _suffix(name: str) -> str:
    return name.rpartition(".")[2]


def add_docs_pages(app: FastAPI, serving: Serving) -> None:
    if serving.config.server.disable_fastapi_docs:
        return
    directory = Path(str(importlib.resources.files("fastapi_offline"))) / "static"

    @app.get("/docs", include_in_schema=False)
    async def swagger(request: Request) -> Response:
        """Swagger UI, which can also send requests."""
        files = _files(request)
        page = get_swagger_ui_html(
            openapi_url=request.scope.get("root_path", "") + "/openapi.json",
            title=app.title,
            swagger_js_url=f"{files}/swagger-ui-bundle.js",
            swagger_css_url=f"{files}/swagger-ui.css",
            swagger_favicon_url=f"{files}/favicon.png",
        )
        page.headers["Content-Security-Policy"] = DOCS_POLICY
        return page

    @app.get("/redoc", include_in_schema=False)
    async def redoc(request: Request) -> Response:
        """ReDoc, which is for reading."""
        files = _files(request)
        page = get_redoc_html(
            openapi_url=request.scope.get("root_path", "") + "/openapi.json",
            title=app.title,
            redoc_js_url=f"{files}/redoc.standalone.js",
            redoc_favicon_url=f"{files}/favicon.png",
            with_google_fonts=False,
        )
        page.headers["Content-Security-Policy"] = DOCS_POLICY
        return page

    @app.get("/docs/files/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        """A script, a style or an image of the pages."""
        if name not in FILES:
            raise HTTPException(404)
        return FileResponse(directory / name)


def _files(request: Request) -> str:
    return str(request.scope.get("root_path", "")) + "/docs/files"
