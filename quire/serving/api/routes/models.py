"""GET /v1/models and GET /v1/models/{name}."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.responses import Response

from quire.foundation.messages.to_engine import Adapter
from quire.serving.api.serving import Serving, json_response


def add_models(app: FastAPI, serving: Serving) -> None:
    """What is served."""

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
    }
