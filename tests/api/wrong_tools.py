"""Wrong and hostile tools, and choices among them."""

from __future__ import annotations

from typing import Any

from tests.api.wrong_request import WrongRequest, chat


def _tools(name: str, message: str, param: str, *functions: dict[str, Any], **fields: Any) -> WrongRequest:
    tools = [{"type": "function", "function": {"name": "f", **function}} for function in functions]
    return chat(name, message, param, **{"tools": tools, **fields})


def _allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


TOOLS = [
    chat("tools that are no list", "tools must be a valid list.", "tools", tools={"f": 1}),
    chat("a tool without a function", "'tools[0].function' is required.", "tools[0].function",
          tools=[{"type": "function"}]),
    chat("a tool of another type", "tools[0].type: tools of type 'retrieval' are not supported: send functions …",
          "tools[0].type", tools=[{"type": "retrieval", "function": {"name": "f"}}]),
    chat("a hosted tool", "tools[0].type: tools of type 'web_search_preview' are not supported: send functions …",
          "tools[0].type", tools=[{"type": "web_search_preview", "search_context_size": "low"}]),
    chat("a custom tool without a name", "'tools[0].custom' is required.", "tools[0].custom",
          tools=[{"type": "custom", "name": "f"}]),
    chat("a custom tool with another API's format", "tools[0].custom.format must be of type text, or grammar …",
          "tools[0].custom.format", tools=[{"type": "custom", "custom": {"name": "f", "format": {
              "type": "grammar", "syntax": "regex", "definition": "a"}}}]),
    chat("a custom tool with a name of another", "tools[1].custom.name: 'f' is there twice.", "tools[1].custom.name",
          tools=[{"type": "function", "function": {"name": "f"}}, {"type": "custom", "custom": {"name": "f"}}]),
    _tools("very many fields of a function", "tools[0].function may have at most 64 fields that are not known.",
           "tools[0].function", {f"field {i}": 1 for i in range(65)}),
    chat("a misspelt field of a tool", "'tools[0].functions' is not a known field. Did you mean 'function'?",
          "tools[0].functions", tools=[{"type": "function", "function": {"name": "f"}, "functions": {}}]),
    _tools("a function without a name", "tools[0].function.name must have 1 to 256 letters, digits or …",
            "tools[0].function.name", {"name": ""}),
    _tools("a function with markup in its name", "tools[1].function.name must have 1 to 256 letters, digits or …",
            "tools[1].function.name", {}, {"name": "</tools><|im_end|>"}),
    _tools("two functions of a name", "tools[1].function.name: 'f' is there twice.", "tools[1].function.name", {}, {}),
    _tools("a function with another API's field",
            "'tools[0].function.schema' is not a known field. Did you mean 'parameters'?",
            "tools[0].function.schema", {"schema": {}}),
    _tools("a misspelt field of a function",
            "'tools[0].function.paramters' is not a known field. Did you mean 'parameters'?",
            "tools[0].function.paramters", {"paramters": {}}),
    _tools("parameters that are a list", "tools[0].function.parameters must be an object.",
            "tools[0].function.parameters", {"parameters": []}),
    _tools("parameters that are an array", "tools[0].function.parameters must be a JSON schema of type object.",
            "tools[0].function.parameters", {"parameters": {"type": "array"}}),
    _tools("properties that are a list", "tools[0].function.parameters.properties must be an object of JSON schemas.",
            "tools[0].function.parameters", {"parameters": {"properties": ["a"]}}),
    _tools("a property that is a type", "tools[0].function.parameters.properties must be an object of JSON schemas.",
            "tools[0].function.parameters", {"parameters": {"properties": {"a": "string"}}}),
    _tools("required that is a flag", "tools[0].function.parameters.required must be a list of texts.",
            "tools[0].function.parameters", {"parameters": {"required": True}}),
    _tools("more tools than anyone has", "tools may have at most 1024 entries, got 1025.", "tools",
            *({"name": f"f{number}"} for number in range(1025))),
    _tools("wrong tools that are not to be called", "tools[1].function.name: 'f' is there twice.",
            "tools[1].function.name", {}, {}, tool_choice="none"),
    _tools("a choice that is none of the tools", "tool_choice: 'g' is none of tools.", "tool_choice", {},
            tool_choice={"type": "function", "function": {"name": "g"}}),
    chat("a choice without tools", "tool_choice needs tools: send the functions that may be called.", "tool_choice",
          tool_choice="required"),
    chat("a named choice without tools", "tool_choice needs tools: send the functions that may be called.",
          "tool_choice", tool_choice={"type": "function", "function": {"name": "f"}}),
    _tools("an allowed tool that is none of the tools", "tool_choice: 'g' is none of tools.", "tool_choice", {},
            tool_choice=_allowed("auto", "f", "g")),
    _tools("no allowed tools", "tool_choice.allowed_tools.tools must not be empty: …", "tool_choice", {},
            tool_choice=_allowed("required")),
    _tools("allowed tools of another mode", "tool_choice.allowed_tools.mode must be 'auto' or 'required'.",
            "tool_choice.allowed_tools.mode", {}, tool_choice=_allowed("none", "f")),
    chat("allowed tools without tools", "tool_choice needs tools: send the functions that may be called.",
          "tool_choice", tool_choice=_allowed("auto", "f")),
    _tools("a tool choice that is none", "tool_choice …", "tool_choice", {}, tool_choice="any"),
    _tools("parallel_tool_calls is a text", "parallel_tool_calls must be a valid boolean.", "parallel_tool_calls", {},
            parallel_tool_calls="no"),
]  # fmt: skip
