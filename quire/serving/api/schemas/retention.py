"""How long the prefix of a conversation is wanted in the cache, as APIs say it."""

from __future__ import annotations

import re
from typing import Literal

from quire.errors import RequestError, UnsupportedField
from quire.serving.api.schemas.known_fields import Part, optional

SESSION_S = 300.0
"""Seconds between two turns of a session or prompt_cache_key that names no time."""
OPTIONS_S = 1800.0
"""Seconds by default where there are prompt_cache_options, as OpenAI has it."""
LONGEST_S = 86_400.0
_TTL = re.compile(r"([0-9]{1,6})(s|m|h|d)", re.ASCII)
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
Retention = Literal["in_memory", "in-memory", "24h"]


class PromptCacheOptions(Part):
    """How the prefix is cached."""

    mode: Literal["implicit", "explicit"] | None = optional("Ignored: every block of a prompt is cached.")
    ttl: str | None = optional("How long, such as 30m. At most 24h.")
    prewarm: bool | None = optional("true is refused: send the request with max_tokens 1.")
    comparison_response_id: str | None = optional("Ignored: usage says what was found.")


def retention_s(
    session: str | None, key: str | None, options: PromptCacheOptions | None, retention: Retention | None
) -> float:
    """For how many seconds the blocks of a request are wanted; 0 if nothing asks for it. Raises RequestError for a time
    that cannot be read, or a cache that is to be filled alone."""
    if options is not None:
        if options.prewarm:
            raise UnsupportedField("prompt_cache_options.prewarm", "send the request with max_tokens 1")
        return OPTIONS_S if options.ttl is None else seconds_of(options.ttl, "prompt_cache_options.ttl")
    if retention is not None:
        return LONGEST_S if retention == "24h" else SESSION_S
    return SESSION_S if session or key else 0.0


def seconds_of(ttl: str, param: str) -> float:
    """The seconds of a text such as 5m; raises RequestError for any other, and for more than a day."""
    match = _TTL.fullmatch(ttl)
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 0 < seconds <= LONGEST_S:
        raise RequestError(f"{param} must be a time like 30m, from 1s to 24h.", param=param)
    return seconds
