"""Which fields a request may have: known ones, neutral ones that are ignored, and ones that are not served yet.

A field that would change the answer is never silently dropped. Errors name fields as the client does.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from quire.errors import ContextLengthError, RequestError, UnsupportedField, did_you_mean
from quire.sampling_params import SamplingParams
from quire.text.hints import HintLog

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
"""Bookkeeping of the caller that changes no answer, and the compiler that a grammar should have: there is one here."""
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
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "previous_input_messages": ([],),
    "prompt_embeds": (),
    "return_prompt_text": (False,),
    "web_search_options": (),
}
"""Fields that OpenAI or vLLM know and no endpoint serves, with the values (beside null) that ask for nothing."""
ELSEWHERE: dict[str, tuple[Any, ...]] = {
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "include_reasoning": (True, False),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "parallel_tool_calls": (True, False),
    "reasoning_effort": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("low", "medium", "high"),
}
"""Fields that some endpoints serve and all others refuse, with the values (beside null) that ask for nothing."""
_WHERE = {
    "echo": "/v1/completions or /v1/chat/completions",
    "suffix": "/v1/completions",
}
"""The endpoints that serve a field of ELSEWHERE, if not /v1/chat/completions alone."""
_INSTEAD = {
    "compaction": "ask for a summary in a message",
    "grammar": "send it as structured_outputs.grammar",
    "json_schema": "send it as response_format",
    "n_predict": "send it as max_tokens",
    "previous_message_id": "send all messages of the conversation with each request",
    "regex": "send it as structured_outputs.regex",
    "system_prompt": "send it as a message with the role system",
    "thread_id": "send all messages of the conversation with each request",
    "thread": "send all messages of the conversation with each request",
}
"""What to do instead of leaving a field out."""
OF_OTHER_SERVERS: dict[str, tuple[Any, ...]] = {
    "assistant_id": (),
    "attachments": ([],),
    "contents": (),
    "custom_logit_processor": ("",),
    "custom_params": ({},),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "files": ([],),
    "grammar": ("",),
    "image_data": ([],),
    "images": ([],),
    "input": (),
    "inputs": (),
    "instructions": ("",),
    "json_schema": ({},),
    "lora_path": ("",),
    "messages": (),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "n_predict": (-1,),
    "previous_message_id": (),
    "previous_response_id": (),
    "prompt": (),
    "regex": ("",),
    "schema": ({},),
    "system": ("", []),
    "system_instruction": (),
    "system_prompt": ("",),
    "template": ("",),
    "tfs_z": (1,),
    "thread": (),
    "thread_id": (),
    "top_a": (0,),
    "typical_p": (1,),
    "xtc_probability": (0,),
}
"""Fields of other servers and endpoints that would change the answer, with the values (beside null) that ask for
nothing."""
_LONGEST_NAME = 64
_MAX_NAMED = 16
_ALIKE = 0.8
"""Names that are this similar to a known one are misspelt, as difflib measures it."""


def optional(description: str) -> Any:
    """A field of a body that may be null or left out."""
    return Field(default=None, description=description)


class Body(BaseModel):
    """A request's body. `served_fields` knows which fields it may have beside its own."""

    model_config = ConfigDict(strict=True, protected_namespaces=(), defer_build=True)


