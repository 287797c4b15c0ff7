"""What the model says as items of a response, and the events about them, in OpenAI's order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.serving.dialects.responses.chat_request import new_id
from quire.text.deltas import ChoiceDelta
from quire.text.output_parsers.events import ContentDelta, ReasoningDelta, ToolCallDelta, ToolCallStart

Emit = Callable[[str, dict[str, Any]], None]
"""Takes an event's type and its other fields."""
Logprobs = Callable[[ChoiceDelta], list[dict[str, Any]]]
"""Log probabilities of what a choice gained, as chat has them; empty when they are not asked for."""


@dataclass
class OutputItems:
    """The items of one response, of which the last one may be open. `in_namespaces` has the namespace and name of
    functions, by what the model calls them; other functions have no namespace."""

    emit: Emit
    logprobs: Logprobs
    in_namespaces: Mapping[str, tuple[str, str]]
    items: list[dict[str, Any]] = field(default_factory=list)
    reasoning_tokens: int = 0
    _open: dict[str, Any] | None = None
    _pieces: list[str] = field(default_factory=list)  # of the open item's text or arguments
    _unshown: list[dict[str, Any]] = field(default_factory=list)  # log probabilities of text that a parser holds back
    _parsed: bool = False

    def add(self, gained: ChoiceDelta) -> None:
        """Go on with what the choice gained."""
        self._unshown += self.logprobs(gained)
        self._parsed = gained.events is not None
        if self._kind == "reasoning" or any(isinstance(event, ReasoningDelta) for event in gained.output):
            self.reasoning_tokens += len(gained.tokens)
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
                    self._tell("function_call_arguments.delta", delta=arguments)

    def end(self, *, complete: bool) -> None:
        """The output has ended; if it is not complete, neither is the last item."""
        if not self.items:
            self._begin_message()
        self._close("completed" if complete else "incomplete")

    def _add_text(self, text: str) -> None:
        if self._kind != "message":
            self._begin_message()
        logprobs, self._unshown = _of_text(self._unshown, text) if self._parsed else self._unshown, []
        self._part["logprobs"] += logprobs
        self._pieces.append(text)
        shown = [_without_bytes(entry) for entry in logprobs]
        self._tell("output_text.delta", content_index=0, delta=text, logprobs=shown)

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
        namespace, name = self.in_namespaces.get(start.name, ("", start.name))
        more = {"namespace": namespace} if namespace else {}
        self._begin("fc", "function_call", call_id=start.id or new_id("call"), name=name, arguments="", **more)

    def _begin(self, prefix: str, kind: str, **fields: Any) -> None:
        self._close("completed")
        self._open = {"id": new_id(prefix), "type": kind, "status": "in_progress", **fields}
        self.items.append(self._open)
        self.emit("response.output_item.added", {"output_index": len(self.items) - 1, "item": _copy(self._open)})

    def _begin_part(self, part: dict[str, Any]) -> None:
        assert self._open is not None
        self._open["content"].append(part)
        self._tell("content_part.added", content_index=0, part=_copy(part))

    def _close(self, status: str) -> None:
        if self._open is None:
            return
        text, self._pieces = "".join(self._pieces), []
        self._open["status"] = status
        match self._open["type"]:
            case "function_call":
                self._open["arguments"] = text
                self._tell("function_call_arguments.done", arguments=text)
            case "reasoning":
                self._part["text"] = text
                self._tell("reasoning_text.done", content_index=0, text=text)
                self._tell("content_part.done", content_index=0, part=_copy(self._part))
            case _:
                self._part["text"] = text
                logprobs = [_without_bytes(entry) for entry in self._part["logprobs"]]
                self._tell("output_text.done", content_index=0, text=text, logprobs=logprobs)
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


def _without_bytes(entry: dict[str, Any]) -> dict[str, Any]:
    top = [{"token": other["token"], "logprob": other["logprob"]} for other in entry["top_logprobs"]]
    return {"token": entry["token"], "logprob": entry["logprob"], "top_logprobs": top}
