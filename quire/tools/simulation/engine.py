"""The engine's loop with its real scheduler and KV blocks, in virtual time: requests of a trace in, their times out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from quire.engine.build import runtime_info_of
from quire.engine.core import EngineCore
from quire.engine.port import Undecodable
from quire.errors import ConfigError
from quire.foundation.config import Config
from quire.foundation.messages.from_engine import Deltas, FromEngine
from quire.foundation.messages.to_engine import Add, ToEngine
from quire.foundation.messages.workers import DeviceLimits
from quire.foundation.processes.garbage import no_collection
from quire.models.spec import ModelSpec
from quire.planning.costmodel.roofline import Roofline
from quire.planning.memory_budget import KVDemand
from quire.pooling_params import NO_SAMPLING, PoolingParams
from quire.runtime.executor.simulated import IntArray, SimulatedExecutor, StepMilliseconds, VirtualClock
from quire.sampling_params import SamplingParams
from quire.tools.simulation.trace import Trace


@dataclass
class Served:
    """What became of a request that was sent so many seconds after the beginning of the load: tokens of its prompt,
    when each output token came, seconds in the engine's queue before its first step, and prompt tokens that the prefix
    cache had."""

    sent: float
    prompt: int
    times: list[float] = field(default_factory=list)
    queued: float = 0.0
    cached: int = 0
    preemptions: int = 0

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first; None if there is only one."""
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1) if len(self.times) > 1 else None

    @property
    def itls(self) -> list[float]:
        """Seconds between tokens."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]

    @property
    def e2e_latency(self) -> float:
        """Seconds to the last token."""
        return self.times[-1] - self.sent


@dataclass(frozen=True)
class SimulatedDevice:
    """What the engine runs on, in place of a worker.

    Attributes:
        limits: KV blocks, and sizes to which steps are padded.
        step_ms: How long its steps take.
        cost: The scheduler's own model of step times.
        request_ms: The way of a request to its engine and back.
        arrival_ms: How much longer a step takes for each request that arrived before it.
        draft_ms: How long a pass of the draft model takes; None: drafts take no time.
    """

    limits: DeviceLimits
    step_ms: StepMilliseconds
    cost: Roofline
    request_ms: float
    arrival_ms: float = 0.0
    draft_ms: StepMilliseconds | None = None


@dataclass(frozen=True)
class Occupancy:
    """How full the engine was after a step: seconds since the beginning of the load, requests in the step and in the
    queue, and the share of the KV cache's blocks that requests held."""

    time: float
    running: int
    waiting: int
    kv_share: float


@dataclass(frozen=True)
class SimulatedRun:
    """What came of a load: its requests in order, seconds from the first arrival to the last token, the share of the
    time in which the device computed, and the occupancy after each step that brought tokens."""

    served: list[Served]
    seconds: float
    steps: int
    busy: float
    occupancy: list[Occupancy]


def simulate(config: Config, spec: ModelSpec, device: SimulatedDevice, trace: Trace) -> SimulatedRun:
    """Serve a trace with resolved settings. A model that generates no text makes a vector of each prompt, whose time
    counts as that of the only token. Raises ConfigError if a request is too long for the engine."""
    clock = VirtualClock()
    seqs = config.scheduler.max_num_seqs
    assert seqs, "settings are resolved"
    limits = msgspec.structs.replace(device.limits, num_blocks=_blocks_in_use(config, spec, device.limits, trace))
    speculation = config.speculation.speculation
    rates = () if speculation is None else speculation.synthetic_rates
    executor = SimulatedExecutor(limits, seqs, device.step_ms, clock, rates, device.draft_ms)
    info = runtime_info_of(spec, device.cost)
    if speculation is not None:
        info = replace(info, drafts=lambda sampling: len(rates))
    port = _TracePort(trace, spec, device, clock, lambda: executor.delay(device.arrival_ms))
    core = EngineCore(config, executor.start(), info, executor, port, clock)
    with no_collection():
        while port.is_open:
            core.turn(None)
    served = port.served()
    seconds = max(each.times[-1] for each in served) - min(each.sent for each in served)
    busy = executor.busy_ms / 1e3 / seconds if seconds else 1.0
    return SimulatedRun(served, seconds, executor.steps, busy, port.occupancy)


