"""The tools of a chat request, and which of them its answer may or must call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, PrivateAttr

from quire.errors import RequestError, did_you_mean
from quire.serving.api.schemas.custom_tools import custom_function, lark_of_input
from quire.serving.api.schemas.known_fields import Part, optional
from quire.text.output_parsers.events import Tool

MAX_TOOLS = 1_024
MAX_FURTHER_FIELDS = 64
"""Maximum number of unknown fields of a tool, and of its function."""
_PARAMETERS = ("schema", "input_schema", "inputSchema")
"""What other APIs call a function's parameters."""
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,256}")


class Function(Part, extra="allow"):
    """A function that the model may call. Other fields are shown to the model, as `return` of transformers' schemas."""

    name: str = Field(description="Letters, digits and '_.:/-'.")
    description: str | None = None
    parameters: dict[str, Any] | None = optional("A JSON schema of type object.")
    strict: bool | None = optional("Calls must match the schema.")
    _input_grammar: str = PrivateAttr("")

    @classmethod
    def of_custom(cls, fields: Mapping[str, Any], input_grammar: str) -> Function:
        """The function that a model is shown for a custom tool, whose input has a grammar in Lark, or none."""
        function = cls(**fields)
        function._input_grammar = input_grammar
        return function


class CustomTool(Part, extra="allow"):
    """A tool whose input is text."""

    name: str = Field(description="Letters, digits and '_.:/-'.")
    description: str | None = None
    format: dict[str, Any] | None = optional(
        "Of type text, or grammar with a grammar of syntax (lark or regex) and definition."
    )


class ChatTool(Part, extra="allow"):
    """A tool; functions and custom tools are served. What others have is let in here, so that their type is refused by
    name.

    Further fields of functions are left out: they tell servers how to keep tools, and models nothing.
    """

    type: str
    function: Function | None = optional("Required, for type function.")
    custom: CustomTool | None = optional("Required, for type custom.")

    @property
    def sent(self) -> Function | CustomTool | None:
        """What it must have by its type; None if it has not."""
        return self.custom if self.type == "custom" else self.function

    @property
    def named(self) -> Function:
        """The function that the model is shown, of a tool that was checked."""
        if self.type == "custom":
            assert self.custom is not None
            grammar = (self.custom.format or {}).get("grammar")
            return Function.of_custom(_shown_custom(self.custom, "tools"), lark_of_input(grammar))
        assert self.function is not None
        return self.function


class ChosenFunction(Part):
    """The name of a function."""

    name: str


class ChosenTool(Part):
    """The one tool that the answer must call."""

    type: Literal["function"]
    function: ChosenFunction

    @property
    def name(self) -> str:
        return self.function.name


class ChosenCustomTool(Part):
    """The one custom tool that the answer must call."""

    type: Literal["custom"]
    custom: ChosenFunction

    @property
    def name(self) -> str:
        return self.custom.name


class AllowedTools(Part):
    """Some of the tools, and whether one must be called."""

    mode: Literal["auto", "required"]
    tools: list[ChosenTool | ChosenCustomTool] = Field(max_length=MAX_TOOLS)


