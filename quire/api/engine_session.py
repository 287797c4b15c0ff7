"""The API process's side of the engine: requests go in, output goes to who waits for it.

Owns which requests are open, and the server's state. Every accepted sequence gets exactly one end. Knows nothing about
HTTP or text.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

from quire.api.admission_limit import AdmissionLimit, queue_limits
from quire.api.engine_connection import DEAD, LOADING, RECOVERING, EngineConnection
from quire.api.engine_receiver import EngineReceiver, MakeReceiver
from quire.api.grammar_checks import GrammarChecks
from quire.api.open_requests import OpenRequests
from quire.api.output_collector import OutputCollector
from quire.api.recovery import EngineRecovery
from quire.api.shared_turn import SharedTurn
from quire.clock import Clock, SystemClock
from quire.config import Config
from quire.engine.client import EngineClient, Lost
from quire.engine.submission import Submission
from quire.errors import (
    EngineDeadError,
    GenerationError,
    QuireError,
    RequestError,
    RequestTimeoutError,
    UnavailableError,
)
from quire.messages import Abort, Add, Deltas, Done, EndReason, Heartbeat, Ready, ThinkingBudget
from quire.metrics.stats import Stats
from quire.processes.launch import SendReport
from quire.sampling import SamplingParams
from quire.text.deltas import SequenceDelta, deltas_by_sequence

MAX_SEQUENCES = 1_024
"""Of one request: prompts times n."""
NEW_WORK_WAIT_S = 20.0
"""How long after an engine's death new requests are taken, in seconds; then they are refused until there is another."""
State = Literal["starting", "ready", "recovering", "draining", "dead"]

_REFUSALS: dict[State, str] = {
    "starting": LOADING,
    "recovering": RECOVERING,
    "draining": "The server is shutting down. Send the request to another one, or again later.",
    "dead": DEAD,
}
_TOO_LATE = "The request's time was over before it had any output. Send it again, with more time or later."
_BLAMED = "The engine stopped each time it worked on this request. Do not send it again; the server's log says why."


def check_num_sequences(num_prompts: int, n: int, param: str = "n") -> None:
    """Refuse a request of too many sequences, naming the field `param`.

    Raises:
        RequestError: There are more than MAX_SEQUENCES.
    """
    if num_prompts * n > MAX_SEQUENCES:
        raise RequestError(f"A request may ask for at most {MAX_SEQUENCES} sequences (prompts × n).", param=param)


