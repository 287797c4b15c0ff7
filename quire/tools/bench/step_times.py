"""Times steps of a model on this machine's processor, for `quire simulate --calibrate`.

An engine in this process gets waves of requests (rows that decode, few and many, with short and long contexts, and
prompts of many lengths) and loads, in which one request of random length follows another. The terms of a step are
fitted to all steps, and then scaled to the steps of the loads. Loads torch: imported by name.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from itertools import count
from statistics import median
from typing import NamedTuple

from quire.engine.build import build_model_runtime_info
from quire.engine.inprocess import InProcessClient
from quire.errors import QuireError
from quire.foundation.clock import Clock, SystemClock
from quire.foundation.config import Config
from quire.foundation.messages.from_engine import Deltas
from quire.foundation.messages.to_engine import Add
from quire.foundation.messages.workers import DeviceLimits, MaskedDrafts, Plan, Result, TokenBitmasks
from quire.models.spec import ModelSpec
from quire.planning.auto_config import ResolvedConfig
from quire.planning.costmodel.measured_step_times import MeasuredStepTime, StepTerms, TimedStep, as_long_as, fitted
from quire.planning.costmodel.step_work import windows_of
from quire.planning.step_limits import StepLimits
from quire.runtime.executor.executor import Executor, Orders
from quire.runtime.executor.factory import build_executor
from quire.sampling_params import SamplingParams
from quire.tools.bench.datasets import LocalTokens
from quire.tools.bench.load import ClosedLoad, closed_loads

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
PROMPTS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1_024, 2_048, 4_096, 8_192)
SHORT, LONG = 16, 1_024
"""Tokens of prompts before decode steps."""
OUTPUTS = 24
LEAST_PASSES, MAX_PASSES = 2, 6
WANTED_S = 12.0
"""Seconds after which another pass over the waves does not begin."""


@dataclass(frozen=True)
class Wave:
    """`rows` requests that are sent together, each with tokens of prompt and output."""

    rows: int
    prompt: int
    outputs: int

    def load(self, max_outputs: int = OUTPUTS) -> ClosedLoad:
        """The requests of the wave, with at most this many tokens of output."""
        return ClosedLoad(self.rows, ((self.prompt, min(self.outputs, max_outputs)),) * self.rows)


class EngineTerms(NamedTuple):
    """What an engine in its client's process takes: for each step, and besides for each request."""

    steps: StepTerms
    request_ms: float


def measure_engine(resolved: ResolvedConfig) -> EngineTerms:
    """Time an engine of this model on this machine, which takes some 20 seconds for a small model. Raises SetupError if
    the model cannot be served, and QuireError if steps failed."""
    clock = SystemClock()
    return engine_terms(resolved.config, resolved.spec, build_executor(resolved.config, clock), clock)


def waves(config: Config) -> list[Wave]:
    """The waves that are timed, with no more rows and tokens than the resolved settings take."""
    limits = StepLimits.of(config)
    room = limits.length - OUTPUTS - 1
    long = min(LONG, room)
    decoding = [Wave(rows, min(SHORT, room), OUTPUTS) for rows in ROWS if rows <= limits.rows]
    reading = [Wave(min(rows, limits.rows), long, OUTPUTS) for rows in (1, 4, 8)]
    prompts = [Wave(1, length, 1) for length in PROMPTS if length <= min(room, 2 * max(limits.tokens, LONG))]
    return [*decoding, *reading, *prompts]