def _blocks_in_use(config: Config, spec: ModelSpec, limits: DeviceLimits, trace: Trace) -> int:
    """The device's blocks, or as many as this load can ever write to: with these, as with more, none is evicted. A
    small model leaves a large GPU tens of millions, and listing them takes longer than all else here."""
    size, groups = config.cache.block_size, max(1, len(spec.kv_groups()))
    demand = KVDemand.of(config, spec)
    one = demand.blocks_for_one_sequence(demand.limits.length)  # which the engine must be able to hold
    written = sum(-(-(each.prompt + each.output) // size) + 1 for each in trace.requests)  # and one for steps in flight
    return min(limits.num_blocks, one + groups * written)


class _TracePort:
    """The engine's port: gives it requests when their time has come, and notes when tokens do. A request's way there
    and back takes the device's `request_ms`, all before it arrives. `came` is called for each that reaches the
    engine."""

    def __init__(
        self, trace: Trace, spec: ModelSpec, device: SimulatedDevice, clock: VirtualClock, came: Callable[[], None]
    ) -> None:
        self._to_send = deque(enumerate(trace.requests))
        self._prompts: Iterator[list[int]] = trace.token_ids(spec.vocab_size)
        self._pooling = None if spec.pooler.generates else PoolingParams(task=spec.pooler.tasks[0])
        self._concurrency = trace.concurrency or len(trace.requests)
        self._on_the_way: deque[tuple[float, Add]] = deque()
        self._params: dict[int, SamplingParams] = {}  # by max_tokens: checking them takes longer than all else here
        self._open = 0
        self._way_s, self._clock, self._came = device.request_ms / 1e3, clock, came
        self._num_blocks = device.limits.num_blocks
        self._served = [Served(request.arrival, request.prompt) for request in trace.requests]
        self._tokens: list[tuple[float, IntArray, IntArray]] = []  # time, ids of requests, tokens of each
        self.occupancy: list[Occupancy] = []

    @property
    def is_open(self) -> bool:
        return bool(self._open or self._to_send)

    def drain(self, wait: float | None) -> list[ToEngine | Undecodable]:
        """The requests that have arrived; an idle engine sleeps until the next one."""
        self._send_due(self._clock.now())
        idle = wait is None or wait > 0
        if idle and not self._on_the_way and self._to_send:
            self._send_due(max(self._clock.now(), self._to_send[0][1].arrival))
        if idle and self._on_the_way:
            self._clock.advance_to(self._on_the_way[0][0])
        found: list[ToEngine | Undecodable] = []
        while self._on_the_way and self._on_the_way[0][0] <= self._clock.now():
            found.append(self._on_the_way.popleft()[1])
            self._came()
        return found

    def send(self, client: int, message: FromEngine) -> None:
        """Note which request got what."""
        if not isinstance(message, Deltas):
            return
        now, load = self._clock.now(), message.load
        pooled = [end.id for end in message.ends] if self._pooling is not None else []
        ids, counts = [*message.ids, *pooled], [*message.counts, *([1] * len(pooled))]
        self._tokens.append((now, np.array(ids, np.int64), np.array(counts, np.int64)))
        held = (load.num_blocks - load.free_blocks) / self._num_blocks
        self.occupancy.append(Occupancy(now, load.running, load.waiting, held))
        for number, cached in message.cached_tokens:
            self._served[number - 1].cached = cached
        for end in message.ends:
            if end.reason == "error":
                raise ConfigError(f"Request {end.id} of the trace: {end.message}")
            ended = self._served[end.id - 1]
            ended.preemptions, ended.queued = end.preemptions, end.queued_s
            self._open -= 1

    def served(self) -> list[Served]:
        """The times of each request, once all have ended."""
        steps = np.repeat(np.arange(len(self._tokens)), [len(ids) for _, ids, _ in self._tokens])
        ids, counts = (np.concatenate([each[column] for each in self._tokens]) for column in (1, 2))
        order = np.argsort(ids, kind="stable")
        times = np.array([now for now, _, _ in self._tokens])[steps[order]]
        ends = np.searchsorted(ids[order], np.arange(1, len(self._served) + 1), side="right")
        begin = 0
        for each, end in zip(self._served, ends.tolist(), strict=True):
            each.times = np.repeat(times[begin:end], counts[order[begin:end]]).tolist()
            begin = end
        return self._served

    def forget(self, client: int) -> None:
        """Do nothing: the one client stays."""

    def _send_due(self, now: float) -> None:
        """Send the requests that are due, as far as the client's concurrency allows."""
        while self._to_send and self._open < self._concurrency and self._to_send[0][1].arrival <= now:
            number, request = self._to_send.popleft()
            sent = request.arrival if self._concurrency >= len(self._served) else max(request.arrival, now)
            self._served[number].sent = sent
            tokens, came = next(self._prompts), sent + self._way_s
            params = NO_SAMPLING if self._pooling is not None else self._sampling(request.output)
            self._open += 1
            add = Add(number + 1, tokens, len(tokens), params, [], 0, came, pooling=self._pooling)
            self._on_the_way.append((came, add))

    def _sampling(self, output: int) -> SamplingParams:
        params = self._params.get(output)
        if params is None:
            params = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0)
            self._params[output] = params
        return params
