"""The tools of /v1/responses as functions of a chat: those in namespaces and those of other types that the client runs,
too, and without those that OpenAI hosts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from quire.errors import RequestError, UnsupportedField
from quire.serving.api.schemas.custom_tools import lark_of_input
from quire.serving.api.schemas.tools import MAX_TOOLS, Function
from quire.serving.dialects.responses.client_tools import CLIENT_TOOLS, client_function
from quire.text.hints import HintLog

_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
_NEUTRAL_FIELDS = ("type", "defer_loading", "output_schema", "allowed_callers")
"""Further fields of a function, which are hints, or checked where they stand."""
_HOSTED = re.compile(
    r"(code_interpreter|computer|computer_use|computer_use_preview|file_search|image_generation|mcp|"
    r"programmatic_tool_calling|web_search|web_search_preview)(_\d{4}_\d{2}_\d{2})?",
    re.ASCII,
)
"""Tools that OpenAI runs; some names end with a date."""
_PLACE = re.compile(r"tools\[(\d+)\](?:\.function)?")


@dataclass(frozen=True)
class _Function:
    """A function as it was sent at a `place`, in a namespace or none; `called` is the model's name for it.

    `about` is the description of its namespace, if it is the first function there; `kind` and `sent` are the type of
    a tool that is no function, and how it was sent.
    """

    fields: dict[str, Any]
    namespace: str
    place: str
    about: str = ""
    called: str = ""
    kind: str = "function"
    sent: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        name = self.fields.get("name")
        return name if isinstance(name, str) else ""  # which is refused where chats are checked


@dataclass(frozen=True)
class ResponseTools:
    """The tools of a request: `shown` is what of `tools` is served, as it was sent; `dropped` are types of tools that
    OpenAI hosts, which are left out; and `choice` is which function must be called, as chat requests say it."""

    shown: Sequence[dict[str, Any]] = ()
    dropped: Sequence[str] = ()
    functions: Sequence[_Function] = ()
    allowed: Sequence[_Function] = ()
    choice: Any = None

    @classmethod
    def of(cls, tools: Sequence[dict[str, Any]] | None, choice: Any) -> ResponseTools:
        """The tools of a request and the choice among them; raises a RequestError if they are wrong or not served."""
        shown, dropped, functions = [], [], list[_Function]()
        _check_number(tools or ())
        for at, tool in enumerate(tools or ()):
            if _is_hosted(tool):
                dropped.append(str(tool["type"]))
                continue
            shown.append(tool)
            functions += _functions(tool, f"tools[{at}]")
            _check_number(functions)
        named = _named(functions)
        return cls(shown, dropped, named, named)._chosen(choice)

    @property
    def chat_tools(self) -> list[dict[str, Any]]:
        """The functions that may be called as chat requests have them."""
        return [_chat_tool(function) for function in self.allowed]

    @cached_property
    def in_namespaces(self) -> dict[str, tuple[str, str]]:
        """Namespace and name of each function that has a namespace, by what the model calls it."""
        return {each.called: (each.namespace, each.name) for each in self.functions if each.namespace}

    @cached_property
    def kinds(self) -> dict[str, str]:
        """The type of each tool that is no function, by what the model calls it."""
        return {each.called: each.kind for each in self.functions if each.kind != "function"}

    def model_name(self, namespace: str | None, name: str) -> str:
        """What the model calls a function. One that is not among the tools any more has its name."""
        found = self._index.get((namespace or "", name))
        return found[0].called if found else name

    @cached_property
    def _index(self) -> dict[tuple[str | None, str | None], list[_Function]]:
        """The functions by namespace and name, by name alone, and by namespace alone."""
        index: dict[tuple[str | None, str | None], list[_Function]] = {}
        for function in self.functions:
            space, name = function.namespace, function.name
            for key in ((space, name), (None, name), (space, None)):
                index.setdefault(key, []).append(function)
        return index

    def _chosen(self, choice: Any) -> ResponseTools:
        if choice == "required" and not self.functions and self.dropped:
            raise _not_served(self.dropped[0], "tool_choice")
        if isinstance(choice, str) or choice is None:
            if choice not in (None, "none", "auto", "required"):
                raise RequestError("tool_choice must be none, auto, required or a function.", param="tool_choice")
            return replace(self, choice=choice)
        match choice.get("type"):
            case "function" | "custom" if isinstance(choice.get("name"), str):
                return replace(self, choice={"type": "function", "function": {"name": self._chosen_name(choice)}})
            case "apply_patch" | "local_shell" | "shell" as kind:
                named = self._chosen_name({"name": kind})
                return replace(self, choice={"type": "function", "function": {"name": named}})
            case "allowed_tools" if isinstance(choice.get("tools"), list):
                return self._allowed(choice["tools"], required=choice.get("mode") == "required")
            case str() as kind if _is_hosted({"type": kind}):
                raise _not_served(kind, "tool_choice.type")
        raise UnsupportedField("tool_choice.type", "choose among functions")

    def _allowed(self, tools: Sequence[Any], *, required: bool) -> ResponseTools:
        _check_number(tools, "tool_choice.tools")
        allowed: set[str] = set()
        named = {str(tool): tool for tool in tools}  # each once: one may stand for a thousand functions
        for tool in named.values():
            if isinstance(tool, dict) and _is_hosted(tool):
                continue
            found = self._meant(tool) if isinstance(tool, dict) else []
            if not found:
                raise RequestError("tool_choice allows a tool that is none of tools.", param="tool_choice")
            allowed.update(function.called for function in found)
        if required and tools and not allowed:
            raise _not_served(str(tools[0]["type"]), "tool_choice")
        kept = [function for function in self.functions if function.called in allowed]
        return replace(self, allowed=kept, choice="required" if required else "auto")

    def _chosen_name(self, choice: dict[str, Any]) -> str:
        found = self._meant(choice)
        if len(found) > 1:
            raise RequestError(
                f"tool_choice: several namespaces have a function '{choice['name'][:64]}': send its namespace, too.",
                param="tool_choice",
            )
        if not found:
            raise RequestError(f"tool_choice: '{choice['name'][:64]}' is none of tools.", param="tool_choice")
        return found[0].called

    def _meant(self, tool: dict[str, Any]) -> list[_Function]:
        """The functions that a choice names. Without a namespace, a function that has none goes first."""
        name, namespace = str(tool.get("name") or tool.get("type")), tool.get("namespace")
        if tool.get("type") == "namespace":
            return self._index.get((name, None), []) if name else []
        if namespace is None:
            return self._index.get(("", name)) or self._index.get((None, name), [])
        return self._index.get((namespace, name), []) if isinstance(namespace, str) else []

    def sent_place(self, param: str) -> str:
        """The field that the client sent, for a field of the chat's tools that an error names."""
        match = _PLACE.match(param)
        if match is None or int(match[1]) >= len(self.allowed):
            return param
        return self.allowed[int(match[1])].place + param[match.end() :]

    def log_hints(self, hints: HintLog) -> None:
        if any(function.fields.get("defer_loading") for function in self.functions):
            hints.drop("tools.defer_loading", "the model is shown all tools at once")
        if any(function.fields.get("output_schema") for function in self.functions):
            hints.drop("tools.output_schema", "chat templates show none")


