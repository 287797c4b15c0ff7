"""The engine's loop with its real scheduler and KV blocks, in virtual time: requests of a trace in, their times out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from quire.config import Config
from quire.costmodel.roofline import Roofline
from quire.engine.build import ModelRuntimeInfo
from quire.engine.core import EngineCore
from quire.engine.port import Undecodable
from quire.errors import ConfigError
from quire.executor.simulated import SimulatedExecutor, StepMilliseconds, VirtualClock
from quire.messages import Add, Deltas, DeviceLimits, FromEngine, ToEngine
from quire.models.spec import ModelSpec
from quire.planning.kv_demand import group_windows
from quire.sampling import SamplingParams
from quire.simulation.trace import Trace


@dataclass
class Served:
    """What became of a request.

    Attributes:
        sent: Seconds after the beginning of the load.
        prompt: Tokens of its prompt.
        times: When each of its tokens came.
        cached: Tokens of its prompt that the prefix cache had.
        preemptions: How often it was preempted.
    """

    sent: float
    prompt: int
    times: list[float] = field(default_factory=list)
    cached: int = 0
    preemptions: int = 0

    @property
    def ttft(self) -> float:
        """Seconds to its first token."""
        return self.times[0] - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first; None if there is none."""
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1) if len(self.times) > 1 else None

    @property
    def itls(self) -> list[float]:
        """Seconds between tokens."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]

    @property
    def e2e(self) -> float:
        """Seconds to its last token."""
        return self.times[-1] - self.sent


@dataclass(frozen=True)
class SimulatedDevice:
    """What the engine runs on, in place of a worker.

    Attributes:
        limits: KV blocks, and steps that are padded.
        step_ms: How long its steps take.
        cost: The scheduler's own model of them.
        request_ms: Between a request and its engine, there and back.
    """

    limits: DeviceLimits
    step_ms: StepMilliseconds
    cost: Roofline
    request_ms: float


@dataclass(frozen=True)
class SimulatedRun:
    """What a load came to.

    Attributes:
        served: In the order of the trace.
        seconds: From the first arrival to the last token.
        steps: Of the device.
        busy: The share of the time in which it computed.
    """

    served: list[Served]
    seconds: float
    steps: int
    busy: float


def simulate(config: Config, spec: ModelSpec, device: SimulatedDevice, trace: Trace) -> SimulatedRun:
    """Serve a trace.

    Args:
        config: Resolved settings.
        spec: The model.

    Raises:
        ConfigError: The engine refuses a request, since it is too long.
    """
    clock = VirtualClock()
    seqs = config.scheduler.max_num_seqs
    assert seqs, "settings are resolved"
    executor = SimulatedExecutor(device.limits, seqs, device.step_ms, clock)
    port = _TracePort(trace, spec.vocab_size, device.request_ms / 1e3, clock)
    info = ModelRuntimeInfo(group_windows(spec), device.cost, spec.rope_length_mode)
    core = EngineCore(config, executor.start(), info, executor, port, clock)
    while port.is_open:
        core.turn(None)
    seconds = max(each.times[-1] for each in port.served) - min(each.sent for each in port.served)
    busy = executor.busy_ms / 1e3 / seconds if seconds else 1.0
    return SimulatedRun(port.served, seconds, executor.steps, busy)


class _TracePort:
    """The engine's port: gives it requests when their time has come, and notes when their tokens do.

    Args:
        way_s: What a request takes to its engine and back, all of it on its way there.
    """

    def __init__(self, trace: Trace, vocab_size: int, way_s: float, clock: VirtualClock) -> None:
        self._to_send = deque(enumerate(trace.requests))
        self._prompts: Iterator[list[int]] = trace.token_ids(vocab_size)
        self._concurrency = trace.concurrency or len(trace.requests)
        self._on_the_way: deque[tuple[float, Add]] = deque()
        self._open = 0
        self._way_s, self._clock = way_s, clock
        self.served = [Served(request.arrival, request.prompt) for request in trace.requests]

    @property
    def is_open(self) -> bool:
        """Whether any request is not over."""
        return bool(self._open or self._to_send)

    def drain(self, wait: float | None) -> list[ToEngine | Undecodable]:
        """What has arrived; an idle engine sleeps until the next request."""
        self._send_due(self._clock.now())
        idle = wait is None or wait > 0
        if idle and not self._on_the_way and self._to_send:
            self._send_due(max(self._clock.now(), self._to_send[0][1].arrival))
        if idle and self._on_the_way:
            self._clock.advance_to(self._on_the_way[0][0])
        found: list[ToEngine | Undecodable] = []
        while self._on_the_way and self._on_the_way[0][0] <= self._clock.now():
            found.append(self._on_the_way.popleft()[1])
        return found

    def send(self, client: int, message: FromEngine) -> None:
        """Note what came for whom."""
        if not isinstance(message, Deltas):
            return
        now = self._clock.now()
        for number, count in zip(message.ids, message.counts, strict=True):
            self.served[number - 1].times += [now] * count
        for number, cached in message.cached_tokens:
            self.served[number - 1].cached = cached
        for end in message.ends:
            if end.reason == "error":
                raise ConfigError(f"Request {end.id} of the trace: {end.message}")
            self.served[end.id - 1].preemptions = end.preemptions
            self._open -= 1

    def forget(self, client: int) -> None:
        """There is one client, and it stays."""

    def _send_due(self, now: float) -> None:
        """Send what is due, as far as the client may have open."""
        while self._to_send and self._open < self._concurrency and self._to_send[0][1].arrival <= now:
            number, request = self._to_send.popleft()
            sent = request.arrival if self._concurrency >= len(self.served) else max(request.arrival, now)
            self.served[number].sent = sent
            tokens = next(self._prompts)
            params = SamplingParams(max_tokens=request.output, ignore_eos=True, temperature=0.0)
            self._open += 1
            self._on_the_way.append(
                (sent + self._way_s, Add(number + 1, tokens, len(tokens), params, [], 0, sent + self._way_s))
            )
