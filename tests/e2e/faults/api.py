"""The API process with a route that fails."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from quire.foundation.processes.child_main import run_child
from quire.foundation.processes.launch import LaunchConfig, SendReport
from quire.serving.api_server import main as api_main
from quire.serving.app import create_app


def make_app(*arguments: Any, **options: Any) -> FastAPI:
    app = create_app(*arguments, **options)

    @app.get("/debug/raise")
    async def fail() -> None:
        raise RuntimeError("planted: an exception in a handler")

    return app


def main(launch: LaunchConfig, report: SendReport) -> None:
    api_main(launch, report, make_app)


if __name__ == "__main__":
    run_child(main)
