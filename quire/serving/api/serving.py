"""What every endpoint is given, and the two kinds of response: streamed and whole."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import RequestError, UnknownModelError
from quire.foundation.config import Config
from quire.foundation.messages.to_engine import Add
from quire.sampling_params import BeamSearchParams, SamplingParams
from quire.serving.api.beam_search_request import FoundChoices, FoundStream, run_beam_search
from quire.serving.api.chat_service import ChatService
from quire.serving.api.json_pieces import PiecesResponse, write_json
from quire.serving.api.peers import SharedCounts
from quire.serving.api.prompt_renderer import PromptRenderer
from quire.serving.api.request_choices import RequestChoices
from quire.serving.api.request_head import use_request_id
from quire.serving.api.schemas.sampling import RequestFields, SamplingFields
from quire.serving.api.serializers import Serializer
from quire.serving.api.session.session import EngineSession
from quire.serving.api.sse_chunks import SseChunks
from quire.serving.api.stream_response import AnswerFormat, StreamResponse, StreamWriter
from quire.serving.store.store import Store
from quire.text.model_text import ModelText

logger = logging.getLogger(__name__)
_NAMES_TOLD = 16
"""Where a request names another model: more are what /v1/models is for."""


@dataclass(frozen=True)
class Serving:
    """One model behind one engine, as endpoints see it.

    Attributes:
        created: When the server started, in seconds since 1970, for /v1/models.
        slow_reader_s: A streaming client that reads nothing for so many seconds is disconnected.
        counts: What /metrics shows.
        store: Responses, files and batches; None with --disable-responses-store.
    """

    config: Config
    session: EngineSession
    text: ModelText
    renderer: PromptRenderer
    chat: ChatService
    created: int
    slow_reader_s: float
    counts: SharedCounts
    store: Store | None = None

    @property
    def stored(self) -> Store:
        """The store, for what is not possible without it.

        Raises:
            RequestError: There is none.
        """
        if self.store is None:
            raise RequestError("This server keeps nothing: it was started with --disable-responses-store.")
        return self.store

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model; the first is the one it is called by."""
        return self.config.model.served_model_name or (self.config.model.model,)

    def serves(self, name: str) -> bool:
        """Whether the model or an adapter is called so."""
        return name in self.names or self.session.adapters.serves(name)

    def model_name(self, asked: str | None) -> str:
        """The name to answer under.

        Raises:
            UnknownModelError: Another model is asked for.
        """
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

    def refuse_if_full(self) -> None:
        """Turn a request away before its body is read, if too many wait; see AdmissionLimit.

        Raises:
            OverloadedError: Too many do.
        """
        self.session.refuse_if_full()

    def accept(self, request: Request, fields: RequestFields) -> None:
        """Take note of who sent a request and under which id.

        Raises:
            RequestError: A field that all generating endpoints share is wrong.
        """
        use_request_id(request, fields.request_id)
        fields.sent_by(request.state.caller)
        self.model_name(fields.model)
        fields.check_stream_options()

    async def respond(
        self,
        request: Request,
        fields: RequestFields,
        choices: RequestChoices,
        serializer: Serializer,
    ) -> Response:
        """OpenAI's response with choices that are running, streamed or whole."""
        stream = bool(fields.stream)
        head = self._head(request, fields, serializer)
        return await self.answer(request, SseChunks(head, serializer, choices, fields.streams_usage), choices, stream)

    async def answer(
        self, request: Request, format: AnswerFormat, choices: RequestChoices, stream: bool, head: bytes = b""
    ) -> Response:
        """The response with choices that are running, in any format; they are closed at its end.

        Args:
            head: Of a stream: written at once, before there is any output.
        """
        request_id = request.state.request_id
        self.log_request(request_id, request.scope["path"], choices.adds, stream=stream)
        if stream:
            return StreamResponse(StreamWriter(format, choices, request_id, head), self.slow_reader_s)
        try:
            return json_response(await format.body())
        finally:
            choices.close()

    def _head(self, request: Request, fields: RequestFields, serializer: Serializer) -> dict[str, Any]:
        name, stream = self.model_name(fields.model), bool(fields.stream)
        return serializer.head(request.state.request_id, int(time.time()), name, stream=stream)

    async def respond_with_beams(
        self,
        request: Request,
        fields: SamplingFields,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        options: dict[str, Any],
        make_serializer: Callable[[Sequence[Sequence[int]]], Serializer],
    ) -> Response:
        """The response to a request with `use_beam_search`.

        Args:
            params: How prompts are truncated, and how many tokens are generated.
            options: See EngineSession.add_request.
            make_serializer: From the prompts as they were truncated.
        """
        options = {name: value for name, value in options.items() if name != "collectors"}  # hundreds of short requests
        checked = {name: value for name, value in options.items() if name != "model"}
        adds = [self.session.submission.adds(prompt, params, **checked)[0] for prompt in prompts]
        prompts = [add.tokens[: add.prompt_len] for add in adds]
        beams = fields.beam_search(adds[0].sampling.max_tokens or 1)
        self._check_beams(beams)
        sequences = len(prompts) * beams.beam_width
        computed = sum(map(len, prompts)) + sequences * beams.max_tokens
        self.session.check_room(sequences, computed)
        serializer = make_serializer(prompts)
        head = self._head(request, fields, serializer)
        self.log_request(request.state.request_id, request.scope["path"], adds, stream=bool(fields.stream))
        found = await run_beam_search(self.session, prompts, beams, self.text.eos_ids, options, params.num_reported)
        choices = FoundChoices(
            prompts, found, self.text.tokenizer, skip_special_tokens=fields.skip_special_tokens is not False
        )
        format = SseChunks(head, serializer, choices, fields.streams_usage)
        if fields.stream:
            return StreamResponse(FoundStream(format, choices), self.slow_reader_s)
        return json_response(await format.body())

    def _check_beams(self, params: BeamSearchParams) -> None:
        """Each step asks for the 2 × n likeliest tokens of a beam."""
        model = self.config.model
        if model.logprobs_mode.endswith("logits"):
            raise RequestError(
                "use_beam_search needs log probabilities: this server was started with --logprobs-mode "
                f"{model.logprobs_mode}.",
                param="use_beam_search",
            )
        if 0 <= model.max_logprobs < 2 * params.beam_width:
            raise RequestError(
                f"n must be at most {model.max_logprobs // 2} with use_beam_search on this server, half of "
                f"--max-logprobs; got {params.beam_width}.",
                param="n",
            )

    def log_request(self, request_id: str, path: str, adds: Sequence[Add], *, stream: bool) -> None:
        """A line for each request, with --enable-log-requests."""
        if self.config.server.enable_log_requests:
            sampling = msgspec.json.encode(adds[0].sampling).decode()
            lengths = [add.prompt_len for add in adds[:: adds[0].sampling.n]]
            logger.info("request %s %s stream=%s prompt_tokens=%s %s", request_id, path, stream, lengths, sampling)


def json_response(body: dict[str, Any] | list[Any], status: int = 200) -> Response:
    """A JSON answer."""
    pieces = write_json(body)
    if len(pieces) == 1:
        return Response(pieces[0], status, media_type="application/json")
    return PiecesResponse(pieces, status)