class EngineSession:
    """One engine, shared by all requests of this process. Everything runs in the event loop.

    Args:
        client: The way to the engine.
        config: Resolved settings.
        eos_ids: The model's end-of-sequence tokens.
        clock: For all times.
        special_tokens: The model's, by text.
        report: Is told how the recovery from an engine's death goes.
        make_receiver: What receives the engine's messages.

    Attributes:
        stats: Filled as messages pass.
        admission_limit: Which requests are turned away.
    """

    def __init__(
        self,
        client: EngineClient,
        config: Config,
        eos_ids: Sequence[int],
        clock: Clock | None = None,
        special_tokens: Mapping[str, int] | None = None,
        report: SendReport = lambda report: None,
        make_receiver: MakeReceiver = EngineReceiver,
    ) -> None:
        self.stats = Stats()
        self._config = config
        self._eos_ids = eos_ids
        self._clock = clock or SystemClock()
        self._engine = EngineConnection(client, self._clock, self, make_receiver)
        self._submission: Submission | None = None
        self.admission_limit = AdmissionLimit(queue_limits(config.scheduler), self.stats.rejections)
        self._requests = OpenRequests()
        self._recovery = EngineRecovery(self._requests, self._engine, self.stats, self.admission_limit, report)
        self._grammars = GrammarChecks(special_tokens, has_tokenizer=not config.model.skip_tokenizer_init)
        self._leaving = self._draining = self._closing = False
        self._adding = asyncio.Lock()

    # --- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to receive; called in the event loop. More calls do nothing."""
        self._engine.start()

    async def wait_ready(self) -> Ready:
        """The engine's Ready.

        Raises:
            EngineDeadError: It died instead.
        """
        return await self._engine.wait_ready()

    async def wait_dead(self) -> None:
        """Until the engine is dead and is not replaced."""
        await self._engine.wait_dead()

    def begin_drain(self) -> None:
        """Take no new work; open requests go on, also those that a pause has stopped."""
        self._draining = True
        self._engine.end_pause()

    async def drain(self, timeout: float) -> bool:
        """Wait until open requests have ended; after `timeout` seconds fail those that have not. Returns whether all
        ended by themselves. First, for --shutdown-delay, `/ready` says no and work that comes nevertheless is taken."""
        self._leaving = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._engine.wait_dead(), self._config.server.shutdown_delay)
        self.begin_drain()
        try:
            async with asyncio.timeout(timeout):
                await self._requests.wait_idle()
        except TimeoutError:
            self._fail_all(UnavailableError(_REFUSALS["draining"]), "abort")
            return False
        return True

    async def close(self) -> None:
        """Stop receiving and disconnect from the engine. More calls do nothing."""
        if self._closing:
            return
        self._closing = True
        self._fail_all(UnavailableError(_REFUSALS["draining"]), "abort")
        await self._engine.close()
        self._grammars.close()

    # --- state ------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """starting → ready ⇄ recovering → draining → dead."""
        return "draining" if self._draining and self._engine.state != "dead" else self._engine.state

    @property
    def ready(self) -> Ready | None:
        """What the engine said when it was ready."""
        return self._engine.ready

    @property
    def health_complaint(self) -> str:
        """Why the server is not alive or makes no progress; empty if it is and does."""
        return self._engine.complaint

    @property
    def readiness_complaint(self) -> str:
        """Why a request would not be accepted and finished now; empty if it would."""
        if self._draining or self._leaving:
            return "the server is shutting down"
        return self._engine.complaint

    @property
    def num_sequences(self) -> int:
        """Sequences that have not ended."""
        return self._requests.num_sequences

    def counts(self) -> dict[str, int]:
        """What is held, for leak tests; asked in the event loop."""
        return {
            "sequences": self.num_sequences,
            "streams": len(self._requests.collectors()),
            "controls": self._engine.num_controls,
            "tasks": len(asyncio.all_tasks()),
        }

    async def control(self, action: str) -> Done:
        """Send the engine a command and wait for its answer.

        Raises:
            UnavailableError: There is no engine that could answer, or open requests are waited for.
        """
        if self._draining and action.startswith("pause:"):
            raise UnavailableError(_REFUSALS["draining"])
        return await self._engine.control(action)

    # --- requests ---------------------------------------------------------------------------------------------------

    def keep_open(self) -> AbstractContextManager[None]:
        """For a request that is several to the engine, one after the other: a drain waits for it as a whole."""
        return self._requests.keep_open()

    @property
    def submission(self) -> Submission:
        """Checks and limits of the engine.

        Raises:
            UnavailableError: No work is taken now.
        """
        waits = self.state == "recovering" and self._engine.recovering_s < NEW_WORK_WAIT_S
        if self._submission is None or not (self.state == "ready" or waits):
            raise UnavailableError(_REFUSALS["starting" if self.state == "ready" else self.state])
        return self._submission

    def refuse_if_full(self, tenant: str) -> None:
        """Look whether a request can be turned away before it is read, see AdmissionLimit.

        Raises:
            OverloadedError: Too many requests wait.
        """
        if self.state == "ready":
            self.admission_limit.refuse_if_full(tenant)

    async def grammar_options(self, params: SamplingParams, behind: str = "") -> dict[str, Any]:
        """What `add_request` needs for `params.structured_outputs`, see GrammarChecks.options."""
        return await self._grammars.options(params, behind)

    def check_room(self, tenant: str, sequences: int, tokens: int) -> None:
        """Refuse a request that the queue has no room for before anything is done for it.

        Args:
            sequences, tokens: At least so many. What could never run is told so instead, so these are checked before.

        Raises:
            UnavailableError: No work is taken now.
            OverloadedError: Too many requests wait.
        """
        if self.submission:  # raises
            self.admission_limit.check(tenant, sequences, tokens)

    async def add_request(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        bad_words: Sequence[Sequence[int]] = (),
        truncation_side: Literal["left", "right"] = "left",
        grammar: str = "",
        thinking: ThinkingBudget | None = None,
        deadline: float | None = None,
        tenant: str = "",
        continuing: bool = False,
    ) -> OutputCollector:
        """Hand a request's sequences to the engine, `params.n` for each prompt. Must be closed.

        Args:
            priority, cache_salt, bad_words, truncation_side, thinking, deadline, tenant: See Submission.adds.
            grammar: What `grammar_options` returned for `params`.
            continuing: It belongs to a request that was taken before (see `keep_open`), so a drain lets it in.

        Raises:
            UnavailableError: No work is taken now.
            OverloadedError: Too many requests wait.
            RequestError: The engine could not run it; nothing was started.
        """
        check_num_sequences(len(prompts), params.n)
        let_in = continuing and self.state == "draining" and not self._closing
        submission = self._submission if let_in and self._submission is not None else self.submission
        options: dict[str, Any] = {
            "priority": priority,
            "cache_salt": f"{tenant}/{cache_salt}" if self._config.server.cache_isolation else cache_salt,
            "bad_words": bad_words,
            "truncation_side": truncation_side,
            "grammar": grammar,
            "thinking": thinking,
            "deadline": deadline,
            "tenant": tenant,
        }
        async with self._adding:  # ids are in the order in which they are sent
            turn, adds = SharedTurn(), list[Add]()
            for prompt in prompts:
                adds += submission.adds(prompt, params, **options)
                await turn.share()
            if not let_in:
                submission = self.submission  # raises if it has come to an end meanwhile
            self.admission_limit.enter(adds, continuing=continuing)
            collector = OutputCollector(adds, [self.stats.start_sequence(add) for add in adds])
            await self._send(collector, turn)
        return collector

    async def _send(self, collector: OutputCollector, turn: SharedTurn) -> None:
        self._recovery.open(collector)
        try:
            for _ in self._recovery.send(collector):
                await turn.share()
        except BaseException:  # its reader has gone
            self.close_request(collector)
            raise

    def count_delivered(self, collector: OutputCollector, index: int, tokens: int) -> None:
        """The reader has got so many more tokens of one sequence."""
        self.stats.record_delivered(collector.stats[index], tokens)

    def finish_sequence(self, collector: OutputCollector, index: int, reason: EndReason) -> None:
        """The reader has all of one sequence; if the engine still runs it, it is aborted."""
        self._abort([collector.adds[index]])
        self._recovery.ended(collector)
        self.stats.finish_sequence(collector.stats[index], reason, self._clock.now())

    def close_request(self, collector: OutputCollector, reason: EndReason = "abort") -> None:
        """The reader is gone or has all that it wanted; what still runs is aborted."""
        self._abort(collector.adds)
        self._recovery.ended(collector)
        now = self._clock.now()
        for sequence in collector.stats:
            self.stats.finish_sequence(sequence, sequence.end.reason if sequence.end else reason, now)

    def _abort(self, adds: Sequence[Add]) -> None:
        running = [add.id for add in adds if add.id in self._requests]
        self.admission_limit.leave_queue(running)
        for sequence in running:
            self._requests.remove(sequence)
        if running:
            self._engine.send(Abort(running))

    # --- what the engine says ---------------------------------------------------------------------------------------

    def on_ready(self, ready: Ready) -> None:
        self.stats.engine_restarts = self._engine.engine.epoch
        if self._submission is None:
            self._submission = self._new_submission(ready)
            self.stats.set_max_model_len(ready.max_model_len)
        else:
            self._submission.replace_engine(ready)
            self._recovery.engine_ready()

    def _new_submission(self, ready: Ready) -> Submission:
        model = self._config.model
        seeds = random.SystemRandom()
        return Submission(
            self._engine.number,
            ready,
            self._eos_ids,
            model.max_logprobs,
            self._config.scheduler.scheduling_policy,
            self._clock,
            lambda: seeds.getrandbits(64),
            takes_extra_args=bool(model.logits_processors),
        )

    def on_heartbeat(self, beat: Heartbeat) -> None:
        self.stats.record_heartbeat(beat)
        self.admission_limit.observe(beat.load, beat.last_add)

    def on_deltas(self, deltas: Deltas, now: float) -> None:
        self.stats.record_load(deltas.load)
        self.admission_limit.observe(deltas.load, deltas.last_add)
        news = deltas_by_sequence(deltas)
        self.admission_limit.leave_queue(news)
        for number, delta in news.items():
            self._on_delta(number, delta, now)

    def _on_delta(self, number: int, delta: SequenceDelta, now: float) -> None:
        sequence = self._requests.get(number)
        if sequence is None:
            return
        collector = sequence.collector
        sequence.record(delta)
        stats = collector.stats_of(number)
        self.stats.record_tokens(stats, len(delta.tokens), now, delta.cached_tokens)
        if delta.end is not None:  # first, because the reader may close the request when it gets the end
            stats.end = delta.end
            self._requests.remove(number)
            self._recovery.ended(collector)
            if delta.end.reason == "error":
                message = delta.end.message or "The engine could not go on with this request."
                collector.fail(GenerationError(message))
                return
            if delta.end.reason == "timeout" and not any(stats.received for stats in collector.stats):
                collector.fail(RequestTimeoutError(_TOO_LATE))
                return
        else:
            self._recovery.gained(sequence)
        collector.put(number, delta)

    def on_lost(self, message: Lost) -> None:
        self._fail_all(GenerationError("A message of the engine was lost. Send the request again."), "error")

    def on_engine_died(self, in_flight: Sequence[int]) -> None:
        adds = [add for collector in self._requests.collectors() for add in collector.adds if add.fork_of is None]
        queued_tokens = sum(add.queued_tokens(self.stats.load.expected_output) for add in adds)
        self.stats.record_engine_death(self.num_sequences, queued_tokens)
        blamed = self._recovery.engine_died(in_flight)
        if blamed is not None:
            self.close_request(blamed, "error")
            blamed.fail(GenerationError(_BLAMED))

    def on_dead(self) -> None:
        self._fail_all(EngineDeadError(DEAD), "error")

    def _fail_all(self, error: QuireError, reason: EndReason) -> None:
        for collector in self._requests.collectors():
            self.close_request(collector, reason)
            collector.fail(error)
