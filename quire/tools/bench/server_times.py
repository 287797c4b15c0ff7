"""How long a real server makes its clients wait: starts `quire serve`, and asks it with the client of `quire bench
serve`.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import uvloop

from quire.errors import QuireError
from quire.foundation.config import Config
from quire.tools.bench.client import ENDPOINTS, Connections, Outcome, StreamingClient
from quire.tools.bench.datasets import Sample
from quire.tools.bench.load import run_load

START_S = 300.0
CONNECT_S = 10.0


def serve_command(config: Config, directory: Path) -> list[str]:
    """The command that starts `quire serve` at a free port, with these settings in a file of the directory."""
    settings = directory / "settings.yaml"
    settings.write_bytes(msgspec.yaml.encode(config.changes() | {"port": 0, "host": "127.0.0.1"}))
    return [sys.executable, "-m", "quire.cli.main", "serve", f"--config={settings}"]


@contextmanager
def served(config: Config, directory: Path) -> Iterator[int]:
    """Run `quire serve`: yields its port once it is ready, and ends it afterwards. Raises QuireError if it fails."""
    log = directory / "server.log"
    with log.open("w") as file:
        server = subprocess.Popen(serve_command(config, directory), stdout=file, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + START_S
        while (found := re.search(r"Ready in .*?http://[^/]*?:(\d+)/", log.read_text(), re.S)) is None:
            if server.poll() is not None or time.monotonic() > deadline:
                said = log.read_text().strip().splitlines()
                raise QuireError(f"The server did not start: {said[-1] if said else 'it said nothing'}")
            time.sleep(0.05)
        yield int(found[1])
    finally:
        server.terminate()
        server.wait()


def asked(
    model: str, port: int, samples: Sequence[Sample], times: Sequence[float], max_concurrency: int | None = None
) -> list[Outcome]:
    """The outcomes of samples sent at these times (seconds), so many at once. Raises QuireError if a request failed."""
    body = {"model": model, "temperature": 0.0, "ignore_eos": True}
    body["return_token_ids"] = True  # behind random prompts tokens may have no text, and chunks would be empty

    async def ask() -> list[Outcome]:
        async with Connections(f"http://127.0.0.1:{port}", CONNECT_S) as connections:
            client = StreamingClient(connections, ENDPOINTS["openai"], "openai", body)
            load = await run_load(client, samples, times, max_concurrency, lambda: None)
            return load.outcomes

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        outcomes = runner.run(ask())
    if failed := [outcome.error for outcome in outcomes if outcome.error]:
        raise QuireError(f"A server's times cannot be measured: {failed[0]}")
    if any(outcome.ttft is None for outcome in outcomes):
        raise QuireError("A server's times cannot be measured: it sent an answer without tokens.")
    return outcomes