class AllowedToolsChoice(Part):
    """A choice among some of the tools; the model is shown all of them, so the prompt stays the same."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


StrictLevel = Literal["auto", "function", "parameter"]
"""What calls are held to where neither the request nor a tool asks for more."""
ToolChoice = Literal["none", "auto", "required"] | ChosenTool | ChosenCustomTool | AllowedToolsChoice


@dataclass(frozen=True)
class ToolUse:
    """Which tools an answer may or must call; there is at least one. If it `must_call`, the answer is a call and
    nothing else; only a `parallel` one may have several calls. `some` tells whether the model is shown other tools,
    which it may not call. `level` is the server's --tool-strict-level, and `custom` the names of tools whose input is
    text."""

    tools: tuple[Tool, ...]
    must_call: bool = False
    parallel: bool = True
    some: bool = False
    level: StrictLevel = "auto"
    custom: frozenset[str] = frozenset()

    @property
    def constrained(self) -> bool:
        """Whether the form of the output is enforced while it is generated."""
        return self.must_call or self.some or self.level != "auto" or any(tool.strict for tool in self.tools)


def tool_use(
    tools: Sequence[ChatTool] | None,
    choice: ToolChoice | None,
    *,
    parallel: bool | None,
    level: StrictLevel = "auto",
) -> ToolUse | None:
    """The tools that the answer may call; None for none. Raises RequestError if a tool or the choice is wrong."""
    tools = tools or ()
    _check(tools)
    if not tools and choice not in (None, "none", "auto"):
        raise RequestError("tool_choice needs tools: send the functions that may be called.", param="tool_choice")
    if not tools or choice == "none":
        return None
    names, must_call = _chosen(choice)
    functions = [tool.named for tool in tools]
    known = {function.name for function in functions}
    for name in names or ():
        if name not in known:
            raise RequestError(f"tool_choice: '{name[:64]}' is none of tools.", param="tool_choice")
    return ToolUse(
        tools=tuple(_parsed(function) for function in functions if names is None or function.name in names),
        must_call=must_call,
        parallel=parallel is not False and not isinstance(choice, ChosenTool | ChosenCustomTool),
        some=names is not None and len(set(names)) < len(tools),
        level=level,
        custom=frozenset(tool.custom.name for tool in tools if tool.type == "custom" and tool.custom is not None),
    )


def _chosen(choice: ToolChoice | None) -> tuple[list[str] | None, bool]:
    """The names of the tools that may be called, None for all; and whether one must be. Raises RequestError for
    none."""
    if isinstance(choice, ChosenTool | ChosenCustomTool):
        return [choice.name], True
    if isinstance(choice, AllowedToolsChoice):
        allowed = choice.allowed_tools
        if not allowed.tools:
            raise RequestError(
                "tool_choice.allowed_tools.tools must not be empty: send tool_choice 'none' to allow no tool.",
                param="tool_choice",
            )
        return [tool.name for tool in allowed.tools], allowed.mode == "required"
    return None, choice == "required"


def shown_tools(tools: Sequence[ChatTool]) -> tuple[Mapping[str, Any], ...]:
    """The tools for the chat template: functions as they were sent, without `strict`. Raises RequestError for a wrong
    tool."""
    _check(tools)
    return tuple(
        {"type": "function", "function": tool.named.model_dump(exclude_unset=True, exclude={"strict"})}
        for tool in tools
    )


def _shown_custom(tool: CustomTool, place: str) -> dict[str, Any]:
    """The function that a model is shown for a custom tool. Raises RequestError for a wrong format."""
    form: Any = tool.format
    if form is not None and form.get("type") == "grammar":
        grammar = form.get("grammar")
        form = {**grammar, "type": "grammar"} if isinstance(grammar, dict) else {"type": "grammar"}
    return custom_function({"name": tool.name, "description": tool.description}, form, place)


def _parsed(function: Function) -> Tool:
    parameters = function.parameters or {"type": "object", "properties": {}}
    return Tool(function.name, parameters, bool(function.strict), function._input_grammar)


def _check(tools: Sequence[ChatTool]) -> None:
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools may have at most {MAX_TOOLS} entries, got {len(tools)}.", param="tools")
    names: set[str] = set()
    for at, tool in enumerate(tools):
        place = f"tools[{at}]"
        if tool.type not in ("function", "custom"):
            raise RequestError(
                f"{place}.type: tools of type '{tool.type[:64]}' are not supported: send functions or custom tools.",
                param=f"{place}.type",
            )
        inside = f"{place}.{tool.type}"
        if tool.sent is None:
            raise RequestError(f"'{inside}' is required.", param=inside)
        _check_further_fields(tool, place)
        _check_further_fields(tool.sent, inside)
        name = tool.sent.name
        if not _NAME.fullmatch(name):
            raise RequestError(
                f"{inside}.name must have 1 to 256 letters, digits or characters of '_.:/-'.", param=f"{inside}.name"
            )
        if name in names:
            raise RequestError(f"{inside}.name: '{name}' is there twice.", param=f"{inside}.name")
        names.add(name)
        if isinstance(tool.sent, CustomTool):
            _shown_custom(tool.sent, inside)
        else:
            _check_parameters(tool.sent.parameters, f"{inside}.parameters")


def _check_further_fields(sent: ChatTool | Function | CustomTool, place: str) -> None:
    """Clients add fields of their own; one that can only be a mistake for a known one would leave a tool half told."""
    known = type(sent).model_fields
    if len(sent.model_extra or ()) > MAX_FURTHER_FIELDS:
        raise RequestError(f"{place} may have at most {MAX_FURTHER_FIELDS} fields that are not known.", param=place)
    for name in sent.model_extra or ():
        meant = did_you_mean(name, known)
        if name in _PARAMETERS:
            meant = " Did you mean 'parameters'?"
        if meant:
            raise RequestError(f"'{place}.{name[:64]}' is not a known field.{meant}", param=f"{place}.{name[:64]}")


def _check_parameters(schema: Mapping[str, Any] | None, place: str) -> None:
    """The outermost level, which models and parsers rely on. A grammar checks the rest where it needs it."""
    if not schema:
        return
    if schema.get("type", "object") != "object":
        raise RequestError(f"{place} must be a JSON schema of type object.", param=place)
    properties = schema.get("properties", {})
    if not isinstance(properties, dict) or not all(isinstance(value, dict | bool) for value in properties.values()):
        raise RequestError(f"{place}.properties must be an object of JSON schemas.", param=place)
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise RequestError(f"{place}.required must be a list of texts.", param=place)
