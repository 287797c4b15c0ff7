"""Times steps of a model on this machine's processor, and what a server of it adds: for `quire simulate --calibrate`.

Two parts. An engine in this process is given waves of requests: rows that decode, few and many, with short and long
contexts, prompts of many lengths, and prompts beside streams; every step is timed. Then `quire serve` is started and
asked by the client of `quire bench serve`: one request at a time, and several at once. What these take beyond the fitted
steps is the server's and the client's, which run on the same cores. Loads torch: imported by name.
"""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from statistics import median

import msgspec
import numpy as np

from quire.bench.client import ENDPOINTS, Outcome, StreamingClient
from quire.bench.connection import Address, Connections
from quire.bench.datasets import Sample
from quire.bench.load import run_load
from quire.bench.step_recorder import StepRecorder
from quire.bench.tokens import LocalTokens
from quire.clock import SystemClock
from quire.config import Config
from quire.costmodel.measured_step_times import MeasuredStepTimes, ServerTerms, StepTerms, fitted, windows_of
from quire.costmodel.measured_step_times import MeasuredStepTime as StepTime
from quire.engine.build import build_model_runtime_info
from quire.engine.inprocess import InProcessClient
from quire.errors import QuireError
from quire.executor.factory import build_executor
from quire.messages import Add, Deltas
from quire.planning.auto_config import ResolvedConfig, resolve
from quire.sampling import SamplingParams

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
PROMPTS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1_024, 2_048, 4_096, 8_192)
SHORT, LONG = 16, 1_024
"""Tokens of a prompt before decode steps."""
OUTPUTS = 24
STREAMS = (1, 8, 32)
"""Requests at a time that a server is asked."""
STREAM_OUTPUTS = 48
LEAST_PASSES, MOST_PASSES = 2, 6
WANTED_S = 12.0
"""No further pass over the waves begins after so many seconds."""
START_S = 300.0
CONNECT_S = 10.0


@dataclass(frozen=True)
class Wave:
    """Requests that are sent together, and others beside them.

    Attributes:
        rows: How many.
        prompt, outputs: Tokens of each.
        beside: Prompts of one output each, of which the next is sent whenever one is done.
    """

    rows: int
    prompt: int
    outputs: int
    beside: tuple[int, ...] = ()


def measure(config: Config) -> MeasuredStepTimes:
    """Time steps and a server; some 30 seconds for a small model.

    Args:
        config: As asked, for a processor.

    Raises:
        SetupError: The model cannot be served.
        QuireError: Steps or a server failed.
    """
    resolved = resolve(config)
    own, spec = resolved.config, resolved.spec
    with tempfile.TemporaryDirectory(prefix="quire-") as directory:
        terms, request_ms = _engine_terms(resolved)
        predict = StepTime(terms, windows_of(spec))
        with _served(config, Path(directory)) as port:
            server = _server_terms(resolved, predict, request_ms, port)
    from torch import get_num_threads

    return MeasuredStepTimes(
        own.model.served_model_name[0], spec.num_parameters, own.model.dtype, own.kv_dtype, get_num_threads(),
        tuple(windows_of(spec).items()), terms, request_ms, server,
    )  # fmt: skip


def waves(config: Config) -> list[Wave]:
    """What is timed, for resolved settings: no more rows and tokens than these take."""
    most, longest, chunk = config.scheduler.max_num_seqs, config.model.max_model_len, config.scheduler.max_num_batched_tokens
    assert most and chunk and isinstance(longest, int), "settings are resolved"
    room = longest - OUTPUTS - 1
    long = min(LONG, room)
    beside = tuple(min(length, room) for length in (64, 200, 500))
    decoding = [Wave(rows, min(SHORT, room), OUTPUTS) for rows in ROWS if rows <= most]
    reading = [Wave(min(rows, most), long, OUTPUTS) for rows in (1, 4, 8)]
    prompts = [Wave(1, length, 1) for length in PROMPTS if length <= min(room, 2 * max(chunk, LONG))]
    mixed = [Wave(min(rows, most - 1), min(SHORT, room), 2 * OUTPUTS, beside) for rows in (2, 8, 24) if most > 1]
    return [*decoding, *reading, *prompts, *mixed]


def _engine_terms(resolved: ResolvedConfig) -> tuple[StepTerms, float]:
    """What steps take, and a request beside them, in milliseconds."""
    config, clock = resolved.config, SystemClock()
    slots = config.scheduler.max_num_seqs
    assert slots
    recorder = StepRecorder(build_executor(config, clock), slots, clock)
    client = InProcessClient(config, recorder, clock, build_model_runtime_info(config, resolved.spec))
    try:
        engine = _Engine(client, resolved.spec.vocab_size)
        each = waves(config)
        for wave in each:  # everything is made and recorded that is made once
            engine.run(replace(wave, outputs=min(wave.outputs, 4)))
        recorder.steps.clear()
        began, firsts = time.monotonic(), []
        for number in range(MOST_PASSES):
            for wave in each:
                first = engine.run(wave)
                if wave == Wave(1, SHORT, OUTPUTS):
                    firsts.append(first)
            if number + 1 >= LEAST_PASSES and time.monotonic() - began > WANTED_S:
                break
    finally:
        client.close()
    terms = fitted(recorder.steps, resolved.spec)
    prompt_ms = _prompt_ms(StepTime(terms, windows_of(resolved.spec)), SHORT)
    return terms, max(0.0, 1e3 * median(firsts) - prompt_ms)


