"""Routes for whoever runs the server: GET /server_info and /is_paused, POST /reset_prefix_cache, /pause and /resume,
/admin/model.

They are there with an API key or in developer mode only, because they show and change what concerns all users; whoever
may call /admin/model decides which files the server reads. GET /debug/counts is there in developer mode only.
"""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import asdict
from typing import Any, Literal, Protocol

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import RequestError
from quire.foundation.config import Config
from quire.foundation.messages.to_engine import PauseMode
from quire.serving.api.error_responses import error_response
from quire.serving.api.model_switch import ADMIN_PATH
from quire.serving.api.request_body import openapi_body, read_body
from quire.serving.api.schemas.known_fields import NO_FIELDS
from quire.serving.api.schemas.model_change import ModelChange
from quire.serving.api.serving import Serving, json_response
from quire.version import __version__

HIDDEN = "(hidden)"
_SECRETS = frozenset({"api_key", "hf_token"})


def add_operations(app: FastAPI, serving: Serving) -> None:
    @app.get("/server_info", tags=["operations"])
    async def server_info(config_format: Literal["text", "json"] = "text") -> Response:
        """All settings as they were resolved, without secrets; with `config_format=json` as an object."""
        settings = shown_settings(serving.config)
        system = {"quire": __version__, "python": sys.version.split()[0], "platform": platform.platform()}
        return json_response({
            "vllm_config": settings if config_format == "json" else str(settings),
            "system_env": {**system, "cpu_count": os.cpu_count()},
        })  # fmt: skip

    @app.post("/reset_prefix_cache", tags=["operations"])
    async def reset_prefix_cache(reset_running_requests: bool = False, reset_external: bool = False) -> Response:
        """Forget cached prefixes: no later prompt shares blocks with an earlier one. Running requests go on."""
        for name, asked in (("reset_running_requests", reset_running_requests), ("reset_external", reset_external)):
            if asked:
                return error_response(RequestError(f"{name}=true is not supported: leave it out.", param=name))
        await serving.session.control("reset_prefix_cache")
        return Response()

    @app.post("/pause", tags=["operations"])
    async def pause(
        mode: PauseMode = "abort", clear_cache: bool = True, wait_for_inflight_requests: bool = False
    ) -> Response:
        """Generate nothing until /resume; new requests wait. Answered when nothing runs any more: requests that run are
        aborted, waited for, or kept as they are. Then cached prefixes are forgotten, unless they are kept."""
        mode = "wait" if wait_for_inflight_requests else mode
        done = await serving.session.control(f"pause:{mode}")
        if done.error:
            return error_response(RequestError(f"{done.error}.", param="mode"))
        if clear_cache and mode != "keep":
            await serving.session.control("reset_prefix_cache")
        return json_response({"status": "paused"})

    @app.post("/resume", tags=["operations"])
    async def resume() -> Response:
        """Go on after /pause."""
        await serving.session.control("resume")
        return json_response({"status": "resumed"})

    @app.get("/is_paused", tags=["operations"])
    async def is_paused() -> Response:
        """Whether /pause was called, and no /resume since."""
        done = await serving.session.control("is_paused")
        return json_response({"is_paused": done.value["paused"]})


def shown_settings(config: Config) -> dict[str, Any]:
    """The settings by section, with secrets hidden."""
    return {
        section: {name: _shown(name, value) for name, value in values.items()}
        for section, values in asdict(config).items()
    }


def _shown(name: str, value: Any) -> Any:
    if name in _SECRETS:
        return HIDDEN if value else None
    return value if isinstance(value, str | int | float | bool | list | tuple | dict | None) else str(value)


def add_debug(app: FastAPI, serving: Serving) -> None:
    @app.get("/debug/counts", tags=["debug"])
    async def counts() -> Response:
        """What the API processes and the engines hold right now."""
        done = await serving.session.control("counts")
        return json_response({"api": await serving.session.counts_of_all(), "engine": done.value})


class Swaps(Protocol):
    """Swaps models, as ModelSwaps does."""

    def document(self) -> dict[str, Any]:
        """Describe what is served, and how far a swap is."""

    async def begin(self, change: ModelChange) -> None:
        """Begin a swap."""

    async def wait_end(self) -> None:
        """Wait until no swap is in progress."""


def add_model_admin(app: FastAPI, swaps: Swaps) -> None:
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
