"""What dialects have in common: how their fields become a chat request, and which names and parts they share.

A dialect's `chat_request` makes one ChatRequest of a body, its `answers` make its JSON and events of the choice that
runs, and its FieldNames rename fields in all errors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from quire.serving.api.middleware import DROPPED_TOOLS
from quire.serving.api.request_body import check_fields
from quire.serving.api.schemas.chat import ChatRequest
from quire.serving.api.schemas.known_fields import FieldNames, fields_named
from quire.serving.api.serving import Serving
from quire.text.hints import THINKING_SWITCHES, HintLog

_NAMED_TOOLS = 16
"""Maximum number of types in the header: there are fewer, but for dates."""
_DATE = re.compile(r"_\d{4}_?\d{2}_?\d{2}$", re.ASCII)


def make_chat(fields: Mapping[str, Any], names: FieldNames) -> ChatRequest:
    """The chat request with these fields, without those that are None; raises RequestError if one is wrong. Errors
    about this request name fields as `names` says."""
    with fields_named(names):
        return check_fields({name: value for name, value in fields.items() if value is not None}, ChatRequest).named(
            names
        )


def template_variables(serving: Serving) -> Collection[str]:
    """The variables of the model's chat template, among them its switches for thinking."""
    template = serving.text.chat_template
    return template.variables if template else frozenset()


def thinking_switches(on: bool, variables: Collection[str]) -> dict[str, bool]:
    """The variables that switch thinking on or off, by name; none where the template has no switch."""
    return {name: on for name in THINKING_SWITCHES if name in variables}


def json_format(name: str, schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The `response_format` of answers that match a schema."""
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema, **more}}


def function_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call of an earlier turn, as messages of a chat have it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def call_input(arguments: str) -> dict[str, Any]:
    """The arguments of a call as an object; empty where they were cut off."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def hosted_output(name: str, texts: Iterable[str]) -> str:
    """What a hosted tool gave in an earlier turn, as text; empty if nothing of it can be read."""
    lines = list(texts)
    return "\n".join([f"[{name} gave:", *lines, "]"]) if lines else ""


def name_dropped(response: Response, tools: Collection[str], hints: HintLog) -> Response:
    """The response, with a header that names the hosted tools that were left out; the log names each once.

    No server but their maker's can run them. A model that is not told of a tool answers without it, so leaving one out
    refuses nothing that the model could do.
    """
    kinds = list(dict.fromkeys(tools))[:_NAMED_TOOLS]
    if kinds:
        response.headers[DROPPED_TOOLS] = ", ".join(kinds)
    for kind in kinds:
        hints.drop(f"The tool {_DATE.sub('', kind)}", "its maker hosts it, and the model is not told of it")
    return response


def named_event(kind: str, body: Mapping[str, Any]) -> bytes:
    return encoded_event(kind, msgspec.json.encode(body))


def encoded_event(kind: str, data: bytes) -> bytes:
    """A server-sent event with a name, whose JSON was written already."""
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"
