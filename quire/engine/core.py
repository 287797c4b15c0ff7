"""The engine's loop: drain the inbox, plan ahead, process the oldest result, send what it brought.

Owns the order of these steps, and which client is told what. Token ids only: no text, no tensors. Clock, port and
executor are passed in, so the same code runs in a process of its own, inside `LLM`, and in a simulation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from quire.engine.adapter_slots import AdapterSlots
from quire.engine.build import ModelRuntimeInfo, build_ready, build_scheduler, estimated_throughput
from quire.engine.client_liveness import ClientLiveness
from quire.engine.commands import Commands, counts
from quire.engine.flight_record import FlightRecorder
from quire.engine.frames import EngineFrames
from quire.engine.isolation import Isolation
from quire.engine.outbox import Outbox
from quire.engine.port import Port, Undecodable
from quire.engine.request_checks import ended_before, refusal, to_int64
from quire.engine.step_stats import StepStats, Throughput, shortest_limit_s
from quire.engine.token_bitmasks import TokenBitmaskSender, TokenBitmaskSource
from quire.foundation.clock import Clock
from quire.foundation.config import Config
from quire.foundation.messages.from_engine import Done, End, Heartbeat, Load
from quire.foundation.messages.to_engine import (
    CLIENT_SHIFT,
    Abort,
    Adapter,
    Add,
    ClientGone,
    ClientHeartbeat,
    Control,
    ToEngine,
)
from quire.foundation.messages.workers import AdapterLoaded, DeviceLimits, MaskedDrafts
from quire.foundation.processes.launch import Pulse
from quire.runtime.executor.executor import Executor
from quire.scheduling.scheduler.request import Request

HEARTBEAT_S = 1.0
"""Longest time between two heartbeats of a live engine."""
ABORTED_TOKENS = 2**19
"""A turn aborts no more sequences once the aborted ones have this many tokens together: each 16 tokens are a block that
is freed, so 128 sequences of 131,072 tokens would take a tenth of a second."""
_ABORT_TOKENS = 2**11
"""What an aborted sequence counts for beside its tokens."""
_AWAITING_POLL_S = 0.001
"""How often to look whether awaited things have come, while nothing else can run, in seconds."""
_MOVING_POLL_S = 0.0002
"""How often to look while blocks are moved, which takes milliseconds."""


class EngineCore:
    """One engine: a scheduler over one executor.

    Args:
        config: Settings that `quire.planning.auto_config` has resolved.
        device_limits: What `executor`, which has started, has returned from `start`.
        masker: Says which tokens may come next, for constrained requests; None if none are served.
        adapters: Adapters that the executor has read at the start.
    """

    def __init__(
        self,
        config: Config,
        device_limits: DeviceLimits,
        runtime_info: ModelRuntimeInfo,
        executor: Executor,
        port: Port,
        clock: Clock,
        masker: TokenBitmaskSource | None = None,
        flight: FlightRecorder | None = None,
        adapters: Sequence[Adapter] = (),
    ) -> None:
        self.ready = replace(build_ready(config, device_limits, runtime_info), adapters=list(adapters))
        is_masked = None if masker is None else masker.wants
        self._scheduler = build_scheduler(config, device_limits, runtime_info, clock, is_masked)
        self._num_host_blocks = device_limits.num_host_blocks
        self._masks = None
        if masker is not None:
            self._masks = TokenBitmaskSender(masker, self._scheduler, executor, device_limits.vocab_size)
        self._executor = executor
        self._port = port
        self._clock = clock
        self._outbox = Outbox(port)
        self._flight = flight
        self._clients = ClientLiveness(clock)
        self._steps = StepStats(clock.now(), shortest_limit_s(config.parallel))
        self._frames: dict[int, EngineFrames] = {}  # by client: each puts together the parts that it was told
        loads = executor.orders if config.lora.enable_lora else None
        self._commands = Commands(self._scheduler, port, self._abort, loads, adapters, self._frame)
        self._adapter_slots = None
        if loads is not None:
            self._adapter_slots = AdapterSlots(self._scheduler, loads, config.lora.max_loras)
            for adapter in adapters:
                if adapter.name in config.lora.lora_pinned:
                    self._adapter_slots.pin(adapter)
        self._pausing = self._commands.pausing
        self._isolation = Isolation(self._scheduler)
        self._throughput = Throughput(estimated_throughput(config, runtime_info), clock.now())
        self._last_adds: dict[int, int] = {}  # by client
        self._last_beat = clock.now()
        self._was_busy = False
        self._told_pause = self._pausing.mode
        self._to_abort: deque[int] = deque()

    def turn(self, wait: float | None) -> None:
        """Run one turn of the loop. An idle engine waits up to `wait` seconds for a message (None: for ever), a busy
        one up to `wait` for the oldest step, but no longer than HEARTBEAT_S; neither spins."""
        for message in self._port.drain(self._idle_wait(wait)):
            self._receive(message)
        self._abort_unwanted()
        if self._masks is not None:
            self._finish(self._masks.release_prepared())
        self._finish(self._scheduler.expire())
        self._take_orders()
        if not self._pausing.frozen:
            self._isolation.update()
            self._plan_ahead()
        if self._masks is not None:
            self._finish(self._masks.send())
        if self._scheduler.steps_in_flight:
            self._process_oldest_result(HEARTBEAT_S if wait is None else min(wait, HEARTBEAT_S))
        else:
            self._executor.check()
        for client in self._clients.lost_clients():
            self._abort_all(client)
        self._outbox.flush(self._load, self._last_adds)
        self._commands.answer_due()
        self._send_heartbeats()

    def _take_orders(self) -> None:
        done = self._executor.orders.done()
        for order in done:
            self._scheduler.moved(order)
        if self._adapter_slots is not None:
            assert self._commands.adapters is not None
            loaded = [each for each in done if isinstance(each, AdapterLoaded)]
            self._commands.adapters.update([each for each in loaded if not each.slot])
            self._finish(self._adapter_slots.update([each for each in loaded if each.slot]))

    def _plan_ahead(self) -> None:
        while self._scheduler.steps_in_flight < self._executor.max_in_flight and (plan := self._scheduler.plan()):
            if self._flight is not None:
                self._flight.submitted(plan.step, self._scheduler.newest_requests())
            self._steps.planned(plan.counts)
            self._executor.submit(plan)
        for order in self._scheduler.take_orders():
            self._executor.orders.post(order)
        self._scheduler.cache_blocks()

    def record_turn(self, seconds: float) -> None:
        """Record the processor time that a turn took; heartbeats report it."""
        self._steps.turned(seconds)

    def _idle_wait(self, wait: float | None) -> float | None:
        """How long to wait for a message: not at all while there is work."""
        scheduler, adapters = self._scheduler, self._commands.adapters
        if not scheduler.has_work:
            if not scheduler.moves_blocks and (adapters is None or not adapters.busy):
                return wait
            return _AWAITING_POLL_S if wait is None else min(wait, _AWAITING_POLL_S)
        if self._pausing.reached:
            return HEARTBEAT_S if wait is None else min(wait, HEARTBEAT_S)
        if scheduler.only_awaiting and not scheduler.steps_in_flight:
            poll = _MOVING_POLL_S if scheduler.moves_blocks else _AWAITING_POLL_S
            return poll if wait is None else min(wait, poll)
        return 0.0

    # --- messages in ------------------------------------------------------------------------------------------------

    def _receive(self, message: ToEngine | Undecodable) -> None:
        match message:
            case Add():
                if self._flight is not None:
                    self._flight.handling(message.id)
                self._add(message)
                if self._flight is not None:
                    self._flight.handling(0)
            case Abort(ids):
                self._to_abort += ids
            case Control():
                self._commands.receive(message)
            case ClientHeartbeat(client):
                if self._clients.mark_alive(client):
                    self._port.send(client, replace(self.ready, paused=self._pausing.mode, adapters=self._adapters))
            case ClientGone(client):
                self._clients.mark_gone(client)
                self._abort_all(client)
                self._outbox.drop(client)
                self._port.forget(client)
                self._last_adds.pop(client, None)
                self._frames.pop(client, None)
            case Undecodable(reason, sequences, control):
                for sequence in sequences:
                    self._last_adds[sequence >> CLIENT_SHIFT] = sequence
                    self._outbox.end(End(sequence, "error", f"The engine could not read this request: {reason}."))
                if control is not None:
                    self._port.send(control >> CLIENT_SHIFT, Done(control, error=reason))

    def _add(self, message: Add) -> None:
        """Queue a prompt's sequences if they cannot harm the device; the client has checked everything else."""
        client = message.id >> CLIENT_SHIFT
        if self._clients.is_gone(client):
            return  # it was on its way
        self._clients.heard(client)
        self._last_adds[client] = max(message.last_id, self._last_adds.get(client, 0))  # replays come in any order
        error = self._refusal(message)
        tokens: Sequence[int] = ()
        ids: bytes | None = b""
        for sequence in message.sequences():
            if not error and sequence.tokens is not tokens:  # most share the prompt
                tokens, ids = sequence.tokens, to_int64(sequence.tokens, self.ready.vocab_size)
            if error or ids is None:
                why = error or f"Token ids must be in [0, {self.ready.vocab_size})."
                self._outbox.end(End(sequence.id, "error", why))
            elif (reason := ended_before(sequence)) is not None:
                self._outbox.end(End(sequence.id, reason))
            else:
                awaits = () if self._masks is None else self._masks.prepare(sequence)
                adapter = () if self._adapter_slots is None else self._adapter_slots.prepare(sequence)
                pause, others = self._pausing.awaits(sequence.id), self._isolation.awaits(sequence)
                self._scheduler.add(sequence, ids, (*awaits, *adapter, *pause, *others))

    def _refusal(self, message: Add) -> str:
        """Why none of a prompt's sequences can run; empty if they can."""
        if self._commands.draining:
            return "The server is shutting down. Send the request again."
        if (message.grammar or message.thinking) and self._masks is None:
            return "This engine follows no grammars, and limits no reasoning."
        if message.adapter and self._adapter_slots is None:
            return "This engine serves no adapters: start it with --enable-lora."
        return refusal(message, self.ready)

    def _abort_unwanted(self) -> None:
        """Abort sequences that clients do not want any more; very many are aborted over several turns."""
        aborted = 0
        while self._to_abort and aborted < ABORTED_TOKENS:
            aborted += _ABORT_TOKENS + self._abort(self._to_abort.popleft())

    def _abort(self, request_id: int) -> int:
        """Abort a sequence, and return how many tokens it had; 0 if it is already over."""
        request = self._scheduler.abort(request_id)
        if request is None:
            return 0
        self._finish([request])
        return len(request.tokens)

    def _abort_all(self, client: int) -> None:
        for request_id in [r.id for r in self._scheduler.requests() if r.id >> CLIENT_SHIFT == client]:
            self._abort(request_id)

    # --- results out ------------------------------------------------------------------------------------------------

    def _finish(self, ended: Iterable[Request]) -> None:
        now = self._clock.now()
        for request in ended:
            self._outbox.end(request.last_message(now))

    def _process_oldest_result(self, wait: float) -> None:
        result = self._executor.collect(timeout=wait)
        if result is None:
            return
        if isinstance(result, MaskedDrafts):
            assert self._masks is not None, "drafts of masked rows, and there are none"
            self._finish(self._masks.drafted(result))
            return
        outputs = self._scheduler.process_result(result)
        complete = [] if self._masks is None else self._masks.ask()
        self._outbox.prompt_logprobs(outputs.prompt_logprobs)
        self._outbox.cached(outputs.cached_tokens)
        self._outbox.tokens(outputs.ids, outputs.counts, outputs.tokens, outputs.logprobs)
        self._finish([*outputs.ended, *complete])
        now = self._clock.now()
        self._steps.finished(result, now)
        done = self._steps.token_sum + self._scheduler.stats.prefix_hits
        self._throughput.update(now, done, saturated=self._scheduler.is_saturated)
        if self._flight is not None:
            self._flight.finished(result.step)

    def _send_heartbeats(self) -> None:
        """Send a heartbeat once a second, when nothing is left to do, and when a client has paused or resumed."""
        now = self._clock.now()
        busy = self._scheduler.has_work and not self._pausing.reached
        waits = self._scheduler.only_awaiting and not self._scheduler.steps_in_flight
        self._steps.turn_ended(now, idle=not busy or waits)
        news = (self._was_busy and not busy) or self._pausing.mode != self._told_pause
        if now - self._last_beat >= HEARTBEAT_S or news:
            self._last_beat, self._told_pause = now, self._pausing.mode
            beat = self.heartbeat()
            for client in self._clients.clients:
                self._port.send(client, replace(beat, last_add=self._last_adds.get(client, 0)))
        self._was_busy = busy

    # --- state ------------------------------------------------------------------------------------------------------

    @property
    def _adapters(self) -> list[Adapter]:
        return [] if self._commands.adapters is None else self._commands.adapters.adapters

    @property
    def num_requests(self) -> int:
        """The number of sequences that are not over."""
        return len(self._scheduler.running) + len(self._scheduler.waiting)

    def pulse(self) -> Pulse:
        """A sign of life for the process that watches this one, with how long the engine has been stalled."""
        return Pulse(self._steps.stalled_s, self._steps.limit_s)

    def heartbeat(self) -> Heartbeat:
        """A sign of life for clients, with the engine's load and histograms of its steps."""
        return self._steps.heartbeat(self._clock.now(), self._load())

    def _frame(self, client: int, seen: int) -> dict[str, Any]:
        if client not in self._frames:
            self._frames[client] = EngineFrames(self._scheduler, self._steps, self._clock, counts)
        return self._frames[client].frame(seen)

    def counts(self) -> dict[str, int]:
        """What is held and what is free, for leak tests."""
        return counts(self._scheduler)

    def _load(self) -> Load:
        scheduler, stats, waiting, slots = (
            self._scheduler,
            self._scheduler.stats,
            self._scheduler.waiting,
            self._adapter_slots,
        )
        return Load(
            running=len(scheduler.running),
            waiting=len(waiting),
            waiting_tokens=waiting.num_tokens,
            free_blocks=scheduler.pool.num_free,
            num_blocks=scheduler.pool.num_blocks,
            retained_blocks=scheduler.pool.num_retained,
            preemptions=stats.preemptions,
            prefix_queries=stats.prefix_queries,
            prefix_hits=stats.prefix_hits,
            drafts=stats.speculation.drafts,
            draft_tokens=stats.speculation.tokens,
            accepted_drafts=list(stats.speculation.accepted),
            free_host_blocks=scheduler.host.num_free,
            num_host_blocks=self._num_host_blocks,
            step=self._steps.last_step,
            step_ms=self._steps.last_step_ms,
            deferred=waiting.num_deferred,
            unwritten_tokens=scheduler.unwritten_tokens,
            block_size=scheduler.pool.block_size,
            ready_host_blocks=scheduler.host.num_blocks,
            queued_tokens=waiting.queued_tokens,
            queue_delay_s=stats.queue_delay.smallest(self._clock.now()) if scheduler.is_saturated else 0.0,
            tokens_per_s=self._throughput.tokens_per_s,
            expected_output=scheduler.expected_output,
            paused=self._pausing.mode,
            running_adapters=slots.running if slots else [],
            waiting_adapters=slots.waiting if slots else [],
            states=None if scheduler.states is None else scheduler.states.load(),
            tier=None if scheduler.tier is None else scheduler.tier.usage(),
            media=None if scheduler.media is None else scheduler.media.load(),
        )
