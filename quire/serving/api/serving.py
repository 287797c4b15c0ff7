"""What every endpoint is given, and the two kinds of response: streamed and whole."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import RequestError, UnknownModelError
from quire.foundation.config import Config
from quire.foundation.messages.to_engine import Add
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams
from quire.serving.api.answers import Serializer, SseChunks
from quire.serving.api.audio.chat_transcripts import ChatSpeech
from quire.serving.api.audio.transcripts import Speech
from quire.serving.api.auth import is_retry, use_request_id
from quire.serving.api.chat_service import ChatService
from quire.serving.api.json_pieces import PiecesResponse, write_json
from quire.serving.api.peers import SharedCounts
from quire.serving.api.prompt_renderer import PromptRenderer
from quire.serving.api.request_body import read_body
from quire.serving.api.request_choices import RequestChoices
from quire.serving.api.request_work import cancel_on_disconnect
from quire.serving.api.schemas.known_fields import OPENAI_FIELDS, FieldLists
from quire.serving.api.schemas.queue_fields import QueueFields
from quire.serving.api.schemas.sampling import RequestFields
from quire.serving.api.session.session import EngineSession
from quire.serving.api.stream_response import AnswerFormat, StreamResponse, StreamWriter, Writer
from quire.serving.store.store import Store
from quire.text.model_text import ModelText

logger = logging.getLogger(__name__)
_NAMES_TOLD = 16
"""Maximum number of models that an error names; /v1/models has all of them."""


Schema = TypeVar("Schema", bound=BaseModel)
Answer = Callable[["Serving", Request, Schema], Coroutine[Any, Any, Response]]
"""Answers a request whose body was read."""


@dataclass(frozen=True)
class Serving:
    """One model behind its engines, as endpoints see it, `created` when the server started, in seconds since 1970. A
    streaming client that reads nothing for `slow_reader_s` seconds is disconnected. `store` has responses, files and
    batches; None with --disable-responses-store. `speech` is known about a model that hears; None: it cannot."""

    config: Config
    session: EngineSession
    text: ModelText
    renderer: PromptRenderer
    chat: ChatService
    created: int
    slow_reader_s: float
    counts: SharedCounts
    store: Store | None = None
    speech: Speech | ChatSpeech | None = None

    @property
    def stored(self) -> Store:
        """The store; raises RequestError if this server has none."""
        if self.store is None:
            raise RequestError("This server keeps nothing: it was started with --disable-responses-store.")
        return self.store

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model; it answers under the first."""
        return self.config.model.names

    def serves(self, name: str) -> bool:
        """Whether the model or an adapter has this name."""
        return name in self.names or self.session.adapters.serves(name)

    def model_name(self, asked: str | None) -> str:
        """The name to answer under, by default the model's; raises UnknownModelError if nothing has this name."""
        if asked is None:
            return self.names[0]
        if not self.serves(asked):
            served = [*self.names, *(adapter.name for adapter in self.session.adapters.all)]
            more = f" and {len(served) - _NAMES_TOLD} more, see /v1/models" if len(served) > _NAMES_TOLD else ""
            raise UnknownModelError(
                f"The model '{asked[:128]}' is not served here. Served: {', '.join(served[:_NAMES_TOLD])}{more}.",
                param="model",
            )
        return asked

    async def read_and_answer(
        self, request: Request, schema: type[Schema], answer: Answer[Schema], lists: FieldLists = OPENAI_FIELDS
    ) -> Response:
        """Read a request's body, unless the queue is full, and answer it. The work ends when the client disconnects."""
        self.refuse_if_full(request)
        fields = await read_body(request, schema, lists)
        return await cancel_on_disconnect(request, answer(self, request, fields))

    def refuse_if_full(self, request: Request) -> None:
        """Raises OverloadedError if the queue is full, before a request is read."""
        self.session.refuse_if_full(is_retry=is_retry(request.scope))

    def accept(self, request: Request, fields: RequestFields) -> None:
        """Take note of who sent a request and under which id; raises RequestError if a shared field is wrong."""
        self.accept_queued(request, fields)
        fields.check_stream_options()
        fields.fill_in(self.config.server)

    def accept_queued(self, request: Request, fields: QueueFields) -> None:
        """Do what `accept` does for a request that cannot stream; raises RequestError if its id or model is wrong."""
        use_request_id(request, fields.request_id)
        fields.sent_by(request.state.caller)
        self.model_name(fields.model)

    def head(self, request: Request, fields: RequestFields, serializer: Serializer) -> dict[str, Any]:
        """The fields that begin OpenAI's response, or each chunk of it."""
        name, stream = self.model_name(fields.model), bool(fields.stream)
        return serializer.head(request.state.request_id, int(time.time()), name, stream=stream)

    async def respond(
        self, request: Request, fields: RequestFields, choices: RequestChoices, serializer: Serializer
    ) -> Response:
        """OpenAI's response with choices that are running, streamed or whole."""
        metrics = choices.metrics if self.config.server.enable_per_request_metrics else None
        format = SseChunks(self.head(request, fields, serializer), serializer, choices, fields.streams_usage, metrics)
        return await self.answer(request, format, choices, bool(fields.stream))

    async def answer(
        self, request: Request, format: AnswerFormat, choices: RequestChoices, stream: bool, head: bytes = b""
    ) -> Response:
        """The response with running choices, in any format; it closes them. `head` begins a stream at once."""
        self.log_request(request, choices.adds, stream=stream)
        if stream:
            interval = self.config.server.stream_interval
            writer = StreamWriter(format, choices, request.state.request_id, head, interval)
            return self.streamed(writer)
        try:
            return json_response(await format.body())
        finally:
            choices.close()

    def streamed(self, writer: Writer) -> StreamResponse:
        """The response that sends what a writer makes."""
        return StreamResponse(writer, self.slow_reader_s, self.config.server.sse_keep_alive_interval)

    def log_request(self, request: Request, adds: Sequence[Add], *, stream: bool) -> None:
        """Log a request, with --enable-log-requests."""
        if self.config.server.enable_log_requests:
            sampling = _logged(adds[0].sampling, self.config.server.max_log_len)
            lengths = [add.prompt_len for add in adds[:: adds[0].sampling.n]]
            about = request.state.request_id, request.scope["path"], stream, lengths, sampling
            logger.info("request %s %s stream=%s prompt_tokens=%s %s", *about)

    def log_pooled(self, request: Request, params: PoolingParams, lengths: Sequence[int]) -> None:
        """Log a request for vectors of texts with so many tokens, with --enable-log-requests."""
        if self.config.server.enable_log_requests:
            about = request.state.request_id, request.scope["path"], lengths, msgspec.json.encode(params).decode()
            logger.info("request %s %s prompt_tokens=%s %s", *about)


def _logged(sampling: SamplingParams, longest: int | None) -> str:
    """Sampling parameters as JSON, with texts of `longest` characters at most."""
    values = msgspec.to_builtins(sampling)
    for name in ("stop", "bad_words"):
        if isinstance(text := values.get(name), str):
            values[name] = text[:longest]
        elif text:
            values[name] = [each[:longest] for each in text]
    return msgspec.json.encode(values).decode()


def json_response(body: dict[str, Any] | list[Any], status: int = 200) -> Response:
    pieces = write_json(body)
    if len(pieces) == 1:
        return Response(pieces[0], status, media_type="application/json")
    return PiecesResponse(pieces, status)
