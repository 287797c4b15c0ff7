"""What every endpoint is given, and the two ways in which a generation is answered."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.api.delivery import EventStream
from quire.api.events import EventWriter
from quire.api.generation import Generation
from quire.api.prompts import Prompts
from quire.api.request_stream import RequestStream
from quire.api.schemas.sampling import SamplingFields
from quire.api.session import EngineSession
from quire.api.shapes import Shape, answer
from quire.config import Config
from quire.errors import UnknownModelError
from quire.text.model_text import ModelText

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Serving:
    """One model behind one engine, as endpoints see it.

    Attributes:
        created: When the server started, in seconds since 1970; the age that /v1/models reports.
        slow_reader_s: A client that takes nothing for this long is given up.
    """

    config: Config
    session: EngineSession
    text: ModelText
    prompts: Prompts
    created: int
    slow_reader_s: float

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model; the first is the one it is called by."""
        return self.config.model.served_model_name or (self.config.model.model,)

    def model_name(self, asked: str | None) -> str:
        """The name to answer under.

        Raises:
            UnknownModelError: Another model is asked for.
        """
        if asked is None:
            return self.names[0]
        if asked not in self.names:
            raise UnknownModelError(
                f"The model '{asked[:128]}' is not served here. Served: {', '.join(self.names)}.", param="model"
            )
        return asked

    async def respond(
        self,
        request: Request,
        fields: SamplingFields,
        stream: RequestStream,
        shape: Shape,
        prefix: str,
        *,
        answers: bool = True,
    ) -> Response:
        """The answer to a request whose sequences are running, streamed or whole; without `answers` only their prompts
        count."""
        generation = Generation(self.session, stream, self.text.tokenizer, answers=answers)
        request_id = request.state.request_id
        head = {"id": f"{prefix}-{request_id}", "created": int(time.time()), "model": self.model_name(fields.model)}
        self._log(request_id, request.url.path, stream, bool(fields.stream))
        if fields.stream:
            writer = EventWriter(head, shape, generation, fields.streams_usage, request_id)
            return EventStream(writer, generation.close, self.slow_reader_s)
        try:
            pieces = await generation.collect()
        finally:
            generation.close()
        return json_response(answer(head, shape, pieces, generation.usage()))

    def _log(self, request_id: str, path: str, stream: RequestStream, streamed: bool) -> None:
        if self.config.server.enable_log_requests:
            sampling = msgspec.json.encode(stream.adds[0].sampling).decode()
            lengths = [add.prompt_len for add in stream.adds[:: stream.adds[0].sampling.n]]
            logger.info("request %s %s stream=%s prompt_tokens=%s %s", request_id, path, streamed, lengths, sampling)


def json_response(body: dict[str, Any], status: int = 200) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")
