"""GET /: the page with a playground and the live picture of the engine, without anything from elsewhere."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.responses import Response

from quire.serving.api.page_files import ASKED_AGAIN, SECURITY_HEADERS, PageFiles
from quire.serving.api.serving import Serving


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
