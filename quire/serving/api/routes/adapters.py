"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them.

Mounted with an API key, in developer mode, or where the environment allows it: whoever may call them decides which
files the server reads.
"""

from __future__ import annotations

from fastapi import FastAPI
from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from quire.errors import RequestError
from quire.serving.api.request_body import openapi_body, read_body
from quire.serving.api.schemas.known_fields import Body
from quire.serving.api.serving import Serving


class LoadAdapterRequest(Body):
    """Which adapter is loaded, and under which name."""

    lora_name: str = Field(description="What requests call it as their model.")
    lora_path: str = Field(description="Directory of the server, s3://bucket/key or hub id.")
    load_inplace: bool = Field(default=False, description="Replace what has this name.")


class UnloadAdapterRequest(Body):
    """Which adapter is forgotten."""

    lora_name: str
    lora_int_id: int | None = Field(default=None, description="Ignored: the name says which.")


def add_adapters(app: FastAPI, serving: Serving) -> None:
    """Add the routes to the application."""

    @app.post("/v1/load_lora_adapter", openapi_extra=openapi_body(LoadAdapterRequest), tags=["models"])
    async def load_adapter(request: Request) -> Response:
        """Load an adapter; answered when requests can name it. If it does not serve, nothing has happened."""
        fields = await read_body(request, LoadAdapterRequest)
        if fields.lora_name in serving.names:
            raise RequestError(f"'{fields.lora_name}' is the base model's name.", param="lora_name")
        await serving.session.adapters.load(fields.lora_name, fields.lora_path, replace=fields.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{fields.lora_name}' added successfully.")

    @app.post("/v1/unload_lora_adapter", openapi_extra=openapi_body(UnloadAdapterRequest), tags=["models"])
    async def unload_adapter(request: Request) -> Response:
        """Forget an adapter. Requests that run with it go on."""
        fields = await read_body(request, UnloadAdapterRequest)
        await serving.session.adapters.unload(fields.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{fields.lora_name}' removed successfully.")
