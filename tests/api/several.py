"""Several API processes' applications over one engine, in one process: sockets, messages and what they tell each other
are those of a server, and each has an address of its own, so a test says whom it asks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from quire.engine.adapter_registry import load_modules
from quire.engine.build import ModelRuntimeInfo
from quire.engine.client import ZmqPort
from quire.engine.core import EngineCore
from quire.foundation.clock import SystemClock
from quire.foundation.config import Config
from quire.foundation.messages.from_engine import EngineId
from quire.foundation.processes.launch import LaunchConfig
from quire.serving.api import peers
from quire.serving.api.http_server import BoundedHttpProtocol
from quire.serving.api.model_switch import ServedModel, make_served_model
from quire.serving.app import create_app
from tests.api.server import NoSwaps, resolved
from tests.executor.fake import FakeExecutor


class ApiServer:
    """One of them, in a thread with an event loop of its own.

    Attributes:
        url: Its address.
        http: A client for it.
        openai: The official one.
        model: What it serves.
    """

    def __init__(self, launch: LaunchConfig) -> None:
        self._launch = launch
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._up.wait(60)
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self.openai = openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=60)

    async def _serve(self) -> None:
        self.model: ServedModel = make_served_model(
            self._launch, lambda report: None, create_app, None, swaps=NoSwaps()
        )
        settings = uvicorn.Config(
            self.model.app, "127.0.0.1", 0, log_level="critical", loop="uvloop", http=BoundedHttpProtocol
        )
        self._uvicorn = uvicorn.Server(settings)
        serving = asyncio.create_task(self._uvicorn.serve())
        while not self._uvicorn.started:
            await asyncio.sleep(0.005)
        self.url = f"http://127.0.0.1:{self._uvicorn.servers[0].sockets[0].getsockname()[1]}"
        await self.model.session.wait_ready()
        self._up.set()
        await serving

    def close(self) -> None:
        self.http.close()
        self.openai.close()
        self._uvicorn.should_exit = self._uvicorn.force_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()


class Engine:
    """The engine, in a thread."""

    def __init__(self, config: Config, directory: Path, executor: FakeExecutor) -> None:
        directory.mkdir(parents=True)
        self._port = ZmqPort(directory, EngineId())
        limits = executor.start()
        adapters = load_modules(config.lora, executor.orders)
        self._core = EngineCore(
            config, limits, ModelRuntimeInfo(), executor, self._port, SystemClock(), None, None, adapters
        )
        self._stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping:
            self._core.turn(0.05)

    def close(self) -> None:
        self._stopping = True
        self._thread.join(60)
        self._port.close()


@contextmanager
def several(
    directory: Path, make_executor: Callable[[], FakeExecutor], count: int = 2, **settings: Any
) -> Iterator[list[ApiServer]]:
    """So many, ready."""
    config = resolved(directory, api_server_count=count, **settings)
    sockets = directory / "s" / "0"
    engine = Engine(config, sockets, make_executor())
    servers: list[ApiServer] = []
    patch = pytest.MonkeyPatch()
    try:
        patch.setattr(peers, "ANSWER_S", 60.0)  # all live, however late they are
        for place in range(count):
            launch = LaunchConfig(
                config, str(sockets), number=place, place=place, created=1_700_000_000, developer_mode=True
            )
            servers.append(ApiServer(launch))
        yield servers
    finally:
        patch.undo()
        for server in servers:
            server.close()
        engine.close()
