"""POST and GET /admin/model: another model takes the place of the one that is served, without a restart.

Mounted with an API key or in developer mode only: whoever may call it decides which files the server reads. The name
says what is swapped and that it is the operator's; vLLM has no such route. Fields are `quire serve`'s flags, so what
starts a server also changes it.
"""

from __future__ import annotations

from typing import Any, Protocol

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.serving.api.model_switch import ADMIN_PATH
from quire.serving.api.request_body import openapi_body, read_body
from quire.serving.api.schemas.known_fields import NO_FIELDS
from quire.serving.api.schemas.model_change import ModelChange
from quire.serving.api.serving import json_response


class Swaps(Protocol):
    """What swaps models, see ModelSwaps."""

    def document(self) -> dict[str, Any]:
        """What is served, and how a swap proceeds."""
        ...

    async def begin(self, change: ModelChange) -> None:
        """Begin a swap."""
        ...

    async def wait_end(self) -> None:
        """Until no swap proceeds."""
        ...


def add_model_admin(app: FastAPI, swaps: Swaps) -> None:
    """Add the routes to the application."""

    @app.post(ADMIN_PATH, openapi_extra=openapi_body(ModelChange), tags=["operations"], status_code=202)
    async def change_model(request: Request) -> Response:
        """Serve another model. 202 once its loading has begun, or with `wait` 200 at the end; no request is lost.
        A model that cannot be served is a 400, a swap that proceeds a 409."""
        change = await read_body(request, ModelChange, NO_FIELDS)
        await swaps.begin(change)
        if not change.wait:
            return json_response(swaps.document(), 202)
        await swaps.wait_end()
        return json_response(swaps.document())

    @app.get(ADMIN_PATH, tags=["operations"])
    async def served_model() -> Response:
        """What is served, and how the present or last swap proceeds: its phase, and why it failed."""
        return json_response(swaps.document())
