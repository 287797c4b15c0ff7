"""Times steps of a model on this machine's processor, for `quire simulate --calibrate`.

An engine in this process is given waves of requests: rows that decode, few and many, with short and long contexts,
prompts of many lengths, and prompts beside streams. Every step is timed, and a step's terms are fitted to all of them.
Loads torch: imported by name.
"""

from __future__ import annotations

import os
import random
import tempfile
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from statistics import median

from quire.bench.server_times import served, server_terms
from quire.bench.step_recorder import StepRecorder
from quire.bench.tokens import LocalTokens
from quire.clock import Clock, SystemClock
from quire.config import Config
from quire.costmodel.measured_step_times import (
    MeasuredStepTime,
    MeasuredStepTimes,
    StepTerms,
    fitted,
    windows_of,
)
from quire.engine.build import build_model_runtime_info
from quire.engine.inprocess import InProcessClient
from quire.errors import QuireError
from quire.executor.executor import Executor
from quire.executor.factory import build_executor
from quire.messages import Add, Deltas
from quire.models.spec import ModelSpec
from quire.planning.auto_config import resolve
from quire.sampling import SamplingParams

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
PROMPTS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1_024, 2_048, 4_096, 8_192)
SHORT, LONG = 16, 1_024
"""Tokens of a prompt before decode steps."""
OUTPUTS = 24
LEAST_PASSES, MOST_PASSES = 2, 6
WANTED_S = 12.0
"""No further pass over the waves begins after so many seconds."""


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
        clock = SystemClock()
        terms, request_ms = engine_terms(own, spec, build_executor(own, clock), clock)
        predict = MeasuredStepTime(terms, windows_of(spec))
        with served(config, Path(directory)) as port:
            server = server_terms(resolved, predict, request_ms, port)
    threads = own.device.cpu_threads or len(os.sched_getaffinity(0))
    return MeasuredStepTimes(
        own.model.served_model_name[0], spec.num_parameters, own.model.dtype, own.kv_dtype, threads,
        tuple(windows_of(spec).items()), terms, request_ms, server,
    )  # fmt: skip


def waves(config: Config) -> list[Wave]:
    """What is timed, for resolved settings: no more rows and tokens than these take."""
    most, chunk = config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens
    longest = config.model.max_model_len
    assert most and chunk and isinstance(longest, int), "settings are resolved"
    room = longest - OUTPUTS - 1
    long = min(LONG, room)
    beside = tuple(min(length, room) for length in (64, 200, 500))
    decoding = [Wave(rows, min(SHORT, room), OUTPUTS) for rows in ROWS if rows <= most]
    reading = [Wave(min(rows, most), long, OUTPUTS) for rows in (1, 4, 8)]
    prompts = [Wave(1, length, 1) for length in PROMPTS if length <= min(room, 2 * max(chunk, LONG))]
    mixed = [Wave(min(rows, most - 1), min(SHORT, room), 2 * OUTPUTS, beside) for rows in (2, 8, 24) if most > 1]
    return [*decoding, *reading, *prompts, *mixed]


def engine_terms(
    config: Config, spec: ModelSpec, executor: Executor, clock: Clock, wanted_s: float = WANTED_S
) -> tuple[StepTerms, float]:
    """What steps of an engine take, and a request beside them, in milliseconds.

    Args:
        config: Resolved settings.
        spec: The model.
        executor: Not started; it is closed at the end.
        clock: By which steps are timed.
        wanted_s: No further pass over the waves begins after so many seconds.
    """
    slots = config.scheduler.max_num_seqs
    assert slots, "settings are resolved"
    recorder = StepRecorder(executor, slots, clock)
    client = InProcessClient(config, recorder, clock, build_model_runtime_info(config, spec))
    try:
        engine, firsts = _Engine(client, spec.vocab_size, clock), []
        each = waves(config)
        for wave in each:  # what is made and recorded once, is made here
            engine.run(replace(wave, outputs=min(wave.outputs, 4)))
        recorder.steps.clear()
        began = clock.now()
        for number in range(MOST_PASSES):
            firsts += [engine.run(wave) for wave in each if wave.rows == 1 and wave.prompt == each[0].prompt]
            for wave in each:
                engine.run(wave)
            if number + 1 >= LEAST_PASSES and clock.now() - began > wanted_s:
                break
    finally:
        client.close()
    terms = fitted(recorder.steps, spec)
    prompt_ms = MeasuredStepTime(terms, windows_of(spec)).prompt(each[0].prompt)
    return terms, max(0.0, 1e3 * median(firsts) - prompt_ms)


class _Engine:
    """Runs waves on an engine in this process."""

    def __init__(self, client: InProcessClient, vocab_size: int, clock: Clock) -> None:
        self._client, self._vocab_size, self._clock = client, vocab_size, clock
        self._numbers, self._draw = count(1), random.Random(0)

    def run(self, wave: Wave) -> float:
        """Send it, and wait for all of it; seconds to the first token.

        Raises:
            QuireError: The engine refuses a request.
        """
        began, first, beside = self._clock.now(), None, list(wave.beside)
        open_streams = {self._send(wave.prompt, wave.outputs) for _ in range(wave.rows)}
        open_prompts: set[int] = set()
        while open_streams or open_prompts:
            message = self._client.receive(None)
            if not isinstance(message, Deltas):
                continue
            first = first or self._clock.now()
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
        self._client.send(Add(number, tokens, prompt, params, [], 0, self._clock.now()))
        return number