class Part(BaseModel):
    """An object in a body, with no fields but its own."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=(), defer_build=True)


@dataclass(frozen=True)
class FieldLists:
    """Fields of one API that no schema has: neutral ones, and ones that are not served, with neutral values."""

    ignored: Collection[str]
    unsupported: Mapping[str, tuple[Any, ...]]


OPENAI_FIELDS = FieldLists(IGNORED, UNSUPPORTED | ELSEWHERE)
NO_FIELDS = FieldLists((), {})


class UnknownFields:
    """Decides about fields that no schema and no list has: all are refused; or those are ignored that change no answer,
    as far as one can tell, and the log names each once."""

    def __init__(self, hints: HintLog | None = None, *, ignored: bool = False) -> None:
        self.ignored = ignored
        self._hints = hints
        self._named: set[str] = set()

    def drop(self, name: str, value: Any, known: Collection[str]) -> None:
        """Ignore a field, or raise a RequestError about it: for one that is spelled like a known one, and one that
        would change the answer."""
        neutral = OF_OTHER_SERVERS.get(name, ())
        asks_nothing = value is None or any(_equal(value, each) for each in neutral)
        would_change = name in OF_OTHER_SERVERS or name in SamplingParams.__struct_fields__
        is_name = len(name) <= _LONGEST_NAME
        if not (self.ignored and is_name) or _is_misspelt(name, known) or (would_change and not asks_nothing):
            raise _unknown(name, known)
        if self._hints is None or name in self._named or len(self._named) > _MAX_NAMED:
            return
        self._named.add(name)
        if len(self._named) <= _MAX_NAMED:
            self._hints.drop(f"The field '{name}'", "nothing here reads it")
        else:
            self._hints.drop("Any other unknown field", "the log names the first ones only")


REFUSED_FIELDS = UnknownFields()


def served_fields(
    body: dict[str, Any],
    known: Collection[str],
    lists: FieldLists = OPENAI_FIELDS,
    unknown: UnknownFields = REFUSED_FIELDS,
) -> dict[str, Any]:
    """The fields of a request that this server acts upon: those that are `known` to the schema.

    Raises UnsupportedField if a field of `lists` asks for something, and RequestError for an unknown field that is
    refused; a close known name is suggested.
    """
    served = {}
    for name, value in body.items():
        if name in known:
            served[name] = value
        elif name in lists.unsupported:
            if value is not None and not any(_equal(value, neutral) for neutral in lists.unsupported[name]):
                raise UnsupportedField(name, _advice(name))
        elif name not in lists.ignored:
            unknown.drop(name, value, known)
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
    hint = f" Instead, {_INSTEAD[name]}." if name in _INSTEAD else did_you_mean(name, known)
    return RequestError(f"'{name}' is not a known field.{hint}", param=name)


def _is_misspelt(name: str, known: Collection[str]) -> bool:
    """Whether a name is probably meant to be a known one, in whichever case it is written."""
    plain = {each.replace("_", "") for each in known}
    return bool(difflib.get_close_matches(name.lower().replace("_", "").replace("-", ""), plain, 1, _ALIKE))


@dataclass(frozen=True)
class FieldNames:
    """The client's names of fields.

    Attributes:
        sent: The client's name by the name that errors have, where they differ. An entry for `tools` is also one for
            `tools[0].name`, unless there is a longer one. A function gets the whole name, and makes the client's of it.
        then: Renames behind this; None for nothing.
        context_error: Other words for a conversation that does not fit; None for the usual ones.
    """

    sent: Mapping[str, str | Callable[[str], str]] = field(default_factory=dict)
    then: FieldNames | None = None
    context_error: Callable[[ContextLengthError], str] | None = None

    def rename(self, error: RequestError) -> None:
        """Let an error name its field as the client sent it; its class, code and other text stay."""
        error.rename(self._sent_name(error.param or ""))
        if self.context_error is not None and isinstance(error, ContextLengthError):
            error.message = self.context_error(error)
        if self.then is not None:
            self.then.rename(error)

    def _sent_name(self, name: str) -> str:
        end = len(name)
        while end > 0:
            if (sent := self.sent.get(name[:end])) is not None:
                return sent(name) if callable(sent) else sent + name[end:]
            end = max(name.rfind(".", 0, end), name.rfind("[", 0, end))
        return name


AS_THEY_ARE = FieldNames()


@contextmanager
def fields_named(names: FieldNames | Mapping[str, str]) -> Iterator[None]:
    """A context in which a RequestError about a field names it as the client sent it."""
    try:
        yield
    except RequestError as error:
        (names if isinstance(names, FieldNames) else FieldNames(names)).rename(error)
        raise