def engine_terms(
    config: Config, spec: ModelSpec, executor: Executor, clock: Clock, wanted_s: float | None = None
) -> EngineTerms:
    """What steps of an engine take, and a request beside them, in milliseconds. The settings are resolved; the executor
    is not started yet, and closed at the end. No further pass over waves and loads begins after `wanted_s` seconds;
    None for WANTED_S."""
    slots, longest = config.scheduler.max_num_seqs, config.model.max_model_len
    assert slots and isinstance(longest, int), "settings are resolved"
    recorder = StepRecorder(executor, slots, clock)
    client = InProcessClient(config, recorder, clock, build_model_runtime_info(config, spec))
    of_loads: list[TimedStep] = []
    try:
        engine, firsts = _Engine(client, spec.vocab_size, clock), []
        each = waves(config)
        for wave in each:  # makes and records what is made once
            engine.run(wave.load(max_outputs=4))
        recorder.steps.clear()
        began = clock.now()
        for number in range(MAX_PASSES):
            firsts += [engine.run(wave.load()) for wave in each if wave.rows == 1 and wave.prompt == each[0].prompt]
            for wave in each:
                engine.run(wave.load())
            before = len(recorder.steps)
            for load in closed_loads(slots, longest, number):
                engine.run(load)
            of_loads += recorder.steps[before:]
            if number + 1 >= LEAST_PASSES and clock.now() - began > (WANTED_S if wanted_s is None else wanted_s):
                break
    finally:
        client.close()
    terms = as_long_as(fitted(recorder.steps, spec), of_loads, spec)
    prompt_ms = MeasuredStepTime(terms, windows_of(spec)).prompt(each[0].prompt)
    return EngineTerms(terms, max(0.0, 1e3 * median(firsts) - prompt_ms))


class _Engine:
    """Runs waves and loads on an engine in this process."""

    def __init__(self, client: InProcessClient, vocab_size: int, clock: Clock) -> None:
        self._client, self._vocab_size, self._clock = client, vocab_size, clock
        self._numbers, self._draw = count(1), random.Random(0)

    def run(self, load: ClosedLoad) -> float:
        """Send a load, and wait for its end; returns seconds to the first token. Raises QuireError if it is refused."""
        began, first = self._clock.now(), None
        to_send, running = deque(load.lengths), set[int]()
        while to_send or running:
            while to_send and len(running) < load.open:
                running.add(self._send(*to_send.popleft()))
            running -= self._ended()
            first = self._clock.now() if first is None else first
        assert first is not None
        return first - began

    def _ended(self) -> set[int]:
        """The requests that end with the next tokens."""
        message = self._client.receive(None)
        while not isinstance(message, Deltas):
            message = self._client.receive(None)
        for end in message.ends:
            if end.reason == "error":
                raise QuireError(f"Steps cannot be timed: {end.message}")
        return {end.id for end in message.ends}

    def _send(self, prompt: int, outputs: int) -> int:
        tokens = LocalTokens(self._vocab_size).random_ids(prompt, self._draw)
        params = SamplingParams(max_tokens=outputs, ignore_eos=True, temperature=0.0)
        number = next(self._numbers)
        self._client.send(Add(number, tokens, prompt, params, [], 0, self._clock.now()))
        return number


class StepRecorder:
    """An executor that times the steps of another one, not started yet, and collects them in `steps`."""

    def __init__(self, executor: Executor, slots: int, clock: Clock) -> None:
        self._executor, self._clock = executor, clock
        self._lengths = [0] * slots
        self._in_flight: deque[tuple[TimedStep, float]] = deque()  # without its time; when it was handed over
        self._last_end = 0.0
        self.steps: list[TimedStep] = []

    @property
    def orders(self) -> Orders:
        return self._executor.orders

    @property
    def max_in_flight(self) -> int:
        return self._executor.max_in_flight

    def start(self) -> DeviceLimits:
        return self._executor.start()

    def submit(self, plan: Plan) -> None:
        for admitted in plan.admitted:
            self._lengths[admitted.slot] = admitted.length
        before = tuple(self._lengths[slot] for slot in plan.slots)
        for slot, tokens in zip(plan.slots, plan.counts, strict=True):
            self._lengths[slot] += tokens
        step = TimedStep(tuple(plan.counts), before, len(plan.sampled_rows), 0.0)
        self._in_flight.append((step, self._clock.now()))
        self._executor.submit(plan)

    def submit_bitmasks(self, masks: TokenBitmasks) -> None:
        self._executor.submit_bitmasks(masks)

    def collect(self, timeout: float | None) -> Result | MaskedDrafts | None:
        result = self._executor.collect(timeout)
        if isinstance(result, Result):
            end, (step, submitted) = self._clock.now(), self._in_flight.popleft()
            ms = 1e3 * (end - max(self._last_end, submitted))
            self._last_end = end
            self.steps.append(TimedStep(step.counts, step.before, step.sampled, ms))
        return result

    def check(self) -> None:
        self._executor.check()

    def close(self) -> None:
        self._executor.close()
