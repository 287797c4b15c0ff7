"""A line for each request that is over, with what it cost: never what it said. Owns the line's form alone."""

from __future__ import annotations

import logging
from typing import Any

from starlette.types import Scope

from quire.serving.api.access_line import logger, write_line
from quire.serving.api.request_record import RequestCost, RequestRecord

_MILLISECONDS = 3


def log_access(record: RequestRecord, scope: Scope) -> None:
    """Log one request."""
    if logger.isEnabledFor(logging.INFO):
        write_line(access_fields(record, scope), scope["http_version"])


def access_fields(record: RequestRecord, scope: Scope) -> dict[str, Any]:
    """What is said of a request; what is not known is left out. Seconds end in `_s`.

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
        fields |= _of_cost(cost)
    shown = {name: value for name, value in fields.items() if value not in (None, "")}
    return {name: round(value, _MILLISECONDS) if isinstance(value, float) else value for name, value in shown.items()}


def _of_cost(cost: RequestCost) -> dict[str, Any]:
    return {
        "sequences": cost.sequences,
        "prompt_tokens": cost.prompt_tokens,
        "cached_tokens": cost.cached_tokens,
        "completion_tokens": cost.completion_tokens,
        "first_token_s": cost.first_token_s,
        "queue_s": cost.queue_s,
        "prefill_s": cost.prefill_s,
        "decode_s": cost.decode_s,
        "preemptions": cost.preemptions,
        "finish_reasons": list(cost.reasons),
    }
