"""The API process's side of the engine: requests go in, output goes to who waits for it.

Owns the server's state, heartbeats, drain and health. Every accepted sequence gets exactly one end. Knows nothing about
HTTP or text.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Literal

from quire.api.engine_controls import EngineControls
from quire.api.engine_health import EngineHealth
from quire.api.engine_receiver import EngineReceiver
from quire.api.open_requests import OpenRequests
from quire.api.output_collector import OutputCollector
from quire.clock import Clock, SystemClock
from quire.config import Config
from quire.engine.client import EngineClient, Lost
from quire.engine.submission import Submission
from quire.errors import EngineDeadError, GenerationError, QuireError, RequestError, UnavailableError
from quire.messages import (
    Abort,
    Add,
    ClientHeartbeat,
    Dead,
    Deltas,
    Done,
    EndReason,
    FromEngine,
    Heartbeat,
    Ready,
)
from quire.metrics.stats import Stats
from quire.sampling import SamplingParams
from quire.structured_output.checker import MAX_HELPERS, GrammarChecker
from quire.text.deltas import deltas_by_sequence

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
MAX_SEQUENCES = 1_024
"""Of one request: prompts times n."""
State = Literal["starting", "ready", "draining", "dead"]

_REFUSALS: dict[State, str] = {
    "starting": "The server is still loading the model. Send the request again in a few seconds.",
    "draining": "The server is shutting down. Send the request to another one, or again later.",
    "dead": "The engine has stopped. Send the request again later.",
}


def check_num_sequences(num_prompts: int, n: int, param: str = "n") -> None:
    """Refuse a request of too many sequences, naming the field `param`.

    Raises:
        RequestError: There are more than MAX_SEQUENCES.
    """
    if num_prompts * n > MAX_SEQUENCES:
        raise RequestError(f"A request may ask for at most {MAX_SEQUENCES} sequences (prompts × n).", param=param)


class EngineSession:
    """One engine, shared by all requests of this process. Everything but the receiving runs in the event loop.

    Args:
        client: The way to the engine.
        config: Resolved settings.
        eos_ids: The model's end-of-sequence tokens.
        clock: For all times.
        special_tokens: The model's, by text.

    Attributes:
        state: starting → ready → draining → dead.
        ready: What the engine said when it was ready.
        stats: Filled as messages pass.
    """

    def __init__(
        self,
        client: EngineClient,
        config: Config,
        eos_ids: Sequence[int],
        clock: Clock | None = None,
        special_tokens: Mapping[str, int] | None = None,
    ) -> None:
        self.state: State = "starting"
        self.ready: Ready | None = None
        self.stats = Stats()
        self._client = client
        self._config = config
        self._eos_ids = eos_ids
        self._clock = clock or SystemClock()
        self._submission: Submission | None = None
        self._requests = OpenRequests()
        self._controls = EngineControls(client)
        self._health = EngineHealth(self._clock)
        self._receiver = EngineReceiver(client, self._on_message)
        self._ready_event, self._dead_event = asyncio.Event(), asyncio.Event()
        self._grammars = GrammarChecker(special_tokens)
        self._checking = ThreadPoolExecutor(MAX_HELPERS, thread_name_prefix="grammar")
        self._closing = False
        self._heartbeats: asyncio.Task[None] | None = None

    # --- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to receive; called in the event loop. More calls do nothing."""
        if self._heartbeats is None:
            self._receiver.start()
            self._heartbeats = asyncio.get_running_loop().create_task(self._send_heartbeats())

    async def wait_ready(self) -> Ready:
        """The engine's Ready.

        Raises:
            EngineDeadError: It died instead.
        """
        await self._ready_event.wait()
        if self.ready is None:
            raise EngineDeadError(_REFUSALS["dead"])
        return self.ready

    async def wait_dead(self) -> None:
        """Until a Dead has come, from the engine or from the supervisor."""
        await self._dead_event.wait()

    def begin_drain(self) -> None:
        """Take no new work; open requests go on."""
        if self.state in ("starting", "ready"):
            self.state = "draining"

    async def drain(self, timeout: float) -> bool:
        """Wait until open requests have ended; after `timeout` seconds fail those that have not. Returns whether all
        ended by themselves."""
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
        if self._heartbeats is not None:
            self._heartbeats.cancel()
            await asyncio.wait([self._heartbeats])
        await self._receiver.close()
        self._client.close()
        self._checking.shutdown(wait=False, cancel_futures=True)
        self._grammars.close()

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
        if self._submission is None or self.state != "ready":
            raise UnavailableError(_REFUSALS["starting" if self.state == "ready" else self.state])
        return self._submission

    async def grammar_options(self, params: SamplingParams) -> dict[str, Any]:
        """What `add_request` needs for `params.structured_outputs`, if there are any: their grammar, checked.

        Raises:
            RequestError: They cannot be honoured; the message names the field.
            UnavailableError: Too many are being checked.
        """
        asked = params.structured_outputs
        if asked is None:
            return {}
        if self._config.model.skip_tokenizer_init:
            raise asked.error("this server has no tokenizer: start it without --skip-tokenizer-init.")
        grammar = self._grammars.known(asked)
        if grammar is None:
            loop = asyncio.get_running_loop()
            grammar = await loop.run_in_executor(self._checking, self._grammars.grammar, asked)
        return {"grammar": grammar}

    def add_request(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        bad_words: Sequence[Sequence[int]] = (),
        truncation_side: Literal["left", "right"] = "left",
        grammar: str = "",
        grammar_after: Sequence[int] = (),
        continuing: bool = False,
    ) -> OutputCollector:
        """Hand a request's sequences to the engine, `params.n` for each prompt. Must be closed.

        Args:
            priority, cache_salt, bad_words, truncation_side, grammar_after: See Submission.adds.
            grammar: What `grammar_options` returned for `params`.
            continuing: It belongs to a request that was taken before (see `keep_open`), so a drain lets it in.

        Raises:
            UnavailableError: No work is taken now.
            RequestError: The engine could not run it; nothing was started.
        """
        let_in = continuing and self.state == "draining" and not self._closing
        submission = self._submission if let_in and self._submission is not None else self.submission
        check_num_sequences(len(prompts), params.n)
        options: dict[str, Any] = {
            "priority": priority,
            "cache_salt": cache_salt,
            "bad_words": bad_words,
            "truncation_side": truncation_side,
            "grammar": grammar,
            "grammar_after": grammar_after,
        }
        adds = [add for prompt in prompts for add in submission.adds(prompt, params, **options)]
        collector = OutputCollector(adds, [self.stats.start_sequence(add) for add in adds])
        self._requests.add(collector)
        for add in adds:
            if add.fork_of is None:  # forks travel with the first
                self._client.send(add)
        return collector

    def count_delivered(self, collector: OutputCollector, index: int, tokens: int) -> None:
        """The reader has got so many more tokens of one sequence."""
        self.stats.record_delivered(collector.stats[index], tokens)

    def finish_sequence(self, collector: OutputCollector, index: int, reason: EndReason) -> None:
        """The reader has all of one sequence; if the engine still runs it, it is aborted."""
        self._abort([collector.adds[index]])
        self.stats.finish_sequence(collector.stats[index], reason, self._clock.now())

    def close_request(self, collector: OutputCollector, reason: EndReason = "abort") -> None:
        """The reader is gone or has all that it wanted; what still runs is aborted."""
        self._abort(collector.adds)
        now = self._clock.now()
        for sequence in collector.stats:
            self.stats.finish_sequence(sequence, sequence.end.reason if sequence.end else reason, now)

    def _abort(self, adds: Sequence[Add]) -> None:
        running = [add.id for add in adds if add.id in self._requests]
        for sequence in running:
            self._requests.remove(sequence)
        if running and self.state != "dead":
            self._client.send(Abort(running))

    async def control(self, action: str) -> Done:
        """Send the engine a command and wait for its answer.

        Raises:
            UnavailableError: There is no engine that could answer.
        """
        if self.ready is None or self.state == "dead":
            raise UnavailableError(_REFUSALS["dead" if self.state == "dead" else "starting"])
        return await self._controls.send(action)

    # --- state ------------------------------------------------------------------------------------------------------

    @property
    def healthy(self) -> bool:
        """Whether work is taken and the engine makes progress."""
        return self.state == "ready" and self._health.progressing

    @property
    def num_sequences(self) -> int:
        """Sequences that have not ended."""
        return self._requests.num_sequences

    def counts(self) -> dict[str, int]:
        """What is held, for leak tests; asked in the event loop."""
        return {
            "sequences": self.num_sequences,
            "streams": len(self._requests.all()),
            "controls": len(self._controls),
            "tasks": len(asyncio.all_tasks()),
        }

    # --- messages from the engine -----------------------------------------------------------------------------------

    def _on_message(self, message: FromEngine | Lost) -> None:
        match message:
            case Deltas():
                self._on_deltas(message, self._clock.now())
            case Heartbeat():
                self._health.record_progress(message.last_progress)
                self.stats.record_heartbeat(message)
            case Ready():
                self._on_ready(message)
            case Done():
                self._controls.on_done(message)
            case Dead():
                self._on_dead(message)
            case Lost():
                self._on_lost(message)

    def _on_ready(self, ready: Ready) -> None:
        if self.ready is not None:
            return
        self.ready = ready
        model = self._config.model
        seeds = random.SystemRandom()
        self._submission = Submission(
            self._client.number,
            ready,
            self._eos_ids,
            model.max_logprobs,
            self._config.scheduler.scheduling_policy,
            self._clock,
            lambda: seeds.getrandbits(64),
            takes_extra_args=bool(model.logits_processors),
        )
        self.stats.set_max_model_len(ready.max_model_len)
        self._health.record_progress(self._clock.now())
        if self.state == "starting":
            self.state = "ready"
        self._ready_event.set()

    def _on_deltas(self, deltas: Deltas, now: float) -> None:
        self._health.record_progress(now)
        self.stats.load = deltas.load
        for sequence, delta in deltas_by_sequence(deltas).items():
            collector = self._requests.get(sequence)
            if collector is None:
                continue
            stats = collector.stats_of(sequence)
            self.stats.record_tokens(stats, len(delta.tokens), now, delta.cached_tokens)
            if delta.end is not None:  # first, because the reader may close the request when it gets the end
                stats.end = delta.end
                self._requests.remove(sequence)
                if delta.end.reason == "error":
                    message = delta.end.message or "The engine could not go on with this request."
                    collector.fail(GenerationError(message))
                    continue
            collector.put(sequence, delta)

    def _on_lost(self, message: Lost) -> None:
        """It may have been about any open request, or have been the engine's Ready."""
        if self.ready is None:
            self._on_dead(Dead(message.reason))
            return
        error = GenerationError("A message of the engine was lost. Send the request again.")
        self._fail_all(error, "error")
        self._controls.fail_all(error)

    def _on_dead(self, message: Dead) -> None:
        logger.error("The engine stopped: %s", message.cause)
        self.state = "dead"
        self._ready_event.set()
        self._dead_event.set()
        self._fail_all(EngineDeadError(_REFUSALS["dead"]), "error")
        self._controls.fail_all(EngineDeadError(_REFUSALS["dead"]))

    def _fail_all(self, error: QuireError, reason: EndReason) -> None:
        for collector in self._requests.all():
            self.close_request(collector, reason)
            collector.fail(error)

    async def _send_heartbeats(self) -> None:
        while not self._closing and self.state != "dead":
            self._client.send(ClientHeartbeat(self._client.number))
            await asyncio.sleep(HEARTBEAT_S)
