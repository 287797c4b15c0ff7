"""The API process's side of the engines: requests go in, output goes to who waits for it.

Owns which requests are open. Every accepted sequence gets exactly one end. Knows nothing about HTTP or text. On the way
of a request:

- `open_requests.py`: what is open, and its output until its reader takes it.
- `placement.py`: which engine a prompt goes to, and how long each one's queue is.
- `engines.py`: one engine with its requests, and all together; `connection.py`: state, health and commands of one.
- `receivers.py`: how messages get from an engine into the event loop.
- `recovery.py`: what becomes of requests when an engine dies.
- `state.py`: whether requests are taken.

Which requests the queue has no room for `quire.serving.api.session.queues` says.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

from quire.engine.client import EngineClient
from quire.engine.metrics.server_stats import ServerStats
from quire.engine.metrics.stats import SequenceStats, Stats
from quire.engine.submission import Submission
from quire.errors import EngineDeadError, QuireError, RequestError, UnavailableError
from quire.foundation.clock import Clock, SystemClock
from quire.foundation.config import Config
from quire.foundation.messages.from_engine import Done, EndReason, Ready
from quire.foundation.messages.to_engine import Abort, Add, ThinkingBudget
from quire.foundation.processes.launch import SendReport
from quire.sampling_params import SamplingParams
from quire.serving.api.adapters import ServedAdapters
from quire.serving.api.grammar_checks import GrammarChecks
from quire.serving.api.peers import Answer, CountOpen, EnginesPaused, Peers
from quire.serving.api.request_work import TimeSlice
from quire.serving.api.session.connection import DEAD, changes_pause
from quire.serving.api.session.engines import Engine, Engines
from quire.serving.api.session.open_requests import OpenRequests, OutputCollector, replay_adds
from quire.serving.api.session.queues import AdmissionLimit, Placement, queue_limits
from quire.serving.api.session.receivers import MakeReceiver, ThreadReceiver
from quire.serving.api.session.state import SessionState, State, refusal

MAX_SEQUENCES = 1_024
"""Most sequences of one request: prompts times n."""


def check_num_sequences(num_prompts: int, n: int, param: str = "n") -> None:
    """Refuse a request of too many sequences, naming the field `param`.

    Raises:
        RequestError: There are more than MAX_SEQUENCES.
    """
    if num_prompts * n > MAX_SEQUENCES:
        raise RequestError(f"A request may ask for at most {MAX_SEQUENCES} sequences (prompts × n).", param=param)


class EngineSession:
    """The engines, shared by all requests of this process. Everything runs in the event loop.

    Args:
        clients: The way to each engine, by its number.
        config: Resolved settings.
        eos_ids: The model's end-of-sequence tokens.
        clock: For all times.
        special_tokens: The model's, by text.
        report: Is told how the recovery from an engine's death goes.
        make_receiver: What receives an engine's messages.
        peers: The other API processes; None: there are none.

    Attributes:
        stats: Filled as messages pass.
        admission_limit: Decides which requests are turned away.
    """

    def __init__(
        self,
        clients: Sequence[EngineClient],
        config: Config,
        eos_ids: Sequence[int],
        clock: Clock | None = None,
        special_tokens: Mapping[str, int] | None = None,
        report: SendReport = lambda report: None,
        make_receiver: MakeReceiver = ThreadReceiver,
        peers: Peers | None = None,
    ) -> None:
        self._config = config
        self._number = clients[0].number
        self._eos_ids = eos_ids
        self._clock = clock or SystemClock()
        self._requests = OpenRequests()
        limits = queue_limits(config.scheduler)
        self._engines = Engines(
            Engine(client, limits.slots, self._requests, self, self._clock, report, make_receiver) for client in clients
        )
        self._state = SessionState(self._engines)
        self.stats = ServerStats([engine.stats for engine in self._engines])
        queues = [engine.queue for engine in self._engines]
        self.admission_limit = AdmissionLimit(limits, queues, self.stats.rejections)
        self._placement = Placement(queues, config.cache.block_size, self._clock)
        self._peers = peers or Peers()
        self._peers.on(CountOpen, lambda question: self.counts())
        self._peers.on(EnginesPaused, self._paused_by_peer)
        self.adapters = ServedAdapters(config.lora, self._engines, self._peers)
        self._submission: Submission | None = None
        self._grammars = GrammarChecks(special_tokens, has_tokenizer=not config.model.skip_tokenizer_init)
        self._adding = asyncio.Lock()
        self._dead = asyncio.Event()

    # --- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to receive; called in the event loop. More calls do nothing."""
        self._peers.open()  # before engines say what there is: what is new later is said by the others
        self._engines.start()

    async def wait_ready(self) -> Ready:
        """Wait until each engine has been ready, and return what all of them can do.

        Raises:
            EngineDeadError: One died instead.
        """
        return await self._engines.wait_ready()

    async def wait_dead(self) -> None:
        """Wait until an engine is dead and is not replaced."""
        await self._dead.wait()

    def begin_drain(self) -> None:
        """Take no new work; open requests go on, also those that a pause has stopped."""
        self._state.drain()
        if not self._state.closed:
            self._engines.end_pause()

    async def drain(self, timeout: float) -> bool:
        """Wait until open requests have ended; after `timeout` seconds fail those that have not. Returns whether all
        ended by themselves. First, for --shutdown-delay, `/ready` says no and work that comes nevertheless is taken."""
        if self._state.closed:
            return True
        self._state.announce_shutdown()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.wait_dead(), self._config.server.shutdown_delay)
        self.begin_drain()
        try:
            async with asyncio.timeout(timeout):
                await self._requests.wait_idle()
        except TimeoutError:
            self._fail_all()
            return False
        return True

    async def wait_idle(self) -> None:
        """Wait until no request is open."""
        await self._requests.wait_idle()

    def begin_swap(self) -> None:
        """Announce that another model takes this one's place, and resume engines so that open requests can end."""
        self._state.announce_swap()
        self._engines.end_pause()

    def retire(self) -> None:
        """Take no new work and end what is open, because another model has taken this one's place."""
        self._state.retire()
        self.begin_drain()
        self._fail_all()

    async def close(self) -> None:
        """Stop receiving and disconnect from the engines. More calls do nothing."""
        if self._state.closed:
            return
        self._state.closed = True
        self._fail_all()
        await self._engines.close()
        self._peers.close()
        self._grammars.close()

    def _fail_all(self) -> None:
        why = UnavailableError(refusal(self._state.ending))
        self.fail_requests(self._requests.collectors(), why, "abort")

    # --- state ------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """The server's state, such as `ready` or `draining`."""
        return self._state.current

    @property
    def ready(self) -> Ready | None:
        """What all engines can do and hold together; None until each of them has been ready."""
        return self._engines.ready

    @property
    def health_complaint(self) -> str:
        """Why the server is not alive or makes no progress; empty if all is well, or another model is loaded."""
        return self._state.health_complaint

    @property
    def readiness_complaint(self) -> str:
        """Why a request would not be accepted and finished now; empty if it would."""
        return self._state.readiness_complaint

    @property
    def engine_states(self) -> list[dict[str, str | int]]:
        """Each engine's number and state, and what is wrong with it, if anything is."""
        return self._engines.states

    @property
    def num_sequences(self) -> int:
        """Sequences that have not ended."""
        return self._requests.num_sequences

    def counts(self) -> dict[str, int]:
        """What this process holds, for leak tests; asked in the event loop."""
        return {
            "sequences": self.num_sequences,
            "streams": len(self._requests.collectors()),
            "controls": self._engines.num_controls,
            "tasks": len(asyncio.all_tasks()),
        }

    async def counts_of_all(self) -> dict[str, int]:
        """Add up the `counts` of all API processes that answer."""
        own = self.counts()
        others = await self._peers.ask(CountOpen())
        return {name: value + sum(other[name] for other in others) for name, value in own.items()}

    async def control(self, action: str) -> Done:
        """Send all engines a command and wait for their answers.

        Raises:
            UnavailableError: There is no engine that could answer, or open requests are waited for.
        """
        if self._state.draining and action.startswith("pause:"):
            raise UnavailableError(refusal("draining"))
        if changes_pause(action) and self._engines.state == "ready":
            self._peers.tell(EnginesPaused(action))
        return await self._engines.control(action)

    def _paused_by_peer(self, news: EnginesPaused) -> Answer:
        self._engines.remember(news.action)
        return {}

    async def control_one(self, engine: int, action: str, value: Mapping[str, str]) -> Done:
        """Send one engine a command and wait for its answer.

        Raises:
            UnavailableError: It could not answer.
        """
        return await self._engines[engine].connection.control(action, value)

    # --- requests ---------------------------------------------------------------------------------------------------

    def keep_open(self) -> AbstractContextManager[None]:
        """A context for a request that becomes several engine requests in turn: a drain waits until it ends."""
        return self._requests.keep_open()

    @property
    def submission(self) -> Submission:
        """Checks and limits of the engines.

        Raises:
            UnavailableError: No work is taken now.
        """
        if self._submission is None or not self._state.takes_requests:
            raise UnavailableError(self._state.refusal)
        return self._submission

    def refuse_if_full(self) -> None:
        """Turn a request away before it is read, if the queue is full.

        Raises:
            OverloadedError: Too many requests wait.
        """
        if self.state == "ready":
            self.admission_limit.refuse_if_full()

    async def grammar_options(self, params: SamplingParams, behind: str = "") -> dict[str, Any]:
        """What `add_request` needs for `params.structured_outputs`, see GrammarChecks.options."""
        return await self._grammars.options(params, behind)

    def check_room(self, sequences: int, tokens: int) -> None:
        """Refuse a request that the queue has no room for before anything is done for it.

        Args:
            sequences, tokens: At least so many. What could never run is told so instead, so these are checked before.

        Raises:
            UnavailableError: No work is taken now.
            OverloadedError: Too many requests wait.
        """
        if self.submission:  # raises
            self.admission_limit.check(sequences, tokens)

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
        model: str | None = None,
        continuing: bool = False,
        collectors: list[OutputCollector] | None = None,
    ) -> OutputCollector:
        """Hand a request's sequences to engines, `params.n` for each prompt. Must be closed.

        Args:
            priority, cache_salt, bad_words, truncation_side, thinking, deadline, tenant: See Submission.adds.
            grammar: What `grammar_options` returned for `params`.
            collectors: What is returned is added to these before anything is sent.
            model: An adapter's name; else it is the base model's.
            continuing: It belongs to a request that was taken before (see `keep_open`), so a drain lets it in.

        Raises:
            UnavailableError: No work is taken now.
            OverloadedError: Too many requests wait.
            RequestError: No engine could run it; nothing was started.
        """
        check_num_sequences(len(prompts), params.n)
        let_in = continuing and self._state.drains_on
        submission = self._submission if let_in and self._submission is not None else self.submission
        adapter = None if model is None else await self.adapters.find(model)
        options: dict[str, Any] = {
            "adapter": adapter,
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
            time_slice, adds, blocks = TimeSlice(), list[Add](), dict[int, list[bytes]]()
            for prompt in prompts:
                first, *forks = submission.adds(prompt, params, **options)
                adds += [first, *forks]
                blocks[first.id] = self._placement.blocks(first)
                await time_slice.offer()
            if not let_in:
                submission = self.submission  # raises if it has come to an end meanwhile
            if not continuing:
                self.admission_limit.enter(adds)
            able = self._engines.able
            placed = {add.id: self._placement.place(add, blocks[add.id], able) for add in adds if add.fork_of is None}
            engines = [placed[add.prompt_id] for add in adds]
            stats = [self.stats.engines[engine].start_sequence(add) for add, engine in zip(adds, engines, strict=True)]
            asked = params.structured_outputs
            collector = OutputCollector(adds, stats, None if asked is None else asked.name)
            if collectors is not None:
                collectors.append(collector)
            self._requests.add(collector, engines)
            await self._send(collector, time_slice)
        return collector

    async def _send(self, collector: OutputCollector, time_slice: TimeSlice) -> None:
        """Send sequences prompt by prompt. Between prompts, engines may be replaced and sequences may end."""
        try:
            for add in collector.adds:
                if add.fork_of is not None:
                    continue  # it travels with the first
                if (sequence := self._requests.get(add.id)) is not None:
                    self._engines[sequence.engine].send(add)
                await time_slice.offer()
        except BaseException:  # its reader has gone
            self.close_request(collector)
            raise

    def count_delivered(self, collector: OutputCollector, index: int, tokens: int) -> None:
        """Record that the reader has got `tokens` more tokens of one sequence."""
        stats = collector.stats[index]
        self._stats_of(stats).record_delivered(stats, tokens)

    def finish_sequence(self, collector: OutputCollector, index: int, reason: EndReason) -> None:
        """End a sequence of which the reader has everything, and abort it if its engine still runs it."""
        self._abort([collector.adds[index]])
        stats = collector.stats[index]
        self._stats_of(stats).finish_sequence(stats, reason, self._clock.now())

    def close_request(self, collector: OutputCollector, reason: EndReason = "abort") -> None:
        """Close a request whose reader is gone or has all that it wanted, and abort what still runs."""
        self._abort(collector.adds)
        now = self._clock.now()
        for stats in collector.stats:
            self._stats_of(stats).finish_sequence(stats, stats.end.reason if stats.end else reason, now)

    def fail_requests(self, collectors: Iterable[OutputCollector], error: QuireError, reason: EndReason) -> None:
        """Close these requests, and tell their readers why."""
        for collector in collectors:
            self.close_request(collector, reason)
            collector.fail(error)

    def _stats_of(self, sequence: SequenceStats) -> Stats:
        return self.stats.engines[sequence.engine]

    def _abort(self, adds: Sequence[Add]) -> None:
        running: dict[int, list[int]] = {}
        for add in adds:
            if (sequence := self._requests.get(add.id)) is not None:
                running.setdefault(sequence.engine, []).append(add.id)
        for engine, sequences in running.items():
            for number in sequences:
                self._requests.remove(number)
            self._engines[engine].connection.send(Abort(sequences))

    # --- what the engines say ---------------------------------------------------------------------------------------

    def on_engine_ready(self) -> None:
        """Record that an engine takes work: it has started, or has taken the place of one that died."""
        if (ready := self.ready) is None:
            return  # others are still loading
        if self._submission is None:
            self._submission = self._new_submission(ready)
        else:
            self._submission.replace_engine(ready)
        self.adapters.engine_ready(engine.connection for engine in self._engines)

    def on_engine_died(self, engine: int, in_flight: Sequence[int]) -> None:
        """Forget the cache of an engine that died, and move requests that it had not begun to engines that work."""
        self._placement.forget(engine)
        working = self._engines.working
        if not any(working):
            return
        for prompt in self._requests.unbegun(engine, in_flight):
            (add,) = replay_adds(prompt)
            number = self._placement.place(add, self._placement.blocks(add), working)
            for sequence in prompt:
                sequence.engine = number
                counted = sequence.collector.stats_of(sequence.add.id)
                self._stats_of(counted).move_sequence(counted, self.stats.engines[number])
            self._engines[number].connection.send(add)

    def on_engine_gone(self) -> None:
        """Fail all requests, because an engine is gone for good and the server ends with it."""
        self._dead.set()
        self.fail_requests(self._requests.collectors(), EngineDeadError(DEAD), "error")

    def _new_submission(self, ready: Ready) -> Submission:
        model = self._config.model
        seeds = random.SystemRandom()
        return Submission(
            self._number,
            ready,
            self._eos_ids,
            model.max_logprobs,
            self._config.scheduler.scheduling_policy,
            self._clock,
            lambda: seeds.getrandbits(64),
            takes_extra_args=bool(model.logits_processors),
        )
