"""Which fields a request may have: known ones, neutral ones that are ignored, and ones that are not served yet.

Owns the lists. A field that would change the answer is never silently dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import RequestError, UnsupportedField, did_you_mean

IGNORED = frozenset({
    "client_metadata",
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "guided_decoding_backend",
})  # fmt: skip
"""Bookkeeping of the caller that changes no answer; and which compiler a grammar should have: there is one here."""

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "access_programs": (),
    "audio": (),
    "context_management": ([],),
    "conversation": (),
    "enable_response_messages": (False,),
    "features": ({},),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "kv_transfer_params": ({},),
    "logits_processors": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "previous_input_messages": ([],),
    "prompt_embeds": (),
    "return_prompt_text": (False,),
    "web_search_options": (),
}
"""Fields that OpenAI or vLLM know and no endpoint serves, with the values (beside null) that ask for nothing: clients
send those."""

ELSEWHERE: dict[str, tuple[Any, ...]] = {
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "include_reasoning": (True, False),
    "parallel_tool_calls": (True, False),
    "reasoning_effort": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
}
"""Fields that some endpoints serve and all others refuse, with the values (beside null) that ask for nothing."""

_WHERE = {
    "echo": "/v1/completions or /v1/chat/completions",
    "suffix": "/v1/completions",
}
"""The endpoints that serve a field of ELSEWHERE, if these are not /v1/chat/completions alone."""
_INSTEAD = {
    "compaction": "ask for a summary in a message",
    "thread": "send all messages of the conversation with each request",
}
"""What to do instead of leaving a field out."""
_LONGEST_NAME = 64


@dataclass(frozen=True)
class FieldLists:
    """Fields of one API that no schema has.

    Attributes:
        ignored: Neutral ones.
        unsupported: Known ones that are not served, each with the values (beside null) that ask for nothing.
    """

    ignored: Collection[str]
    unsupported: Mapping[str, tuple[Any, ...]]


OPENAI_FIELDS = FieldLists(IGNORED, UNSUPPORTED | ELSEWHERE)
NO_FIELDS = FieldLists((), {})


def served_fields(body: dict[str, Any], known: Collection[str], lists: FieldLists = OPENAI_FIELDS) -> dict[str, Any]:
    """The fields of a request that this server acts upon.

    Args:
        known: Those of the schema.
        lists: What else a request may have.

    Raises:
        UnsupportedField: One asks for something that is not served yet.
        RequestError: One is unknown; a close known name is suggested.
    """
    served = {}
    for name, value in body.items():
        if name in known:
            served[name] = value
        elif name in lists.unsupported:
            if value is not None and not any(_equal(value, neutral) for neutral in lists.unsupported[name]):
                raise UnsupportedField(name, _advice(name))
        elif name not in lists.ignored:
            raise _unknown(name, known)
    return served


def _advice(name: str) -> str:
    if name not in ELSEWHERE:
        return _INSTEAD.get(name, "leave it out")
    return f"send it to {_WHERE.get(name, '/v1/chat/completions')}"


def _equal(value: Any, neutral: Any) -> bool:
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _unknown(name: str, known: Collection[str]) -> RequestError:
    if len(name) > _LONGEST_NAME:
        return RequestError(f"'{name[:_LONGEST_NAME]}…' is not a known field.")
    return RequestError(f"'{name}' is not a known field.{did_you_mean(name, known)}", param=name)
