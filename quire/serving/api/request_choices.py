"""All choices of one HTTP request, read until the last one has ended. Knows no response format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.foundation.messages.from_engine import EndReason
from quire.serving.api.chat_parsers import ChoiceParser, OutputParsing
from quire.serving.api.schemas.known_fields import AS_THEY_ARE, FieldNames, fields_named
from quire.serving.api.session.output_collector import OnDelta, OutputCollector
from quire.serving.api.session.session import EngineSession
from quire.text.deltas import ChoiceDelta, SequenceDelta
from quire.text.text_stream import ChoiceState
from quire.text.tokenizer import Tokenizer


class RequestChoices:
    """All choices of one request. Without a tokenizer they are token ids only; `parsing` makes content, reasoning and
    tool calls of text, or None content alone. If `show_output` is false, only the prompts count. `names` are the
    client's names of fields, for errors."""

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
        self._collector = collector
        self._names = names
        self.adds = collector.adds
        shown = parsing.shown_tokens if parsing else frozenset[int]()
        self.states = [ChoiceState(add, tokenizer, shown) for add in collector.adds]
        self._parsers = [ChoiceParser(parsing) for _ in collector.adds] if parsing else None
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
        return self._collector.stats[0].first_token

    def close(self) -> None:
        """Abort what still runs."""
        self._session.close_request(self._collector)

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return self._num_open == 0

    async def read(self, on_delta: OnDelta) -> list[tuple[int, SequenceDelta]]:
        """Wait for output; see OutputCollector.read."""
        with fields_named(self._names):
            return await self._collector.read(on_delta)

    def process(self, index: int, delta: SequenceDelta) -> ChoiceDelta | None:
        """What a choice gained; None when it had ended before."""
        state = self.states[index]
        if state.finished:
            return None
        gained = state.process(delta)
        if not self._show_output:
            gained = ChoiceDelta(prompt_logprobs=gained.prompt_logprobs, finish_reason=gained.finish_reason)
        self._session.count_delivered(self._collector, index, len(gained.tokens))
        if self._parsers is not None:
            self._parsers[index].parse(gained)
            state.finished = gained.finish_reason is not None
        if gained.finish_reason is not None:
            self._num_open -= 1
            self._session.finish_sequence(self._collector, index, _end_reason(gained))
        return gained

    async def wait(self) -> None:
        """Wait for output if the request has a deadline; raises a QuireError if the request failed before."""
        if self.adds[0].deadline is not None:
            with fields_named(self._names):
                await self._collector.wait()

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
        return usage_field(self._collector.adds[index].prompt_len, completion_tokens * self._show_output)

    def usage(self) -> dict[str, Any]:
        """OpenAI's token counts. Of a prompt with several choices, the first one's cached tokens count."""
        cached = sum(state.cached_tokens for state in self.states[:: self._collector.adds[0].sampling.n])
        counts = usage_field(self.prompt_tokens, self.completion_tokens)
        return {**counts, "prompt_tokens_details": {"cached_tokens": cached}}


def usage_field(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """OpenAI's `usage`."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }


def _end_reason(last: ChoiceDelta) -> EndReason:
    assert last.finish_reason is not None
    if last.finish_reason == "length" and last.stop_reason == "timeout":
        return "timeout"
    return "stop" if last.finish_reason == "tool_calls" else last.finish_reason