class _Engine:
    """Runs waves on an engine in this process."""

    def __init__(self, client: InProcessClient, vocab_size: int) -> None:
        self._client, self._vocab_size = client, vocab_size
        self._numbers, self._draw = count(1), random.Random(0)

    def run(self, wave: Wave) -> float:
        """Send it, and wait for all of it; seconds to the first token.

        Raises:
            QuireError: The engine refuses a request.
        """
        began, first, beside = time.monotonic(), None, list(wave.beside)
        open_streams = {self._send(wave.prompt, wave.outputs) for _ in range(wave.rows)}
        open_prompts: set[int] = set()
        while open_streams or open_prompts:
            message = self._client.receive(None)
            if not isinstance(message, Deltas):
                continue
            first = first or time.monotonic()
            for end in message.ends:
                if end.reason == "error":
                    raise QuireError(f"Steps cannot be timed: {end.message}")
                open_streams.discard(end.id)
                open_prompts.discard(end.id)
            if beside and not open_prompts and open_streams:
                open_prompts.add(self._send(beside.pop(0), 1))
        assert first is not None
        return first - began

    def _send(self, prompt: int, outputs: int) -> int:
        tokens = LocalTokens(self._vocab_size).random_ids(prompt, self._draw)
        params = SamplingParams(max_tokens=outputs, ignore_eos=True, temperature=0.0)
        number = next(self._numbers)
        self._client.send(Add(number, tokens, prompt, params, [], 0, time.monotonic()))
        return number


@contextmanager
def _served(config: Config, directory: Path) -> Iterator[int]:
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


def _server_terms(resolved: ResolvedConfig, predict: StepTime, request_ms: float, port: int) -> ServerTerms:
    """What clients of the server waited beyond the predicted steps: a straight line over the streams at a time."""
    most = resolved.config.scheduler.max_num_seqs
    assert most
    rows, extra, firsts = [], [], []
    for streams in STREAMS:
        if streams > most:
            break
        rounds = 8 if streams == 1 else 4
        for number in range(rounds):
            outcomes = _asked(resolved, port, streams)
            if number == 0:
                continue  # connections were opened, and code was run for the first time
            if streams == 1:
                firsts.append(1e3 * (outcomes[0].ttft or 0.0) - _prompt_ms(predict, SHORT) - request_ms)
            tpot = 1e3 * median(outcome.tpot or 0.0 for outcome in outcomes)
            rows.append(streams)
            extra.append(tpot - _decode_ms(predict, streams, SHORT + STREAM_OUTPUTS // 2))
    by_streams = [(each, median(e for r, e in zip(rows, extra, strict=True) if r == each)) for each in sorted(set(rows))]
    if len(by_streams) == 1:
        row_ms, step_ms = 0.0, by_streams[0][1]
    else:
        row_ms, step_ms = np.polyfit(*zip(*by_streams, strict=True), 1).tolist()
    return ServerTerms(max(0.0, median(firsts)), max(0.0, step_ms), max(0.0, row_ms))


def _asked(resolved: ResolvedConfig, port: int, streams: int) -> list[Outcome]:
    """So many requests at once.

    Raises:
        QuireError: One failed.
    """
    draw = random.Random()
    tokens = LocalTokens(resolved.spec.vocab_size)
    samples = [Sample(tokens.random_ids(SHORT, draw), STREAM_OUTPUTS) for _ in range(streams)]
    body = {"model": resolved.config.model.served_model_name[0], "temperature": 0.0, "ignore_eos": True,
            "return_token_ids": True}  # behind random prompts tokens may have no text, and chunks be empty

    async def ask() -> list[Outcome]:
        async with Connections(Address.of(f"http://127.0.0.1:{port}", {}, verify=False), CONNECT_S) as connections:
            client = StreamingClient(connections, ENDPOINTS["openai"], "openai", body)
            load = await run_load(client, samples, [0.0] * streams, None, lambda: None)
            return load.outcomes

    outcomes = asyncio.run(ask())
    if failed := [outcome.error for outcome in outcomes if outcome.error]:
        raise QuireError(f"A server's times cannot be measured: {failed[0]}")
    return outcomes


def _prompt_ms(predict: StepTime, tokens: int) -> float:
    return predict(np.array([tokens]), np.array([0]), 1)


def _decode_ms(predict: StepTime, rows: int, context: int) -> float:
    return predict(np.ones(rows, np.int64), np.full(rows, context), rows)


