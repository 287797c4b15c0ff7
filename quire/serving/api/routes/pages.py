"""GET /: the page with a playground and the live picture of the engine. GET /docs and /redoc: the OpenAPI document.

All pages work without a network: nothing comes from elsewhere.
"""

from __future__ import annotations

import importlib.resources
from pathlib import Path

from fastapi import FastAPI
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from quire.serving.api.page_files import PageFiles
from quire.serving.api.serving import Serving

FILES = ("swagger-ui-bundle.js", "swagger-ui.css", "redoc.standalone.js", "favicon.png")
DOCS_POLICY = (
    "default-src 'none'; style-src 'self' 'unsafe-inline'; script-src 'self' 'unsafe-inline'; connect-src 'self'; "
    "img-src 'self' data:; font-src 'self' data:; worker-src blob:; base-uri 'none'; frame-ancestors 'none'"
)


def add_page(app: FastAPI, serving: Serving) -> None:
    files = PageFiles(has_docs=not serving.config.server.disable_fastapi_docs)

    @app.get("/", include_in_schema=False)
    @app.head("/", include_in_schema=False)
    async def page() -> Response:
        """Chat in the browser, and what the engine does."""
        return files.document()

    @app.get("/page/{version}/{name:path}", include_in_schema=False)
    async def file(version: str, name: str) -> Response:
        """A script, a style, an image or a font of the page."""
        if (response := files.file(version, name)) is None:
            raise HTTPException(404)
        return response


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
