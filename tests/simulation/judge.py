"""The judgement of what clients get: token by token against the model.

A client is right to expect: every token of its output in order and once, one end with the reason that follows from the
request, and an error only where something was planted that explains it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from quire.engine.input_processor import choice_seed
from quire.errors import (
    EngineDeadError,
    GenerationError,
    OverloadedError,
    QuireError,
    RequestTimeoutError,
    UnavailableError,
)
from quire.foundation.messages.from_engine import End
from quire.foundation.messages.workers import TokenLogprobs
from quire.serving.api.request_choices import RequestChoices
from quire.serving.api.session.output_collector import OutputCollector
from quire.text.deltas import ChoiceDelta, SequenceDelta
from tests.simulation.api_process import SimulatedApi
from tests.simulation.executor import NAN
from tests.simulation.model import END_OF_SEQUENCE, VOCAB_SIZE, Expected, expected_output, expected_vector
from tests.simulation.settings import Settings
from tests.simulation.traffic import Ask
from tests.simulation.world import World


@dataclass
class Excuses:
    """What was planted, and may explain an error that a request open at that time gets.

    Attributes:
        aborts: When something was done that may end requests with `abort`.
        errors: The same for an error.
        broken_rows: Rows that were broken and have not been seen as an error.
    """

    aborts: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    engine_deaths: list[float] = field(default_factory=list)
    broken_rows: int = 0
    draining: bool = False
    given_up: bool = False


@dataclass
class _Sequence:
    """What one sequence should bring, and how far it is."""

    expected: Expected
    tokens: int = 0
    prompt_logprobs: int = 0
    ended: bool = False


class Judge:
    """Judges everything that clients get.

    Args:
        world: Where a violation is reported.
        settings: Of the run.

    Attributes:
        open: Requests that have not ended, and when they came, by number.
        outcomes: How many requests ended in which way.
        excuses: What explains errors.
        turned_away: Whether the last one to end was.
        tokens: That clients got.
    """

    def __init__(self, world: World, settings: Settings) -> None:
        self._world = world
        self._settings = settings
        self.turned_away = False
        self.open: dict[int, Ask] = {}
        self.outcomes: dict[str, int] = {}
        self.excuses = Excuses()
        self.tokens = 0

    def arrived(self, ask: Ask) -> None:
        """A client connects."""
        self.open[ask.number] = ask

    def ended(self, ask: Ask, outcome: str) -> None:
        """A client has got its last message, or is cut off."""
        if self.open.pop(ask.number, None) is None:
            self._world.fail(f"request {ask.number} ended twice, the second time: {outcome}")
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        self.turned_away = outcome in ("overloaded", "refused")
        self._world.say(f"request {ask.number}: {outcome}")

    async def serve(self, ask: Ask, api: SimulatedApi) -> None:
        """The connection of one request, in the event loop of the API process."""
        answer = _Answer(self, ask, api)
        try:
            outcome = await answer.run()
        except asyncio.CancelledError:
            if not api.process.dead:
                self.ended(ask, "cancelled at the end")
            raise
        if not api.process.dead:
            self.ended(ask, outcome)

    def cut(self, waiting: Collection[Ask]) -> None:
        """The API process is dead, and so are its connections: all but those that it has not accepted."""
        still = {ask.number for ask in waiting}
        for ask in [ask for number, ask in self.open.items() if number not in still]:
            self.ended(ask, "cut")


class _Answer:
    """One request while it is answered."""

    def __init__(self, judge: Judge, ask: Ask, api: SimulatedApi) -> None:
        self._judge = judge
        self._world = judge._world
        self._ask = ask
        self._api = api
        self._arrival = self._world.now()
        self._sequences: list[_Sequence] = []
        self._choices: RequestChoices | None = None
        self._left = False

    async def run(self) -> str:
        """Until the end; which one it was."""
        ask, session = self._ask, self._api.session
        try:
            async with asyncio.timeout(ask.leaves_s):
                self._choices = RequestChoices(session, await self._add(), None)
                self._sequences = [_Sequence(self._expected(index)) for index in range(len(self._choices.adds))]
                await self._read_all(self._choices)
        except TimeoutError:
            self._left = True
        except OverloadedError:
            limit = session.admission_limit
            if not limit.sequences and not limit.tokens:
                self._fail("is turned away by an empty queue")
            return "overloaded"
        except UnavailableError as error:
            if self._choices is not None:
                return self._error(error)
            if session.state == "ready":
                self._fail("is refused by a server that is ready")
            return "refused"
        except QuireError as error:
            return self._error(error)
        finally:
            if self._choices is not None:
                self._choices.close()
        return "left" if self._left else "answered"

    async def _add(self) -> OutputCollector:
        ask = self._ask
        own: dict[str, Any] = {"grammar": ask.grammar} if ask.pooling is None else {"prompt_skip": ask.skip}
        return await self._api.session.add_request(
            ask.prompts,
            ask.pooling or ask.params,
            priority=ask.priority,
            cache_salt=ask.salt,
            **own,
            deadline=None if ask.timeout is None else self._arrival + ask.timeout,
            tenant=ask.tenant,
        )

    async def _read_all(self, choices: RequestChoices) -> None:
        def on_delta(index: int, delta: SequenceDelta) -> bool:
            if not self._left and delta.end is not None:
                self._check_vector(index, delta.end)
            if not self._left and (gained := choices.process(index, delta)) is not None:
                self._check(index, gained)
            return not choices.finished and not self._left and not self._ask.pause_s

        while not choices.finished and not self._left:
            for index, delta in await choices.read(on_delta):
                on_delta(index, delta)
            if self._ask.pause_s:
                await asyncio.sleep(self._ask.pause_s)

    # --- judgement --------------------------------------------------------------------------------------------------

    def _fail(self, what: str) -> None:
        self._world.fail(f"request {self._ask.number} {what}: {self._ask}")

    def _check_vector(self, index: int, end: End) -> None:
        """A text's vector comes with its end, and is the one that the model makes of the text."""
        ask = self._ask
        if ask.pooling is None or end.reason != "stop":
            if end.vector:
                self._fail(f"got a vector that nobody asked for, or that is not whole, in sequence {index}")
            return
        text = ask.prompts[index]
        first = self._judge._settings.first_visible(len(text) - 1)
        wanted = expected_vector(text, ask.pooling, ask.skip, first)
        if end.vector != wanted.tobytes() or end.vector_shape != list(wanted.shape):
            self._fail(f"got another vector than its text's in sequence {index}")

    def _expected(self, index: int) -> Expected:
        """What the sequence should bring, from the request alone."""
        ask, params = self._ask, self._ask.params
        if ask.pooling is not None:
            return Expected([], "stop")
        stop_ids = [*(() if params.ignore_eos else (END_OF_SEQUENCE,)), *(params.stop_token_ids or ())]
        seed = choice_seed(params.seed or 0, index % params.n)
        return expected_output(
            ask.prompts[index // params.n],
            seed,
            params,
            stop_ids,
            bool(ask.grammar),
            self._judge._settings.first_visible,
            has_states=self._judge._settings.num_states > 0,
        )

    def _check(self, index: int, gained: ChoiceDelta) -> None:
        """What a sequence gained has to be the next of what was expected."""
        sequence, ask = self._sequences[index], self._ask
        if sequence.ended:
            self._fail(f"gained something after the end of sequence {index}")
        begin, sequence.tokens = sequence.tokens, sequence.tokens + len(gained.tokens)
        wanted = sequence.expected.tokens[begin : sequence.tokens]
        if gained.tokens != wanted:
            self._fail(f"got tokens {gained.tokens} in sequence {index} from {begin} on, not {wanted}")
        self._judge.tokens += len(gained.tokens)
        self._check_logprobs(sequence, gained)
        if gained.finish_reason is not None:
            sequence.ended = True
            self._check_end(index, sequence, gained)
        if ask.leaves_after is not None and sequence.tokens >= ask.leaves_after:
            self._left = True

    def _check_logprobs(self, sequence: _Sequence, gained: ChoiceDelta) -> None:
        params = self._ask.params
        if params.num_reported is None:
            if gained.logprobs:
                self._fail("got log probabilities that nobody asked for")
        elif [entry.top_ids for entry in gained.logprobs] != [
            [(token + i) % VOCAB_SIZE for i in range(params.num_reported)] for token in gained.tokens
        ]:
            self._fail("got the log probabilities of other tokens")
        begin = sequence.prompt_logprobs
        sequence.prompt_logprobs += len(gained.prompt_logprobs)
        got = [entry.logprob for entry in gained.prompt_logprobs if isinstance(entry, TokenLogprobs)]
        if got != [-float(place) for place in range(begin + 1, sequence.prompt_logprobs + 1)]:
            self._fail(f"got its prompt's log probabilities {got} from {begin} on")

    def _check_end(self, index: int, sequence: _Sequence, gained: ChoiceDelta) -> None:
        reason, expected = gained.finish_reason, sequence.expected
        if reason == "abort":
            if not self._excused(self._judge.excuses.aborts):
                self._fail(f"was aborted in sequence {index}")
            return
        if gained.stop_reason == "timeout":
            if self._ask.timeout is None or self._world.now() < self._arrival + self._ask.timeout:
                self._fail(f"timed out too early in sequence {index}")
            return
        if reason != expected.reason or sequence.tokens != len(expected.tokens):
            self._fail(f"ended with {reason} after {sequence.tokens} tokens in sequence {index}, not {expected}")
        wants = self._ask.params.prompt_logprobs is not None and index % self._ask.params.n == 0
        prompt = self._ask.prompts[index // self._ask.params.n]
        if sequence.prompt_logprobs != (len(prompt) - 1 if wants else 0):
            self._fail(f"got {sequence.prompt_logprobs} of its prompt's log probabilities in sequence {index}")

    def _error(self, error: QuireError) -> str:
        """An error needs an excuse."""
        excuses, name = self._judge.excuses, type(error).__name__
        match error:
            case RequestTimeoutError():
                deadline = self._arrival + (self._ask.timeout or float("inf"))
                if self._world.now() < deadline or any(sequence.tokens for sequence in self._sequences):
                    self._fail("timed out too early, or with output")
                return "timed out"
            case UnavailableError() if excuses.draining:
                return "refused at the end"
            case EngineDeadError() if excuses.given_up:
                return "engine given up"
            case GenerationError() if error.message == NAN:
                excuses.broken_rows -= 1
                if excuses.broken_rows < 0:
                    self._fail("failed for a row that was not broken")
                return "row broken"
            case GenerationError() if "each time it worked" in error.message:
                deaths = sum(when >= self._arrival for when in excuses.engine_deaths)
                if deaths < 3:
                    self._fail(f"is blamed for {deaths} deaths")
                return "poison found" if self._ask.is_poison else "blamed"
            case GenerationError() if error.message == "The grammar is broken.":
                return "grammar broken"
            case GenerationError() if self._excused(excuses.errors):
                return "message corrupted"
        self._fail(f"failed with {name}: {error.message}")
        return "failed"

    def _excused(self, times: list[float]) -> bool:
        """Whether something that explains this was done while the request was open."""
        return any(when >= self._arrival for when in times)
