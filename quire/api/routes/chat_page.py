"""GET /: a chat page in one file, without anything from elsewhere."""

from __future__ import annotations

from importlib import resources

from fastapi import FastAPI
from starlette.responses import Response

from quire.api.serving import Serving

CONTENT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def add_page(app: FastAPI, serving: Serving) -> None:
    """The front page."""
    html = resources.files("quire.api").joinpath("chat.html").read_bytes()

    @app.get("/", include_in_schema=False)
    @app.head("/", include_in_schema=False)
    async def chat_page() -> Response:
        """Chat in the browser."""
        return Response(html, media_type="text/html", headers={"Content-Security-Policy": CONTENT_POLICY})