def _is_hosted(tool: dict[str, Any]) -> bool:
    kind = tool.get("type")
    if kind == "shell":
        environment = tool.get("environment")
        return isinstance(environment, dict) and str(environment.get("type", "")).startswith("container")
    if kind == "tool_search":
        return tool.get("execution") in (None, "server")
    return isinstance(kind, str) and _HOSTED.fullmatch(kind) is not None


def _functions(tool: dict[str, Any], place: str) -> Iterator[_Function]:
    """The function that a tool is, or those of a namespace."""
    if tool.get("type") != "namespace":
        yield _function(tool, "", place)
        return
    namespace, inside = tool.get("name"), tool.get("tools")
    if not isinstance(namespace, str) or not namespace:
        raise RequestError(f"{place}.name must be the name of the namespace.", param=f"{place}.name")
    if not isinstance(inside, list) or not all(isinstance(each, dict) for each in inside):
        raise RequestError(f"{place}.tools must be a list of functions.", param=f"{place}.tools")
    about = tool.get("description")
    for at, function in enumerate(inside):
        first = about if at == 0 and isinstance(about, str) else ""
        yield _function(function, namespace, f"{place}.tools[{at}]", first)


def _function(tool: dict[str, Any], namespace: str, place: str, about: str = "") -> _Function:
    """A tool as the model's function; raises RequestError if it is wrong or not served."""
    kind = str(tool.get("type"))[:64]
    if kind == "tool_search":
        raise UnsupportedField(f"{place}.type", "the model is shown all tools at once; leave 'tool_search' out")
    if kind not in ("function", *CLIENT_TOOLS):
        raise UnsupportedField(
            f"{place}.type", f"only functions, namespaces and {', '.join(CLIENT_TOOLS)} are; '{kind}' is none of them"
        )
    _check_callers(tool, place)
    if kind == "function":
        _check_function(tool, place)
        return _Function(tool, namespace, place, about)
    return _Function(client_function(tool, place), namespace, place, about, kind=kind, sent=tool)


def _check_callers(tool: dict[str, Any], place: str) -> None:
    callers = tool.get("allowed_callers")
    if callers is not None and not (isinstance(callers, list) and "direct" in callers):
        raise UnsupportedField(f"{place}.allowed_callers", "no program runs here: add 'direct'")


def _check_function(tool: dict[str, Any], place: str) -> None:
    for name, value in tool.items():
        if name not in (*_NEUTRAL_FIELDS, *_FUNCTION_FIELDS) and value not in (None, False):
            raise UnsupportedField(f"{place}.{name[:64]}")


def _named(functions: Sequence[_Function]) -> list[_Function]:
    """The functions with what the model calls each: its name, behind its namespace where several have the name."""
    count = Counter(name for _, name in {(each.namespace, each.name) for each in functions})
    taken: dict[str, tuple[str, str]] = {}
    again = Counter[str]()
    named = []
    for function in functions:
        called, call = function.name, (function.namespace, function.name)
        if function.namespace and count[called] > 1:
            called = joined = _joined(*call)
            while called in count or taken.get(called, call) != call:
                again[joined] += 1
                called = f"{joined}_{again[joined] + 1}"
        taken[called] = call
        named.append(replace(function, called=called))
    return named


def _check_number(tools: Sequence[Any], name: str = "tools") -> None:
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"{name} may have at most {MAX_TOOLS} entries, got {len(tools)}.", param=name)


def _chat_tool(function: _Function) -> dict[str, Any]:
    fields = {name: function.fields[name] for name in _FUNCTION_FIELDS if function.fields.get(name) is not None}
    if function.called:
        fields["name"] = function.called
    if function.about and isinstance(fields.get("description", ""), str):
        own = fields.get("description", "")
        fields["description"] = f"{own}\n\n{function.namespace}: {function.about}".strip()
    if grammar := lark_of_input(function.sent.get("format")):
        return {"type": "function", "function": Function.of_custom(fields, grammar)}
    return {"type": "function", "function": fields}


def _joined(namespace: str, name: str) -> str:
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def _not_served(kind: str, param: str) -> UnsupportedField:
    return UnsupportedField(param, f"'{kind[:64]}' is a tool that OpenAI hosts; choose among functions")
