"""All that this process has of one model: settings, text, session, routes.

A request belongs to the model whose application it enters, from its head to its last byte: everything that answers it
is found through that application. Knows nothing about other models.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import msgspec
from fastapi import FastAPI

from quire.api.engine_session import EngineSession
from quire.api.event_loop_receiver import EventLoopReceiver
from quire.api.request_traces import RequestTraces
from quire.engine.transport import ZmqClient
from quire.metrics.server_stats import ServerStats
from quire.processes.launch import LaunchConfig, Recovery, Report, SendReport
from quire.text.model_text import load_model_text

MakeApp = Callable[..., FastAPI]
"""See `create_app`."""


class ServedModel:
    """A model behind its engines.

    Args:
        launch: Its settings, its engines and their directory.
        session: To the engines.
        app: What answers its requests.
    """

    def __init__(self, launch: LaunchConfig, session: EngineSession, app: FastAPI) -> None:
        self.launch = launch
        self.generation = launch.generation
        self.session = session
        self.app = app
        self._open = contextlib.AsyncExitStack()

    async def open(self) -> None:
        """Connect to the engines and begin what goes on beside requests; in the event loop."""
        await self._open.enter_async_context(self.app.router.lifespan_context(self.app))

    async def close(self) -> None:
        """End requests that are still open, and disconnect. More calls do nothing."""
        await self._open.aclose()


def make_served_model(
    launch: LaunchConfig,
    report: SendReport,
    make_app: MakeApp,
    traces: RequestTraces | None,
    before: ServerStats | None = None,
) -> ServedModel:
    """Read what belongs to a model, and put its application together.

    Args:
        launch: See ServedModel.
        report: Reaches the supervisor.
        make_app: Makes the application.
        traces: Where finished requests are traced.
        before: Of a model before this one: what is counted for the process goes on there.

    Raises:
        SetupError: A file is broken or missing, or a setting cannot be meant.
    """
    text = load_model_text(launch.config)
    clients = [ZmqClient(Path(launch.directory), launch.number, engine) for engine in launch.engines]

    def report_of_model(what: Report) -> None:
        report(msgspec.structs.replace(what, generation=launch.generation) if isinstance(what, Recovery) else what)

    session = EngineSession(
        clients,
        launch.config,
        text.eos_ids,
        special_tokens=text.special_tokens,
        report=report_of_model,
        make_receiver=lambda client, *rest: EventLoopReceiver(clients[client.engine.engine], *rest),
    )
    if before is not None:
        session.stats.continue_counts(before)
    session.stats.api_restarts = launch.number
    app = make_app(launch.config, session, text, developer_mode=launch.developer_mode, traces=traces)
    return ServedModel(launch, session, app)
