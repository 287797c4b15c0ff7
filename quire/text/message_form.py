"""Messages of OpenAI's API in the form that a chat template shows.

How a template wants former tool calls is found by rendering a short conversation in each form. Knows nothing about
jinja.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Message = dict[str, Any]
NoContent = Literal["null", "empty", "absent"]
"""How a message without content is written: with null, as OpenAI's API has it, an empty text, or no field."""

_NO_CONTENT: dict[NoContent, dict[str, Any]] = {"null": {"content": None}, "empty": {"content": ""}, "absent": {}}
_VALUE = "quire"
_ARGUMENTS = {"place": _VALUE}
_PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
_FUNCTION = {"name": "look_up", "description": "Looks up.", "parameters": _PARAMETERS}
PROBE_TOOL = {"type": "function", "function": _FUNCTION}
"""The tool that conversations call which templates are tried with."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning. Templates read one of the first two."""


def fit(message: Mapping[str, Any], call_form: Callable[[], CallForm], *, knows_developer: bool) -> Message:
    """Return a message in the form that a template shows. What the template takes as it was sent stays so; without
    `knows_developer`, that role becomes the system's.

    Nulls are left out, since clients send them for fields that they do not use; a null `content` without calls becomes
    an empty text.
    """
    fitted = {name: value for name, value in message.items() if value is not None or name == "content"}
    if fitted.get("role") == "developer" and not knows_developer:
        fitted["role"] = "system"
    calls = fitted.get("tool_calls")
    reasoning = next((fitted[name] for name in _REASONING if name in fitted), None)
    if reasoning is not None:
        fitted |= {"reasoning_content": reasoning, "thinking": reasoning}
        if calls and fitted.get("content"):
            del fitted["thinking"]  # GPT-OSS's template refuses a call with both
    if isinstance(calls, list) and calls:
        return call_form().fit(fitted)
    if calls == []:
        del fitted["tool_calls"]
    if fitted.get("content", "") is None:
        fitted["content"] = ""
    return fitted


@dataclass(frozen=True)
class CallForm:
    """The form of messages with tool calls.

    Attributes:
        no_content: How no content may be written; what was sent is kept if it is among them, else the first is taken.
        objects: Whether arguments are JSON objects; else they are JSON text.
    """

    no_content: tuple[NoContent, ...]
    objects: bool = True

    def fit(self, message: Message) -> Message:
        """A message of the assistant with calls, in this form."""
        content = message.get("content")
        if not content:
            sent: NoContent = "absent" if "content" not in message else "null" if content is None else "empty"
            if sent not in self.no_content:
                message = {name: value for name, value in message.items() if name != "content"}
                message |= _NO_CONTENT[self.no_content[0]]
        return {**message, "tool_calls": [self._call(call) for call in message["tool_calls"]]}

    def _call(self, call: Any) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            return call
        return {**call, "function": {**function, "arguments": self._arguments(function.get("arguments"))}}

    def _arguments(self, arguments: Any) -> Any:
        """Arguments in this form. Arguments that are no JSON are shown as the model wrote them."""
        if not self.objects:
            return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):
                read = json.loads(arguments or "{}")
                if "\\u" in arguments:
                    json.dumps(read, ensure_ascii=False).encode()  # fails for half a surrogate pair
                return read
        return {} if arguments is None else arguments


def find_call_form(render: Callable[[Sequence[Message]], str | None]) -> CallForm:
    """The form in which a template shows calls. `render` renders a conversation; None if the template cannot."""
    for objects in (True, False):
        shown: dict[NoContent, int] = {}
        for kind, content in _NO_CONTENT.items():
            text = render(_conversation(content, _ARGUMENTS if objects else json.dumps(_ARGUMENTS)))
            if text is not None and _VALUE in text and repr(_ARGUMENTS) not in text:
                shown[kind] = text.count("None")  # once more, where null is written out as content
        if shown:
            fewest = min(shown.values())
            return CallForm(tuple(kind for kind, count in shown.items() if count == fewest), objects)
    return CallForm(("empty",))


def _conversation(content: Mapping[str, Any], arguments: Any) -> list[Message]:
    call = {"id": "lookedup1", "type": "function", "function": {"name": "look_up", "arguments": arguments}}
    return [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", **content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "lookedup1", "name": "look_up", "content": "Here."},
    ]
