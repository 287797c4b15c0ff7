"""Runs the texts of one request, and waits for what the model makes of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from quire.engine.pooling_requests import check_pools, tasks_served
from quire.errors import GenerationError, RequestError, UnavailableError
from quire.foundation.messages.from_engine import NO_POOLING, PoolingInfo
from quire.pooling_params import PoolingParams, PoolingTask
from quire.serving.api.pooling.inputs import PooledText
from quire.serving.api.pooling.vectors import Pooled
from quire.serving.api.schemas.known_fields import FieldNames, fields_named
from quire.serving.api.schemas.queue_fields import QueueFields
from quire.serving.api.serving import Serving
from quire.serving.api.session.output_collector import OutputCollector
from quire.text.deltas import SequenceDelta

MAX_VALUES = 2**24
"""Maximum number of values in one answer: as float32 64 MiB, as JSON some 350 MB."""
_ENDED = "The server ended this request before it was computed. Send it again."
_NO_VECTOR = "The engine ended this request without a vector. Send it again."


@dataclass(frozen=True)
class PooledRequest:
    """A request that was accepted, and what its model does."""

    serving: Serving
    request: Request
    fields: QueueFields
    info: PoolingInfo

    @classmethod
    def accept(cls, serving: Serving, request: Request, fields: QueueFields) -> PooledRequest:
        """Take note of who sent a request. Raises RequestError if a shared field is wrong or the model pools nothing,
        UnavailableError or OverloadedError if no work is taken now."""
        serving.accept_queued(request, fields)
        serving.session.check_room(1, 1)
        ready = serving.session.ready
        info = NO_POOLING if ready is None else ready.pooling
        check_pools(info)
        return cls(serving, request, fields, info)

    def first_task(self, *tasks: PoolingTask, what: str) -> PoolingTask:
        """The first of these tasks that the model does; raises RequestError if it does none of them."""
        for task in tasks:
            if task in self.info.tasks:
                return task
        raise RequestError(f"This model does not {what}; it does {tasks_served(self.info)}.", param="model")

    async def run(self, texts: Sequence[PooledText], params: PoolingParams, names: FieldNames) -> list[Pooled]:
        """What the model makes of each text, in their order.

        Raises:
            RequestError: No engine could run it; nothing was started. `names` are the client's of fields.
            OverloadedError, UnavailableError: No work is taken now, or the server ended it.
            RequestTimeoutError: Its time was over.
            GenerationError: It failed inside the engine.
        """
        session = self.serving.session
        with fields_named(names):
            self._check_size(texts, params)
            session.check_room(len(texts), sum(len(text.tokens) for text in texts))
            collector = await session.add_request(
                [text.tokens for text in texts],
                params,
                per_prompt=[text.options for text in texts],
                **self.fields.queue_options(),
            )
        try:
            self.serving.log_pooled(self.request, params, [len(text.tokens) for text in texts])
            return await self._collect(collector)
        finally:
            session.close_request(collector)

    async def _collect(self, collector: OutputCollector) -> list[Pooled]:
        found: dict[int, Pooled] = {}
        session, number = self.serving.session, len(collector.adds)

        def on_delta(index: int, delta: SequenceDelta) -> bool:
            if (end := delta.end) is not None and index not in found:
                if end.reason == "abort":
                    raise UnavailableError(_ENDED)
                if not end.vector_shape:
                    raise GenerationError(end.message or _NO_VECTOR)
                tokens = collector.adds[index].prompt_len
                found[index] = Pooled(end.vector, tuple(end.vector_shape), tokens, end.cached_tokens)
                session.finish_sequence(collector, index, end.reason)
            return len(found) < number

        while len(found) < number:
            for index, delta in await collector.read(on_delta):
                on_delta(index, delta)
        return [found[index] for index in range(number)]

    def _check_size(self, texts: Sequence[PooledText], params: PoolingParams) -> None:
        """Refuse what would make an answer that is too large, before anything runs for it."""
        task = params.task or self.info.tasks[0]
        embeds = task in ("embed", "token_embed")
        width = (params.dimensions or self.info.dim) if embeds else len(self.info.labels)
        rows = sum(len(text.tokens) for text in texts) if task.startswith("token_") else len(texts)
        if rows * width > MAX_VALUES:
            raise RequestError(
                f"The answer would have {rows} × {width} values. This server puts at most {MAX_VALUES} into one: send "
                "several requests.",
                param="input",
            )


def usage(results: Sequence[Pooled]) -> dict[str, Any]:
    """OpenAI's token counts of what was computed."""
    tokens = sum(each.tokens for each in results)
    return {
        "prompt_tokens": tokens,
        "total_tokens": tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in results)},
    }
