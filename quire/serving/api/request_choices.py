"""All choices of one HTTP request, read until the last one has ended. Knows no response format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.errors import SchemaMismatchError
from quire.foundation.messages.from_engine import EndReason
from quire.serving.api.chat_parsers import ChoiceParser, OutputParsing
from quire.serving.api.finished_values import FinishedValues
from quire.serving.api.schemas.known_fields import AS_THEY_ARE, FieldNames, fields_named
from quire.serving.api.session.output_collector import OnDelta, OutputCollector
from quire.serving.api.session.session import EngineSession
from quire.text.deltas import ChoiceDelta, SequenceDelta
from quire.text.text_stream import ChoiceState
from quire.text.tokenizer import Tokenizer


class RequestChoices:
    """All choices of one request. Without a tokenizer they are token ids only; `parsing` makes content, reasoning and
    tool calls of text, or None content alone. If `show_output` is false, only the prompts count. `names` are the
    client's names of fields, for errors; `collector` is what the session fills."""

    def __init__(
        self,
        session: EngineSession,
        collector: OutputCollector,
        tokenizer: Tokenizer | None,
        *,
        parsing: OutputParsing | None = None,
        show_output: bool = True,
        names: FieldNames = AS_THEY_ARE,
    ) -> None:
        self._session = session
        self._show_output = show_output
        self.collector = collector
        self._names = names
        self.adds = collector.adds
        shown = parsing.shown_tokens if parsing else frozenset[int]()
        self.states = [ChoiceState(add, tokenizer, shown) for add in collector.adds]
        self._parsers = [ChoiceParser(parsing) for _ in collector.adds] if parsing else None
        self._values = FinishedValues(session.grammars, collector) if collector.lenient else None
        self._num_open = len(self.states)
        self.prompt_tokens = sum(add.prompt_len for add in collector.adds[:: collector.adds[0].sampling.n])

    @property
    def prompts(self) -> list[list[int]]:
        """The token ids of each prompt, as the engine got them."""
        return [add.tokens[: add.prompt_len] for add in self.adds[:: self.adds[0].sampling.n]]

    @property
    def completion_tokens(self) -> int:
        """Tokens of all choices so far; 0 where only the prompts are wanted."""
        return self._show_output * sum(state.num_tokens for state in self.states)

    @property
    def first_token(self) -> float | None:
        """When the first choice's first token came, by the session's clock; None before."""
        return self.collector.stats[0].first_token

    def close(self) -> None:
        """Abort what still runs."""
        self._session.close_request(self.collector)

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return self._num_open == 0

    async def read(self, on_delta: OnDelta) -> list[tuple[int, SequenceDelta]]:
        """Wait for output, see OutputCollector.read, or for a finished value to be checked."""
        with fields_named(self._names):
            if (values := self._values) is None:
                return await self.collector.read(on_delta)
            if values.waiting:
                return [(await self._checked(values), SequenceDelta())]
            return await self.collector.read(lambda index, delta: on_delta(index, delta) and not values.waiting)

    def process(self, index: int, delta: SequenceDelta) -> ChoiceDelta | None:
        """What a choice gained; None when it had ended before."""
        state = self.states[index]
        if state.finished:
            end = None if self._values is None else self._values.take_end(index)
            return None if end is None else self._ended(index, end)
        gained = state.process(delta)
        if not self._show_output:
            gained = ChoiceDelta(prompt_logprobs=gained.prompt_logprobs, finish_reason=gained.finish_reason)
        self._session.count_delivered(self.collector, index, len(gained.tokens))
        if self._parsers is not None:
            self._parsers[index].parse(gained)
            state.finished = gained.finish_reason is not None
        if self._values is not None and self._values.holds_end(index, gained):
            return gained
        return gained if gained.finish_reason is None else self._ended(index, gained)

    def _ended(self, index: int, last: ChoiceDelta) -> ChoiceDelta:
        self._num_open -= 1
        self._session.finish_sequence(self.collector, index, _end_reason(last))
        return last

    async def _checked(self, values: FinishedValues) -> int:
        index = values.next
        try:
            await values.check(index)
        except SchemaMismatchError:
            self._session.refuse_output(self.collector, index)
            raise
        return index

    async def wait(self) -> None:
        """Wait for output if the request has a deadline; raises a QuireError if the request failed before."""
        if self.adds[0].deadline is not None:
            with fields_named(self._names):
                await self.collector.wait()

    async def collect(self) -> list[ChoiceDelta]:
        """Every choice as a whole; raises a QuireError if the request failed."""
        whole = [ChoiceDelta() for _ in self.states]
        await self.read_all(lambda index, gained: whole[index].add(gained))
        return whole

    async def read_all(self, on_gained: Callable[[int, ChoiceDelta], None]) -> None:
        """Hand over what each choice gains until the last one has ended; raises a QuireError if the request failed."""

        def on_delta(index: int, delta: SequenceDelta) -> bool:
            if (gained := self.process(index, delta)) is not None:
                on_gained(index, gained)
            return not self.finished

        while not self.finished:
            for index, delta in await self.read(on_delta):
                on_delta(index, delta)

    def usage_of(self, index: int, num_tokens: int | None = None) -> dict[str, int]:
        """Token counts of one choice with so many tokens, and of its prompt; None for all of its tokens."""
        completion_tokens = self.states[index].num_tokens if num_tokens is None else num_tokens
        return usage_field(self.collector.adds[index].prompt_len, completion_tokens * self._show_output)

    def usage(self) -> dict[str, Any]:
        """OpenAI's token counts. Of a prompt with several choices, the first one's cached tokens count."""
        cached = sum(state.cached_tokens for state in self.states[:: self.collector.adds[0].sampling.n])
        counts = usage_field(self.prompt_tokens, self.completion_tokens)
        reasoning = sum(parser.reasoning_tokens for parser in self._parsers or ())
        return {
            **counts,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": reasoning},
        }

    def metrics(self) -> dict[str, float | None]:
        """The times of the request in milliseconds, by vLLM's names; None for what is not known. With several choices,
        they are the first one's."""
        stats = self.collector.stats[0]
        first, last, tokens = stats.first_token, stats.last_token, stats.received
        generating = None if first is None else last - first
        return {
            "time_to_first_token_ms": _ms(None if first is None else first - stats.arrival),
            "generation_time_ms": _ms(generating),
            "queue_time_ms": _ms(None if stats.end is None else stats.end.queued_s),
            "mean_itl_ms": _ms(generating / (tokens - 1) if generating is not None and tokens > 1 else None),
            "tokens_per_second": round((tokens - 1) / generating, 3) if generating and tokens > 1 else None,
        }


def usage_field(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """OpenAI's `usage`."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


def _end_reason(last: ChoiceDelta) -> EndReason:
    assert last.finish_reason is not None
    if last.finish_reason == "length" and last.stop_reason == "timeout":
        return "timeout"
    return "stop" if last.finish_reason == "tool_calls" else last.finish_reason
