"""What is known about one HTTP request when it is over: who asked for what, how it was answered, and what that cost.
The access log never says what a request said."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.engine.metrics.server_stats import HttpCounts
from quire.engine.metrics.stats import SequenceStats
from quire.foundation.clock import Clock
from quire.foundation.messages.to_engine import Add
from quire.foundation.processes.logs import FIELDS
from quire.serving.api.request_work import CLIENT_CLOSED_REQUEST
from quire.serving.api.session.output_collector import OutputCollector

UNCOUNTED = frozenset({"/health", "/ping", "/ready", "/metrics", "/load", "/version"})
"""Probes, of which there is no record."""
RECORD = "record"
"""Key in the scope's state: the RequestRecord."""
_MILLISECONDS = 3
logger = logging.getLogger("quire.access")


@dataclass(frozen=True)
class RequestCost:
    """What the sequences of a request cost together.

    Attributes:
        prompt_tokens, cached_tokens: Each prompt counts once.
        completion_tokens: Tokens that the reader has got.
        first_token_s: From arrival to the first token of the first sequence that had one.
        queue_s, prefill_s, decode_s: The engine's times of the sequence that took longest; None if the reader ended all
            before the engine did (a stop string, or a client that went away).
    """

    sequences: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    first_token_s: float | None
    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None
    preemptions: int
    finish_reasons: tuple[str, ...]


@dataclass
class RequestRecord:
    """One HTTP request, with monotonic seconds. Its status is 499 when the client went before there was an answer."""

    began: float
    ended: float = 0.0
    status: int = CLIENT_CLOSED_REQUEST
    collectors: list[OutputCollector] = field(default_factory=list)

    @property
    def sequences(self) -> list[tuple[Add, SequenceStats]]:
        """Each sequence's Add and statistics."""
        return [pair for collector in self.collectors for pair in zip(collector.adds, collector.stats, strict=True)]

    def cost(self) -> RequestCost | None:
        """The request's cost; None if nothing was handed to the engine."""
        if not self.collectors:
            return None
        sequences = self.sequences
        prompts = [stats for add, stats in sequences if add.fork_of is None]
        every = [stats for _, stats in sequences]
        first = [stats.first_token - stats.arrival for stats in every if stats.first_token is not None]
        ends = [stats.end for stats in every if stats.end is not None]
        longest = max(ends, key=lambda end: end.queued_s + end.prefill_s + end.decode_s, default=None)
        return RequestCost(
            len(every),
            sum(stats.prompt_tokens for stats in prompts),
            sum(stats.cached_tokens for stats in prompts),
            sum(stats.delivered for stats in every),
            min(first, default=None),
            longest.queued_s if longest else None,
            longest.prefill_s if longest else None,
            longest.decode_s if longest else None,
            sum(end.preemptions for end in ends),
            tuple(sorted({stats.ended for stats in every if stats.ended is not None})),
        )


Observer = Callable[[RequestRecord, Scope], None]
"""Is told of a request that is over."""


def count_in(counts: HttpCounts) -> Observer:
    """Make the observer that counts responses by route, method and status."""

    def count(record: RequestRecord, scope: Scope) -> None:
        handler = getattr(scope.get("route"), "path", None)
        counts.answered(scope["method"], handler, record.status, record.ended - record.began)

    return count


class RequestRecordMiddleware:
    """ASGI middleware that tells observers of every request but probes, once each, when the last byte was sent."""

    def __init__(self, app: ASGIApp, *, observers: Sequence[Observer], clock: Clock) -> None:
        self._app = app
        self._observers = observers
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in UNCOUNTED:
            await self._app(scope, receive, send)
            return
        state: dict[str, Any] = scope.setdefault("state", {})
        record = state[RECORD] = RequestRecord(self._clock.now())

        async def watch_status(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch_status)
        finally:
            record.ended = self._clock.now()
            for observer in self._observers:
                observer(record, scope)
            record.collectors.clear()  # uvicorn's cycle keeps the scope until the next search for garbage


def log_access(record: RequestRecord, scope: Scope) -> None:
    if logger.isEnabledFor(logging.INFO):
        write_line(access_fields(record, scope), scope["http_version"])


def access_fields(record: RequestRecord, scope: Scope) -> dict[str, Any]:
    """What the access log says of a request, without what is not known. Seconds end in `_s`.

    The path is as it was sent, percent-encoded and without its query.
    """
    client = scope.get("client")
    caller = scope["state"].get("caller")
    fields: dict[str, Any] = {
        "client": f"{client[0]}:{client[1]}" if client else "-",
        "method": scope["method"],
        "path": scope["raw_path"].decode("ascii", "backslashreplace"),
        "status": record.status,
        "request_id": scope["state"].get("request_id", ""),
        "duration_s": record.ended - record.began,
        "tenant": caller.tenant if caller else "",
    }
    cost = record.cost()
    if cost is not None:
        fields |= vars(cost) | {"finish_reasons": list(cost.finish_reasons)}
    shown = {name: value for name, value in fields.items() if value not in (None, "")}
    return {name: round(value, _MILLISECONDS) if isinstance(value, float) else value for name, value in shown.items()}


def write_line(fields: Mapping[str, Any], http_version: str) -> None:
    """Log these fields, which have at least `client`, `method`, `path` and `status`."""
    head = f'{fields["client"]} - "{fields["method"]} {fields["path"]} HTTP/{http_version}" {fields["status"]}'
    skipped = ("client", "method", "path", "status")
    rest = " ".join(f"{name}={_text(value)}" for name, value in fields.items() if name not in skipped)
    logger.info("%s %s", head, rest, extra={FIELDS: fields})


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
