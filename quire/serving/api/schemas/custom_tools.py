"""Custom tools, whose input is text: a model calls each as a function with one argument, `input`.

Such calls of earlier turns become calls of that function again, so that a prompt begins as the one before it ended.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from quire.errors import RequestError

_CUT_INPUT = re.compile(r'\s*\{\s*"input"\s*:\s*"(.*)', re.DOTALL)
_LONGEST_ESCAPE = 12
"""Characters of the longest escape in JSON: two surrogates."""


def custom_function(tool: Mapping[str, Any], form: Any, place: str) -> dict[str, Any]:
    """Return the function that a model is shown for a custom tool.

    Args:
        tool: Its `name` and `description`.
        form: The format of its input: of type `text`, or `grammar` with `syntax` and `definition`; None for text.
        place: The tool's name in errors.

    Raises:
        RequestError: The tool is wrong.
    """
    if not isinstance(tool.get("name"), str):
        raise RequestError(f"{place}.name must be the name of the tool.", param=f"{place}.name")
    form = form or {"type": "text"}
    kind, grammar = (form.get("type"), form) if isinstance(form, dict) else (None, {})
    syntax, definition = grammar.get("syntax"), grammar.get("definition")
    is_grammar = kind == "grammar" and syntax in ("lark", "regex") and isinstance(definition, str)
    if kind != "text" and not is_grammar:
        raise RequestError(
            f"{place}.format must be of type text, or grammar with syntax (lark or regex) and definition.",
            param=f"{place}.format",
        )
    about = tool.get("description")
    lines = [about] if isinstance(about, str) else []
    text: dict[str, Any] = {"type": "string"}
    if is_grammar:
        lines.append(f"input must match this {'Lark grammar' if syntax == 'lark' else 'regular expression'}:")
        lines.append(str(definition))
    if syntax == "regex":
        text["pattern"] = f"^(?:{definition})$"
    parameters = {"type": "object", "properties": {"input": text}, "required": ["input"]}
    function = {"name": tool["name"], "description": "\n".join(lines), "parameters": parameters}
    return {**function, "strict": True} if is_grammar else function


def lark_of_input(grammar: Any) -> str:
    """Return the definition of a grammar in Lark; empty for other grammars, and for none."""
    return str(grammar.get("definition")) if isinstance(grammar, dict) and grammar.get("syntax") == "lark" else ""


def custom_input(arguments: str) -> str:
    """Return the text of a call whose arguments a model wrote so; also where it named the text otherwise, or was cut
    off within it."""
    try:
        value = json.loads(arguments)
    except ValueError:
        value = None
    if isinstance(value, dict):
        texts = [each for name, each in value.items() if isinstance(each, str) and (name == "input" or len(value) == 1)]
        return texts[0] if texts else arguments
    if isinstance(value, str):
        return value
    cut = _CUT_INPUT.fullmatch(arguments)
    if cut is None:
        return arguments
    for end in range(len(cut[1]), max(-1, len(cut[1]) - _LONGEST_ESCAPE), -1):
        try:
            return str(json.loads(f'"{cut[1][:end]}"', strict=False))
        except ValueError:
            continue  # an escape was cut
    return arguments


def custom_arguments(text: str) -> str:
    """Return the arguments that a model writes for this input."""
    return json.dumps({"input": text}, ensure_ascii=False)
