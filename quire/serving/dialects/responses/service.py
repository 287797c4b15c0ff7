"""Starts responses: from a request and the responses that it continues to a running choice."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from quire.errors import ContextLengthError, RequestError
from quire.foundation.clock import Clock, WallClock
from quire.serving.api.auth import Caller
from quire.serving.api.chat_service import ChatPrompt
from quire.serving.api.request_choices import RequestChoices
from quire.serving.api.request_work import convert
from quire.serving.api.schemas.chat import ChatRequest
from quire.serving.api.serving import Serving
from quire.serving.api.token_fields import chat_logprobs
from quire.serving.dialects.responses.answers import ResponseAnswers, response_head
from quire.serving.dialects.responses.chat_request import chat_messages, chat_request, listed_item, log_hints
from quire.serving.dialects.responses.schemas import InputItem, MessageItem, ResponsesRequest, parse_items
from quire.serving.dialects.responses.tools import ResponseTools
from quire.serving.store.responses import StoredResponse
from quire.text.deltas import ChoiceDelta

MAX_TRUNCATIONS = 32
"""How often a conversation is cut and tried again."""


@dataclass(frozen=True)
class RunningResponse:
    """A response whose choice is running, and must be closed; with the items of its input, and the types of dropped
    tools."""

    events: ResponseAnswers
    choices: RequestChoices
    input: Sequence[dict[str, Any]]
    dropped: Sequence[str] = ()

    @property
    def id(self) -> str:
        return str(self.events.response["id"])

    def stored(self) -> StoredResponse:
        """The response as it is now, for the store."""
        body = self.events.response
        items, previous = msgspec.json.encode(self.input), body["previous_response_id"]
        return StoredResponse(self.id, body["status"], items, msgspec.json.encode(body), previous)


@dataclass(frozen=True)
class ResponsesService:
    """Responses of one model."""

    serving: Serving
    clock: Clock = field(default_factory=WallClock)

    async def start(
        self, fields: ResponsesRequest, caller: Caller, on_end: Callable[[RunningResponse], None]
    ) -> RunningResponse:
        """The running response; `on_end` is called when it has ended, if it is streamed. Raises a RequestError that
        names a wrong field, UnknownIdError if the response to continue is not there, and UnavailableError if no work is
        taken now."""
        model = self.serving.model_name(fields.model)
        tools = self._tools(fields)
        items, messages = await self._messages(fields, tools)
        chat, prompt, choices = await self._choices(fields, caller, messages, tools)
        names, created = chat.token_names(self.serving.text.tokenizer), self.clock.now()

        def logprobs(gained: ChoiceDelta) -> list[dict[str, Any]]:
            shown: list[dict[str, Any]] = chat_logprobs(names, fields.top_logprobs or 0, gained)["content"]
            return shown

        stored = fields.store is not False and self.serving.store is not None
        head = response_head(fields, f"resp_{uuid.uuid4().hex}", created, model, prompt.params, tools, stored=stored)
        events = ResponseAnswers(
            head,
            choices,
            logprobs if fields.wants_logprobs else lambda gained: [],
            self.clock,
            lambda body: on_end(running),
            tools,
            keep_events=bool(fields.stream or fields.background),
        )
        listed = await convert(len(items), lambda: [listed_item(item) for item in items])
        running = RunningResponse(events, choices, listed, tools.dropped)
        return running

    async def count_input_tokens(self, fields: ResponsesRequest) -> tuple[int, Sequence[str]]:
        """Tokens of the prompt, and the types of tools that are left out; raises what `start` does."""
        self.serving.model_name(fields.model)
        tools = self._tools(fields)
        _, messages = await self._messages(fields, tools)
        chat = await convert(len(messages), lambda: chat_request(fields, messages, tools))
        return len((await self.serving.chat.prepare(chat)).tokens), tools.dropped

    @property
    def _sees(self) -> bool:
        """Whether the model sees images."""
        return self.serving.chat.sees

    def _tools(self, fields: ResponsesRequest) -> ResponseTools:
        tools = ResponseTools.of(fields.tools, fields.tool_choice)
        tools.log_hints(self.serving.text.hints)
        log_hints(fields, self.serving.text.hints)
        return tools

    async def _messages(
        self, fields: ResponsesRequest, tools: ResponseTools
    ) -> tuple[list[InputItem], list[dict[str, Any]]]:
        """The items of the input, and the messages of all that was said."""
        number = len(fields.input) if isinstance(fields.input, list) else 1
        items = await convert(number, lambda: _items(fields, sees=self._sees))
        history = await self._history(fields.previous_response_id)
        said = [*history, *items]
        return items, await convert(
            len(said), lambda: chat_messages(fields.instructions, said, tools.model_name, sees=self._sees)
        )

    async def _history(self, previous: str | None) -> list[InputItem]:
        """The items of the responses before, without their instructions."""
        if previous is None:
            return []
        items: list[InputItem] = []
        for turn in await self.serving.stored.responses.turns(previous):
            if turn.status not in ("completed", "incomplete"):
                raise RequestError(
                    f"previous_response_id: the response '{turn.id}' is {turn.status}, and cannot be continued.",
                    param="previous_response_id",
                )
            body = msgspec.json.decode(turn.body)
            said = [*msgspec.json.decode(turn.input), *body["output"]]
            items += parse_items(said, "previous_response_id", sees=self._sees)
        return items

    async def _choices(
        self, fields: ResponsesRequest, caller: Caller, messages: list[dict[str, Any]], tools: ResponseTools
    ) -> tuple[ChatRequest, ChatPrompt, RequestChoices]:
        """The running choice; with `truncation: auto` the oldest turns are left out if they do not fit."""
        attempts = MAX_TRUNCATIONS if fields.truncation == "auto" else 0
        while True:
            chat = await convert(len(messages), partial(chat_request, fields, messages, tools))
            try:
                return chat, *await self.serving.chat.start(chat.sent_by(caller))
            except ContextLengthError:
                shorter = _without_oldest_turn(messages, attempts)
                if attempts == 0 or len(shorter) == len(messages):
                    raise
                messages, attempts = shorter, attempts - 1


def _items(fields: ResponsesRequest, *, sees: bool) -> list[InputItem]:
    if isinstance(fields.input, str):
        return [MessageItem(role="user", content=fields.input)]
    if not fields.input and fields.previous_response_id is None:
        raise RequestError("input must not be empty.", param="input")
    return parse_items(fields.input, sees=sees)


def _without_oldest_turn(messages: list[dict[str, Any]], attempts: int) -> list[dict[str, Any]]:
    """The system messages, and all from a later question on; with few attempts left, from a much later one."""
    questions = [at for at, message in enumerate(messages) if message["role"] == "user"]
    if len(questions) < 2:
        return messages
    begin = questions[min(len(questions) - 1, -(-len(questions) // max(1, attempts)))]
    kept = [message for message in messages[:begin] if message["role"] in ("system", "developer")]
    return [*kept, *messages[begin:]]
