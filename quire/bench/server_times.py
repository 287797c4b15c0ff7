"""What a server adds to the steps of its engine: `quire serve` is started and asked by the client of `quire bench
serve`, one request at a time, and several at once. What these wait beyond predicted steps is the server's and the
client's, which run on the same cores.
"""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
import uvloop

from quire.bench.client import ENDPOINTS, Outcome, StreamingClient
from quire.bench.connection import Address, Connections
from quire.bench.datasets import Sample
from quire.bench.load import run_load
from quire.bench.tokens import LocalTokens
from quire.config import Config
from quire.costmodel.measured_step_times import MeasuredStepTime, ServerTerms
from quire.errors import QuireError
from quire.planning.auto_config import ResolvedConfig

STREAMS = (1, 8, 32)
"""Requests at a time."""
PROMPT, OUTPUTS = 16, 48
"""Tokens of each."""
ROUNDS = {1: 8}
USUAL_ROUNDS = 4
START_S = 300.0
CONNECT_S = 10.0


@contextmanager
def served(config: Config, directory: Path) -> Iterator[int]:
    """`quire serve`: its port, once it is ready; it is ended afterwards.

    Raises:
        QuireError: It did not start.
    """
    settings, log = directory / "settings.yaml", directory / "server.log"
    settings.write_bytes(msgspec.yaml.encode(config.changes() | {"port": 0, "host": "127.0.0.1"}))
    command = [sys.executable, "-m", "quire.cli.main", "serve", f"--config={settings}"]
    with log.open("w") as file:
        server = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
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


def server_terms(resolved: ResolvedConfig, predict: MeasuredStepTime, request_ms: float, port: int) -> ServerTerms:
    """What clients of the server waited beyond the predicted steps: a straight line over the streams at a time."""
    most = resolved.config.scheduler.max_num_seqs
    assert most
    extra: dict[int, list[float]] = {}
    firsts = []
    for streams in (each for each in STREAMS if each <= most):
        for number in range(ROUNDS.get(streams, USUAL_ROUNDS)):
            outcomes = _asked_at_once(resolved, port, streams)
            if number == 0:
                continue  # connections were opened, and code was run for the first time
            if streams == 1:
                firsts.append(1e3 * (outcomes[0].ttft or 0.0) - predict.prompt(PROMPT) - request_ms)
            tpot = 1e3 * median(outcome.tpot or 0.0 for outcome in outcomes)
            extra.setdefault(streams, []).append(tpot - predict.decode(streams, PROMPT + OUTPUTS // 2))
    rows, ms = list(extra), [median(values) for values in extra.values()]
    row_ms, step_ms = np.polyfit(rows, ms, 1).tolist() if len(rows) > 1 else (0.0, ms[0])
    return ServerTerms(max(0.0, median(firsts)), max(0.0, step_ms), max(0.0, row_ms))


def asked(model: str, port: int, samples: Sequence[Sample], times: Sequence[float]) -> list[Outcome]:
    """What a server at this port answers to samples that are sent at these times (seconds).

    Raises:
        QuireError: A request failed.
    """
    body = {"model": model, "temperature": 0.0, "ignore_eos": True}
    body["return_token_ids"] = True  # behind random prompts tokens may have no text, and chunks would be empty

    async def ask() -> list[Outcome]:
        async with Connections(Address.of(f"http://127.0.0.1:{port}", {}, verify=False), CONNECT_S) as connections:
            client = StreamingClient(connections, ENDPOINTS["openai"], "openai", body)
            load = await run_load(client, samples, times, None, lambda: None)
            return load.outcomes

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        outcomes = runner.run(ask())
    if failed := [outcome.error for outcome in outcomes if outcome.error]:
        raise QuireError(f"A server's times cannot be measured: {failed[0]}")
    return outcomes


def _asked_at_once(resolved: ResolvedConfig, port: int, streams: int) -> list[Outcome]:
    draw, tokens = random.Random(), LocalTokens(resolved.spec.vocab_size)
    samples = [Sample(tokens.random_ids(PROMPT, draw), OUTPUTS) for _ in range(streams)]
    return asked(resolved.config.model.served_model_name[0], port, samples, [0.0] * streams)
