"""The API process's side of the engines: requests go in, output goes to their readers.

Owns which requests are open. Every accepted sequence gets exactly one end. Knows nothing about HTTP or text. On the way
of a request:

- `queues.py`: which requests are turned away, and which engine a prompt goes to.
- `open_requests.py`: what is open, its output until its reader takes it, and what becomes of it when an engine dies.
- `engines.py`: one engine with its requests, and all together; `connection.py`: state, health and commands of one.
- `receivers.py`: how messages get from an engine into the event loop.
- `state.py`: whether requests are taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quire.engine.client import EngineClient
from quire.engine.input_processor import InputProcessor
from quire.engine.metrics.server_stats import ServerStats
from quire.engine.metrics.stats import SequenceStats, Stats
from quire.engine.structured_output.messages import LenientSchema
from quire.errors import EngineDeadError, QuireError, RequestError, UnavailableError
from quire.foundation.clock import Clock, SystemClock
from quire.foundation.config import Config
from quire.foundation.messages.from_engine import Done, EndReason, Ready
from quire.foundation.messages.to_engine import Abort, Add
from quire.foundation.processes.launch import SendReport
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams
from quire.serving.api.adapters import ServedAdapters
from quire.serving.api.grammar_checks import GrammarChecks
from quire.serving.api.peers import CountOpen, EnginesPaused, Peers
from quire.serving.api.request_work import TimeSlice
from quire.serving.api.session.connection import DEAD, changes_pause
from quire.serving.api.session.engines import Engine, Engines
from quire.serving.api.session.open_requests import OpenRequests, replay_adds
from quire.serving.api.session.output_collector import OutputCollector
from quire.serving.api.session.queues import AdmissionLimit, Placement, QueueLimits
from quire.serving.api.session.receivers import MakeReceiver, ThreadReceiver
from quire.serving.api.session.state import REFUSALS, SessionState, State

MAX_SEQUENCES = 1_024
"""Maximum number of sequences of one request: prompts times n."""


def check_num_sequences(num_prompts: int, n: int, param: str = "n") -> None:
    """Raises RequestError about the field `param` if a request asks for more than MAX_SEQUENCES sequences."""
    if num_prompts * n > MAX_SEQUENCES:
        raise RequestError(f"A request may ask for at most {MAX_SEQUENCES} sequences (prompts × n).", param=param)


def _adds(
    input_processor: InputProcessor,
    prompt: Sequence[int],
    params: SamplingParams | PoolingParams,
    options: Mapping[str, Any],
    own: Mapping[str, Any],
) -> list[Add]:
    if isinstance(params, PoolingParams):
        return input_processor.pooled(prompt, params, **options, **own)
    return input_processor.adds(prompt, params, **options, **own)


class EngineSession:
    """The engines, shared by all requests of this process. Everything runs in the event loop.

    `report` is told how the recovery from an engine's death goes; without `peers` this is the only API process.
    Messages fill `stats` as they pass.
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
        self.requests = OpenRequests()
        limits, buckets = QueueLimits.of(config.scheduler), config.observability.custom_histogram_buckets
        self.engines = Engines(
            Engine(client, limits.slots, self.requests, self, self._clock, report, make_receiver, buckets)
            for client in clients
        )
        self.status = SessionState(self.engines)
        self.stats = ServerStats([engine.stats for engine in self.engines])
        queues = [engine.queue for engine in self.engines]
        self.admission_limit = AdmissionLimit(
            limits, queues, self.stats.rejections, self._clock, lambda: self.requests.num_requests
        )
        self._placement = Placement(queues, config.cache.block_size, self._clock)
        self._peers = peers or Peers()
        self._peers.on(CountOpen, lambda question: self.counts())
        self._peers.on(EnginesPaused, lambda news: self.engines.remember(news.action))
        self.adapters = ServedAdapters(config.lora, self.engines, self._peers)
        self._input_processor: InputProcessor | None = None
        self.grammars = GrammarChecks(special_tokens, has_tokenizer=not config.model.skip_tokenizer_init)
        self._adding = asyncio.Lock()
        self._dead = asyncio.Event()

    # --- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to receive; called in the event loop. More calls do nothing."""
        self._peers.open()  # before engines say what there is: what is new later is said by the others
        self.engines.start()

    async def wait_ready(self) -> Ready:
        """Wait for each engine to be ready, and return what all can do; raises EngineDeadError if one dies."""
        return await self.engines.wait_ready()

    async def wait_dead(self) -> None:
        """Wait until an engine is dead and is not replaced."""
        await self._dead.wait()

    def begin_drain(self) -> None:
        """Take no new work. Open requests go on, also those that a pause has stopped."""
        self.status.drain()
        if not self.status.closed:
            self.engines.end_pause()

    async def drain(self, timeout: float) -> bool:
        """Wait until open requests have ended, and fail those that are open after `timeout` seconds. Returns whether
        all ended by themselves.

        During --shutdown-delay, which comes first, `/ready` says no, and work that arrives nevertheless is taken.
        """
        if self.status.closed:
            return True
        self.status.announce_shutdown()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.wait_dead(), self._config.server.shutdown_delay)
        self.begin_drain()
        try:
            async with asyncio.timeout(timeout):
                await self.requests.wait_idle()
        except TimeoutError:
            self._fail_all()
            return False
        return True

    def begin_swap(self) -> None:
        """Announce that another model takes this one's place, and resume engines so that open requests can end."""
        self.status.announce_swap()
        self.engines.end_pause()

    def retire(self) -> None:
        """Take no new work and end what is open, because another model has taken this one's place."""
        self.status.retire()
        self.begin_drain()
        self._fail_all()

    async def close(self) -> None:
        """Stop receiving and disconnect from the engines. More calls do nothing."""
        if self.status.closed:
            return
        self.status.closed = True
        self._fail_all()
        await self.engines.close()
        self._peers.close()
        self.grammars.close()

    def _fail_all(self) -> None:
        why = UnavailableError(REFUSALS[self.status.ending])
        self.fail_requests(self.requests.collectors(), why, "abort")

    # --- state ------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """The server's state, such as `ready` or `draining`."""
        return self.status.current

    @property
    def ready(self) -> Ready | None:
        """What all engines can do and hold together; None until each of them has been ready."""
        return self.engines.ready

    @property
    def num_sequences(self) -> int:
        return self.requests.num_sequences

    def counts(self) -> dict[str, int]:
        """What this process holds, for leak tests; called in the event loop."""
        return {
            "sequences": self.num_sequences,
            "streams": len(self.requests.collectors()),
            "controls": self.engines.num_controls,
            "tasks": len(asyncio.all_tasks()),
        }

    async def counts_of_all(self) -> dict[str, int]:
        """Add up the `counts` of all API processes that answer."""
        own = self.counts()
        others = await self._peers.ask(CountOpen())
        return {name: value + sum(other[name] for other in others) for name, value in own.items()}

    async def control(self, action: str) -> Done:
        """Send all engines a command and wait for their answers; raises UnavailableError if none could answer."""
        if self.status.draining and action.startswith("pause:"):
            raise UnavailableError(REFUSALS["draining"])
        if changes_pause(action) and self.engines.state == "ready":
            self._peers.tell(EnginesPaused(action))
        return await self.engines.control(action)

    # --- requests ---------------------------------------------------------------------------------------------------

    @property
    def input_processor(self) -> InputProcessor:
        """Checks and limits of the engines; raises UnavailableError if no work is taken now."""
        if self._input_processor is None or not self.status.takes_requests:
            raise UnavailableError(self.status.refusal)
        return self._input_processor

    def refuse_if_full(self, *, is_retry: bool) -> None:
        """Raises OverloadedError if the queue is full, before a request is read."""
        if self.state == "ready":
            self.admission_limit.refuse_if_full(is_retry=is_retry)

    def check_room(self, sequences: int, tokens: int) -> None:
        """Refuse a request of at least so many sequences and tokens before anything is done for it: raises
        OverloadedError if the queue has no room, UnavailableError if no work is taken now. A request that could never
        run gets another error before."""
        _ = self.input_processor  # raises if no work is taken
        self.admission_limit.check(sequences, tokens)

    def checked_adds(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, options: Mapping[str, Any]
    ) -> list[Add]:
        """Check prompts as `add_request` does, and send nothing. Returns the first Add of each prompt."""
        options = {name: value for name, value in options.items() if name not in ("collectors", "lenient", "model")}
        return [self.input_processor.adds(prompt, params, **options)[0] for prompt in prompts]

    async def add_request(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | PoolingParams,
        *,
        model: str | None = None,
        tenant: str = "",
        cache_salt: str = "",
        continuing: bool = False,
        collectors: list[OutputCollector] | None = None,
        per_prompt: Sequence[Mapping[str, Any]] = (),
        lenient: Sequence[LenientSchema] = (),
        part_of: OutputCollector | None = None,
        **options: Any,
    ) -> OutputCollector:
        """Hand a request's sequences to engines, `params.n` for each prompt, or one for each text that is pooled. Must
        be closed.

        Args:
            model: The name of an adapter or of the base model; None for the base model.
            tenant, cache_salt, options: Arguments of InputProcessor.adds, among them the grammar from
                `grammars.options`, or of InputProcessor.pooled.
            per_prompt: Further such arguments of each prompt, such as `token_types`.
            continuing: The request is part of one that was taken before (`requests.keep_open`), so a drain lets it in.
            collectors: Gets the collector before anything is sent.
            lenient: Schemas that finished outputs must be checked against, from `grammars.options`.
            part_of: The first part of the client's request that this is another part of.

        Raises:
            UnavailableError: No work is taken now.
            OverloadedError: Too many requests wait.
            RequestError: No engine could run it; nothing was started.
        """
        if isinstance(params, SamplingParams):
            check_num_sequences(len(prompts), params.n)
        let_in = continuing and self.status.drains_on
        input_processor = (self._input_processor if let_in else None) or self.input_processor
        options |= {
            "adapter": None if model is None else await self.adapters.find(model),
            "tenant": tenant,
            "cache_salt": f"{tenant}/{cache_salt}" if self._config.server.cache_isolation else cache_salt,
        }
        async with self._adding:  # ids are in the order in which they are sent
            time_slice, adds, blocks = TimeSlice(), list[Add](), dict[int, list[bytes]]()
            for place, prompt in enumerate(prompts):
                first, *forks = _adds(input_processor, prompt, params, options, per_prompt[place] if per_prompt else {})
                adds += [first, *forks]
                blocks[first.id] = self._placement.blocks(first)
                await time_slice.offer()
            if not let_in:
                _ = self.input_processor  # raises if no work is taken any more
            if not continuing:
                self.admission_limit.enter(adds)
            collector = self._open(adds, blocks, params, lenient, part_of)
            if collectors is not None:
                collectors.append(collector)
            await self._send(collector, time_slice)
        return collector

    def _open(
        self,
        adds: Sequence[Add],
        blocks: Mapping[int, Sequence[bytes]],
        params: SamplingParams | PoolingParams,
        lenient: Sequence[LenientSchema],
        part_of: OutputCollector | None,
    ) -> OutputCollector:
        """Place each prompt on an engine; its sequences are open from now on."""
        form = params.structured_outputs if isinstance(params, SamplingParams) else None
        able = self.engines.able
        placed = {add.id: self._placement.place(add, blocks[add.id], able) for add in adds if add.fork_of is None}
        engines = [placed[add.prompt_id] for add in adds]
        stats = [self.stats.engines[engine].start_sequence(add) for add, engine in zip(adds, engines, strict=True)]
        collector = OutputCollector(adds, stats, None if form is None else form.name, lenient, part_of)
        self.requests.add(collector, engines)
        return collector

    async def _send(self, collector: OutputCollector, time_slice: TimeSlice) -> None:
        """Send sequences prompt by prompt. Between prompts, engines may be replaced and sequences may end."""
        try:
            for add in collector.adds:
                if add.fork_of is not None:
                    continue  # it travels with the first
                if (sequence := self.requests.get(add.id)) is not None:
                    self.engines[sequence.engine].send(add)
                await time_slice.offer()
        except BaseException:  # its reader has gone
            self.close_request(collector)
            raise

    def count_delivered(self, collector: OutputCollector, index: int, tokens: int) -> None:
        """Record that the reader has got `tokens` more tokens of one sequence."""
        stats = collector.stats[index]
        self._stats_of(stats).record_delivered(stats, tokens)

    def finish_sequence(self, collector: OutputCollector, index: int, reason: EndReason) -> None:
        """End a sequence whose reader has everything, and abort it if its engine still runs it."""
        self._abort([collector.adds[index]])
        stats = collector.stats[index]
        self._stats_of(stats).finish_sequence(stats, reason, self._clock.now())

    def refuse_output(self, collector: OutputCollector, index: int) -> None:
        """End a sequence whose finished output is not valid, and count that."""
        stats = collector.stats[index]
        self._stats_of(stats).schema_misses += 1
        self._stats_of(stats).finish_sequence(stats, "error", self._clock.now())

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
            if (sequence := self.requests.get(add.id)) is not None:
                running.setdefault(sequence.engine, []).append(add.id)
        for engine, sequences in running.items():
            for number in sequences:
                self.requests.remove(number)
            self.engines[engine].connection.send(Abort(sequences))

    # --- what the engines say ---------------------------------------------------------------------------------------

    def on_engine_ready(self) -> None:
        """Learn what the engines can do, once each has been ready."""
        if (ready := self.ready) is None:
            return  # others are still loading
        if self._input_processor is None:
            model, seeds = self._config.model, random.SystemRandom()
            self._input_processor = InputProcessor(
                self._number,
                ready,
                self._eos_ids,
                model.max_logprobs,
                self._config.scheduler.scheduling_policy,
                self._clock,
                lambda: seeds.getrandbits(64),
                takes_extra_args=bool(model.logits_processors),
            )
        else:
            self._input_processor.replace_engine(ready)
        self.adapters.engine_ready()

    def on_engine_died(self, engine: int, in_flight: Sequence[int]) -> None:
        """Forget the cache of an engine that died, and move requests that it had not begun to engines that work."""
        self._placement.forget(engine)
        working = self.engines.working
        if not any(working):
            return
        for prompt in self.requests.unbegun(engine, in_flight):
            (add,) = replay_adds(prompt)
            number = self._placement.place(add, self._placement.blocks(add), working)
            for sequence in prompt:
                sequence.engine = number
                counted = sequence.collector.stats_of(sequence.add.id)
                self._stats_of(counted).move_sequence(counted, self.stats.engines[number])
            self.engines[number].connection.send(add)

    def on_engine_gone(self) -> None:
        """Fail all requests, because an engine is gone for good and the server ends with it."""
        self._dead.set()
        self.fail_requests(self.requests.collectors(), EngineDeadError(DEAD), "error")
