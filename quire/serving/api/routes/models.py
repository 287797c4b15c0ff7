"""GET /v1/models and /v1/models/{name}; POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them.

The routes of adapters are there with an API key, in developer mode, or where the environment allows it: whoever may
call them decides which files the server reads.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from quire.errors import RequestError
from quire.foundation.messages.from_engine import NO_POOLING, PoolingInfo
from quire.foundation.messages.to_engine import Adapter
from quire.serving.api.request_body import openapi_body, read_body
from quire.serving.api.schemas.known_fields import Body, optional
from quire.serving.api.serving import Serving, json_response


def add_models(app: FastAPI, serving: Serving) -> None:
    @app.get("/v1/models", tags=["models"])
    async def all_models() -> Response:
        """Every name of the model, then the adapters that are loaded."""
        cards = [_card(serving, name) for name in serving.names]
        cards += [_adapter_card(serving, adapter) for adapter in serving.session.adapters.all]
        return json_response({"object": "list", "data": cards})

    @app.get("/v1/models/{name:path}", tags=["models"])
    async def one_model(name: str) -> Response:
        """One of them."""
        if not name:
            raise HTTPException(404)
        if adapter := serving.session.adapters.loaded(name):
            return json_response(_adapter_card(serving, adapter))
        return json_response(_card(serving, serving.model_name(name)))


def _adapter_card(serving: Serving, adapter: Adapter) -> dict[str, Any]:
    return {**_card(serving, adapter.name), "root": adapter.path, "parent": serving.names[0]}


def _card(serving: Serving, name: str) -> dict[str, Any]:
    ready = serving.session.ready
    length = ready.max_model_len if ready else serving.config.model.max_model_len
    return {
        "id": name,
        "object": "model",
        "created": serving.created,
        "owned_by": "quire",
        "root": serving.names[0],
        "parent": None,
        "max_model_len": length,
        "vocab_size": ready.vocab_size if ready else None,
        **({"input_modalities": ["text", *serving.chat.kinds]} if serving.chat.kinds else {}),
        **_pooling(ready.pooling if ready else NO_POOLING),
    }


def _pooling(info: PoolingInfo) -> dict[str, Any]:
    """What the model makes of whole texts; nothing if that is nothing."""
    if not info.tasks:
        return {}
    about: dict[str, Any] = {"tasks": info.tasks, "generates": info.generates}
    if info.dim:
        about |= {"dimension": info.dim, "matryoshka": info.matryoshka, "similarity": info.similarity}
        about |= {"dimensions": info.dimensions} if info.dimensions else {}
    if info.labels:
        about["labels"] = info.labels
    if info.prompts:
        about |= {"prompts": sorted(info.prompts), "default_prompt": info.default_prompt or None}
    return {"pooling": about}


class LoadAdapterRequest(Body):
    """Which adapter is loaded, and under which name."""

    lora_name: str = Field(description="What requests call it as their model.")
    lora_path: str = Field(description="Directory of the server, s3://bucket/key or hub id.")
    load_inplace: bool = Field(default=False, description="Replace what has this name.")


class UnloadAdapterRequest(Body):
    """Which adapter is forgotten."""

    lora_name: str
    lora_int_id: int | None = optional("Ignored: the name says which.")


def add_adapters(app: FastAPI, serving: Serving) -> None:
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
