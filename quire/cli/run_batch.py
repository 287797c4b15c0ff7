"""`quire run-batch`: answers the requests of a file with an engine of its own, and no server.

Requests go through the server's own endpoints, in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import tyro
import uvicorn
import uvloop

from quire.cli.flags import parse_with_engine
from quire.errors import ConfigError, EngineDeadError, GenerationError, reason
from quire.foundation.config import Config, environment
from quire.offline.progress_bar import TerminalBar
from quire.planning.auto_config import resolve
from quire.serving.api.routes.monitoring import metrics_app
from quire.serving.api.session.session import EngineSession
from quire.serving.app import create_app
from quire.serving.dialects.batches.file import BatchFile
from quire.serving.dialects.batches.requests import BatchCalls
from quire.serving.supervisor.announce import print_log
from quire.serving.supervisor.engine_process import EngineProcess
from quire.text.model_text import load_model_text

DESCRIPTION = "Answer the requests of a file: quire run-batch -i in.jsonl -o out.jsonl --model MODEL [flags]."
WAITING_SHARE = 2.0
"""Open requests for each one that runs at once: some always wait, so that no step has too few."""
TRANSFER_TIMEOUT_S = 600.0
_OF_SERVER = ("chat_template", "default_chat_template_kwargs", "tool_call_parser", "reasoning_parser")
"""Options that are settings of a server."""


@dataclass(frozen=True)
class RunBatchOptions:
    """Which requests are answered, and where the answers go."""

    input_file: Annotated[str, tyro.conf.arg(aliases=["-i"], metavar="FILE")] = ""
    """File or http address with a request a line, in the format of OpenAI's batches."""
    output_file: Annotated[str, tyro.conf.arg(aliases=["-o"], metavar="FILE")] = ""
    """File, or http address to PUT to, for the answers, in the order of the requests. An interrupted run leaves
    FILE.partial, and the same command goes on from there."""
    output_tmp_dir: str | None = None
    """Directory of the partial file. Default: that of the output, or the current one for an address."""
    enable_metrics: bool = False
    """Serve /metrics while it runs."""
    host: str | None = None
    """Address of /metrics. Default: all interfaces."""
    port: int = 8000
    """Port of /metrics."""
    chat_template: str | None = None
    """A jinja chat template, or a file with one, in place of the model's."""
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template for requests that do not set them, as JSON."""
    tool_call_parser: str | None = None
    """How the model writes tool calls. Default: as its chat template tells."""
    reasoning_parser: str | None = None
    """How the model writes its reasoning. Default: as its chat template tells."""


def run(arguments: Sequence[str]) -> int:
    """Answer all requests; returns the exit code. Raises QuireError if the input is wrong, the engine cannot start, or
    it died; answers so far are kept."""
    options, config = parse_with_engine(RunBatchOptions, arguments, "quire run-batch", DESCRIPTION)
    for name in ("input_file", "output_file"):
        if not getattr(options, name):
            flag = name.replace("_", "-")
            raise ConfigError(
                f"--{flag} is needed: quire run-batch -i in.jsonl -o out.jsonl --model MODEL.", param=name
            )
    with _local_input(options.input_file) as source, _local_output(options) as (target, partial):
        batch = BatchFile(source, target, partial)
        batch.check()
        if wrong := batch.wrong_lines:
            print_log(
                f"{len(wrong)} of {batch.counts.total} lines are no requests and get an error. The first, {wrong[0]}"
            )
        _answer(batch, options, config)
        counts = batch.counts
    print_log(f"{counts.done} requests answered, {counts.failed} of them with an error: {options.output_file}")
    return 0


def _answer(batch: BatchFile, options: RunBatchOptions, config: Config) -> None:
    of_server = {name: getattr(options, name) for name in _OF_SERVER}
    config = environment.apply(config).with_values(
        **of_server, disable_responses_store=True, disable_log_stats=True, api_key=()
    )
    if config.scheduler.performance_mode is None:
        config = config.with_values(performance_mode="throughput")
    resolved = resolve(config).config
    counts = batch.counts
    if counts.done:
        print_log(f"{counts.done} of {counts.total} requests were answered before")
    with EngineProcess(resolved) as engine, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(_run(batch, engine, resolved, options))
        except EngineDeadError:
            engine.raise_failure()
            raise GenerationError(
                f"The engine died: {engine.cause_of_death}. Answers so far are kept: run the command again."
            ) from None


async def _run(batch: BatchFile, engine: EngineProcess, config: Config, options: RunBatchOptions) -> None:
    text = load_model_text(config)
    session = EngineSession([engine.client()], config, text.eos_ids)
    app = create_app(config, session, text)
    calls = BatchCalls(app, (), session, config.scheduler, WAITING_SHARE)
    counts = batch.counts
    async with app.router.lifespan_context(app), _metrics(options, session, config):
        engine.watch(asyncio.get_running_loop())
        await session.wait_ready()
        with TerminalBar(counts.total, counts.done) as bar:
            answering = asyncio.ensure_future(batch.run(calls, bar.advance))
            dying = asyncio.ensure_future(session.wait_dead())
            try:
                await asyncio.wait((answering, dying), return_when=asyncio.FIRST_COMPLETED)
                if not answering.done():
                    raise EngineDeadError("The engine died.")
                answering.result()
            finally:
                answering.cancel()
                dying.cancel()
                await asyncio.gather(answering, dying, return_exceptions=True)


@contextlib.asynccontextmanager
async def _metrics(options: RunBatchOptions, session: EngineSession, config: Config) -> AsyncIterator[None]:
    if not options.enable_metrics:
        yield
        return
    app = metrics_app(session.stats, config)
    server = uvicorn.Server(
        uvicorn.Config(app, options.host or "0.0.0.0", options.port, log_level="warning", lifespan="off")
    )
    serving = asyncio.create_task(server.serve())
    try:
        yield
    finally:
        server.should_exit = True
        await serving


# --- files that are addresses ---------------------------------------------------------------------------------------


def _is_address(name: str) -> bool:
    return name.startswith(("http://", "https://"))


@contextlib.contextmanager
def _local_input(name: str) -> Iterator[Path]:
    if not _is_address(name):
        if not Path(name).is_file():
            raise ConfigError(f"--input-file: there is no file {name}.", param="input_file")
        yield Path(name)
        return
    with tempfile.NamedTemporaryFile(prefix="quire-batch-") as file:
        try:
            with httpx.stream("GET", name, timeout=TRANSFER_TIMEOUT_S, follow_redirects=True) as answer:
                answer.raise_for_status()
                for part in answer.iter_bytes():
                    file.write(part)
        except httpx.HTTPError as error:
            raise ConfigError(f"--input-file: {name} cannot be read: {reason(error)}.", param="input_file") from error
        file.flush()
        yield Path(file.name)


@contextlib.contextmanager
def _local_output(options: RunBatchOptions) -> Iterator[tuple[Path, Path]]:
    """The output as a file, which is sent to its address at the end, and the partial file."""
    name = options.output_file
    if not _is_address(name):
        target = Path(name)
        yield target, Path(options.output_tmp_dir or target.parent) / f"{target.name}.partial"
        return
    directory = Path(options.output_tmp_dir or ".")
    base = name.partition("?")[0].rstrip("/").rpartition("/")[2] or "batch"
    target = directory / f"{base}.unsent"
    yield target, directory / f"{base}.partial"
    try:
        with target.open("rb") as file:
            httpx.put(name, content=file, timeout=TRANSFER_TIMEOUT_S).raise_for_status()
    except httpx.HTTPError as error:
        print(f"quire: warning: the answers are in {target}", file=sys.stderr)
        raise ConfigError(f"--output-file: {name} took nothing: {reason(error)}.", param="output_file") from error
    target.unlink()
