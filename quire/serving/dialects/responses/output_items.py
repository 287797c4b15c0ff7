"""What the model says as items of a response, and the events about them, in OpenAI's order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from quire.serving.dialects.responses.chat_request import new_id
from quire.serving.dialects.responses.client_tools import ITEM_TYPES, PREFIXES, call_fields
from quire.serving.dialects.responses.tools import ResponseTools
from quire.text.deltas import ChoiceDelta
from quire.text.output_parsers.events import ContentDelta, ReasoningDelta, ToolCallDelta, ToolCallStart

Emit = Callable[[str, dict[str, Any]], None]
"""Takes an event's type and its other fields."""
Logprobs = Callable[[ChoiceDelta], list[dict[str, Any]]]
"""Log probabilities of what a choice gained, as chat has them; empty when they are not asked for."""


@dataclass
class OutputItems:
    """The items of one response, of which the last one may be open. Calls of `tools` that are no functions become items
    when they are complete: one that is broken is shown as text."""

    emit: Emit
    logprobs: Logprobs
    tools: ResponseTools
    items: list[dict[str, Any]] = field(default_factory=list)
    _open: dict[str, Any] | None = None
    _call: ToolCallStart | None = None  # of a tool that is no function, up to its end
    _pieces: list[str] = field(default_factory=list)  # of the open item's text or arguments
    _unshown: list[dict[str, Any]] = field(default_factory=list)  # log probabilities of text that a parser holds back
    _parsed: bool = False

    def add(self, gained: ChoiceDelta) -> None:
        """Go on with what the choice gained."""
        self._unshown += self.logprobs(gained)
        self._parsed = gained.events is not None
        for event in gained.output:
            match event:
                case ContentDelta(text):
                    self._add_text(text)
                case ReasoningDelta(text):
                    self._add_reasoning(text)
                case ToolCallStart():
                    self._begin_call(event)
                case ToolCallDelta(_, arguments):
                    self._pieces.append(arguments)
                    if self._call is None:
                        self._tell("function_call_arguments.delta", delta=arguments)

    def end(self, *, complete: bool) -> None:
        """The output has ended; if it is not complete, neither is the last item."""
        if not self.items and self._call is None:
            self._begin_message()
        self._close("completed" if complete else "incomplete")

    def _add_text(self, text: str) -> None:
        if self._kind != "message":
            self._begin_message()
        logprobs, self._unshown = _of_text(self._unshown, text) if self._parsed else self._unshown, []
        self._part["logprobs"] += logprobs
        self._pieces.append(text)
        self._tell("output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _add_reasoning(self, text: str) -> None:
        self._unshown = []
        if self._kind != "reasoning":
            self._begin("rs", "reasoning", summary=[], content=[])
            self._begin_part({"type": "reasoning_text", "text": ""})
        self._pieces.append(text)
        self._tell("reasoning_text.delta", content_index=0, delta=text)

    def _begin_message(self) -> None:
        self._begin("msg", "message", role="assistant", content=[])
        self._begin_part({"type": "output_text", "text": "", "annotations": [], "logprobs": []})

    def _begin_call(self, start: ToolCallStart) -> None:
        self._unshown = []
        if start.name in self.tools.kinds:
            self._close("completed")
            self._call = start
            return
        self._begin("fc", "function_call", **self._named(start), arguments="")

    def _named(self, start: ToolCallStart) -> dict[str, Any]:
        namespace, name = self.tools.in_namespaces.get(start.name, ("", start.name))
        more = {"namespace": namespace} if namespace else {}
        return {"call_id": start.id or new_id("call"), "name": name, **more}

    def _close_call(self, call: ToolCallStart, status: str) -> None:
        """Show the call of a tool that is no function, which has ended."""
        self._call = None
        arguments, self._pieces = "".join(self._pieces), []
        kind = self.tools.kinds[call.name]
        fields = call_fields(kind, arguments)
        if fields is None:
            self._add_text(f"{call.name} {arguments}")
            self._close(status)
        elif kind == "custom":
            self._begin(PREFIXES[kind], ITEM_TYPES[kind], **self._named(call), input="")
            self._pieces = [fields["input"]]
            self._tell("custom_tool_call_input.delta", delta=fields["input"])
            self._close(status)
        else:
            named = {name: value for name, value in self._named(call).items() if name != "name"}
            self._begin(PREFIXES[kind], ITEM_TYPES[kind], **named, **fields)
            self._close("completed")  # whatever ended the answer: nothing of the call is missing

    def _begin(self, prefix: str, kind: str, **fields: Any) -> None:
        self._close("completed")
        status = {} if kind == "custom_tool_call" else {"status": "in_progress"}  # which has none in OpenAI's schema
        self._open = {"id": new_id(prefix), "type": kind, **status, **fields}
        self.items.append(self._open)
        self.emit("response.output_item.added", {"output_index": len(self.items) - 1, "item": _copy(self._open)})

    def _begin_part(self, part: dict[str, Any]) -> None:
        assert self._open is not None
        self._open["content"].append(part)
        self._tell("content_part.added", content_index=0, part=_copy(part))

    def _close(self, status: str) -> None:
        if self._call is not None:
            self._close_call(self._call, status)
        if self._open is None:
            return
        text, self._pieces = "".join(self._pieces), []
        if "status" in self._open:
            self._open["status"] = status
        match self._open["type"]:
            case "function_call":
                self._open["arguments"] = text
                self._tell("function_call_arguments.done", arguments=text)
            case "custom_tool_call":
                self._open["input"] = text
                self._tell("custom_tool_call_input.done", input=text)
            case "apply_patch_call" | "shell_call" | "local_shell_call":
                pass  # they have no events of their own
            case "reasoning":
                self._part["text"] = text
                self._tell("reasoning_text.done", content_index=0, text=text)
                self._tell("content_part.done", content_index=0, part=_copy(self._part))
            case _:
                self._part["text"] = text
                self._tell("output_text.done", content_index=0, text=text, logprobs=self._part["logprobs"])
                self._tell("content_part.done", content_index=0, part=_copy(self._part))
        done, self._open = self._open, None
        self.emit("response.output_item.done", {"output_index": len(self.items) - 1, "item": _copy(done)})

    def _tell(self, event: str, **fields: Any) -> None:
        assert self._open is not None
        self.emit(f"response.{event}", {"item_id": self._open["id"], "output_index": len(self.items) - 1, **fields})

    @property
    def _kind(self) -> str | None:
        return None if self._open is None else str(self._open["type"])

    @property
    def _part(self) -> dict[str, Any]:
        assert self._open is not None
        part: dict[str, Any] = self._open["content"][0]
        return part


def _copy(value: dict[str, Any]) -> dict[str, Any]:
    """An item or part as it is now. Later changes are to its own fields, its list of parts, and their fields."""
    copied = dict(value)
    if "content" in copied:
        copied["content"] = [dict(part) for part in copied["content"]]
    return copied


def _of_text(entries: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """The log probabilities of the tokens that a text is made of, without the tags around it that a parser took."""
    begin = "".join(entry["token"] for entry in entries).find(text)
    if begin < 0:  # characters of several tokens
        return entries
    found, end = [], 0
    for entry in entries:
        start, end = end, end + len(entry["token"])
        if start < begin + len(text) and end > begin:
            found.append(entry)
    return found
