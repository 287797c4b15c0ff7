"""The rules for a call's arguments: JSON objects by schema, or arguments that a format writes one by one.

The latter come in the order of the schema's properties. A keyword that they cannot honour is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from quire.errors import RequestError
from quire.text.output_parsers.argument_types import ArgumentTypes
from quire.text.output_parsers.events import Tool
from quire.text.output_parsers.formats import KeyedArguments
from quire.text.output_parsers.lark_rules import ANY_TEXT, LarkRules, escaped, quoted
from quire.text.output_parsers.schema_references import SchemaReferences

_SPACING = " ?"
"""White space within JSON, as templates show it to models: no line breaks, of which a model may write many."""
_KNOWN_OF_OBJECTS = frozenset((
    "type", "properties", "required", "additionalProperties", "title", "description", "$schema", "$defs",
    "definitions", "examples", "default",
))  # fmt: skip
_REFUSED_OF_STRINGS = ("$ref", "pattern", "format", "not", "allOf", "oneOf", "if")
_DOCUMENT = "quire:parameters"
"""Name of a function's parameters where they stand in a larger schema, so that their references lead there."""
_MAX_CHARACTERS = 4_096
"""Longest limit of a string's length that is enforced, since characters are counted."""


class ArgumentGrammar:
    """Writes the arguments of tools into `rules`, one by one as `keyed` says, or as a JSON object for None."""

    def __init__(self, rules: LarkRules, keyed: KeyedArguments | None) -> None:
        self._rules = rules
        self._keyed = keyed

    def rule(self, tool: Tool, *, enforced: bool) -> str:
        """The rule for a tool's arguments; any JSON object, or any of its arguments, if its schema is not enforced.
        Raises RequestError for a keyword that cannot be honoured in this format."""
        keyed = self._keyed
        if tool.input_grammar:
            return self._input(tool)
        if keyed is None:
            return _json(self._rules, tool, _of_object(tool.parameters if enforced else {}), "the parameters")
        tool = _with_properties(tool)
        properties = tool.parameters.get("properties") or {}
        listed = tool.parameters.get("required") or []
        if not isinstance(properties, Mapping) or not isinstance(listed, list):
            raise _refusal(tool, "the schema of its parameters", "properties")
        required = {key for key in listed if isinstance(key, str)} if enforced else set()
        if enforced:
            self._check_object(tool, properties, required)
        types = ArgumentTypes((tool,), tool.name)
        known = [key for key, each in properties.items() if each is not False]
        return self._in_order(
            {key: self._argument(keyed, tool, types, key, enforced) for key in known}, required, keyed
        )

    def _input(self, tool: Tool) -> str:
        """The arguments of a tool whose only one is text that has a grammar."""
        keyed, definition = self._keyed, tool.input_grammar
        if keyed is None:
            before, after = [self._rules.terminal(r'/\{ ?"input" ?: ?"/')], [self._rules.terminal(r'/" ?\}/')]
            within = self._rules.input(tool.name, definition, within_json=True)
            return self._rules.add("arguments", " ".join([*before, within, *after]))
        literal = self._rules.literal
        before, after = list(literal(f"{keyed.before_key}input{keyed.after_key}")), list(literal(keyed.after_value))
        if not keyed.text_end:
            within = self._rules.input(tool.name, definition, within_json=True)
            return self._rules.add("arguments", " ".join([*before, quoted('"'), within, quoted('"'), *after]))
        end = "" if after[0].startswith("<") else json.loads(after.pop(0))
        within = self._rules.input(tool.name, definition, within_json=False, never=keyed.never_in_text, end=end)
        return self._rules.add("arguments", " ".join([*before, within, *after]))

    def _check_object(self, tool: Tool, properties: Mapping[str, Any], required: set[str]) -> None:
        for keyword in tool.parameters:
            if keyword not in _KNOWN_OF_OBJECTS:
                self._leave_out(tool, "its parameters", keyword)
        if missing := sorted(required - properties.keys()):
            self._leave_out(tool, f"'{missing[0]}', which is no property,", "required")

    def _leave_out(self, tool: Tool, what: str, keyword: str) -> None:
        if tool.strict:
            raise _refusal(tool, what, keyword)
        self._rules.leave_out(tool.name, f"'{keyword}' of {what} of the function '{tool.name}'")

    def _in_order(self, given: Mapping[str, str], required: set[str], keyed: KeyedArguments) -> str:
        """The arguments, of which those that are not required may be missing; separators only between two."""
        separator = " ".join(self._rules.literal(keyed.separator))
        if not separator:
            each = (rule if key in required else f"{rule}?" for key, rule in given.items())
            return self._rules.add("arguments", " ".join(each) or '""')
        behind = '""'  # what may follow an argument, from the last one on
        alone = '""'  # the same in front of the first argument
        for key, rule in reversed(list(given.items())):
            optional = key not in required
            first = self._rules.add("first", f"{rule} {behind}" + (f" | {alone}" if optional else ""))
            behind = self._rules.add("next", f"{separator} {rule} {behind}" + (f" | {behind}" if optional else ""))
            alone = first
        return alone

    def _argument(self, keyed: KeyedArguments, tool: Tool, types: ArgumentTypes, key: str, enforced: bool) -> str:
        before = self._rules.literal(keyed.before_key + key + keyed.after_key)
        if keyed.text_end and types.may_be_string(key):
            schema = types.references.merged(tool.parameters["properties"][key])
            return self._rules.add("argument", " ".join([*before, self._text(keyed, tool, key, schema, enforced)]))
        value = _json(self._rules, tool, _of_property(tool.parameters, key) if enforced else {}, f"'{key}'")
        return self._rules.add("argument", " ".join([*before, value, *self._rules.literal(keyed.after_value)]))

    def _text(self, keyed: KeyedArguments, tool: Tool, key: str, schema: Mapping[str, Any], enforced: bool) -> str:
        """A string as it stands, and what ends the argument."""
        after = list(self._rules.literal(keyed.after_value))
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if enforced and values and isinstance(values, list):
            texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
            return f"({' | '.join(map(quoted, texts))}) {' '.join(after)}"
        body = ANY_TEXT
        if enforced:
            if keyword := _unsupported_of_text(schema):
                self._leave_out(tool, f"'{key}'", keyword)
            body = _text_of_length(schema)
        for unwanted in keyed.never_in_text:
            body += f" & ~/(?s:.*){escaped(unwanted)}(?s:.*)/"
        name = self._rules.terminal(body)
        if after[0].startswith("<"):
            return " ".join([name, *after])
        return " ".join([self._rules.add("text", f"{name} {after[0]}", "[lazy]"), *after[1:]])


def object_rule(rules: LarkRules, tool: Tool, arguments_key: str, *, enforced: bool) -> str:
    """The rule of a call that is nothing but a JSON object: its name, and its arguments by this key."""
    if tool.input_grammar:
        raise RequestError(
            f"tools: the grammar of the input of '{tool.name}' cannot be combined with a form of the answer in this "
            "model's format of calls: leave one of them out.",
            param="tools",
        )
    arguments = _of_object(tool.parameters if enforced else {})
    schema = {
        "type": "object",
        "properties": {"name": {"const": tool.name}, arguments_key: {"$id": _DOCUMENT, **arguments}},
        "required": ["name", arguments_key],
        "additionalProperties": False,
    }
    return _json(rules, tool, schema, "the parameters")


def may_name(schema: Mapping[str, Any]) -> bool:
    """Whether JSON of this schema may be an object with a property 'name', as far as its outermost level tells."""
    closed = schema.get("x-quire", {}).get("closed", False)
    found = SchemaReferences(schema).resolved(schema)
    if not isinstance(found, Mapping) or found.get("type") not in ("object", None):
        return not isinstance(found, Mapping)
    properties = found.get("properties") or {}
    is_open = found.get("additionalProperties", not (closed and "properties" in found)) is not False
    return is_open or "patternProperties" in found or "name" in properties


def _json(rules: LarkRules, tool: Tool, schema: Mapping[str, Any], what: str) -> str:
    name = f"{what} of the function '{tool.name}'"
    return rules.json(schema, name=name, tool=tool.name, strict=tool.strict, whitespace=_SPACING)


def _of_object(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a function's arguments, which are an object even if the schema does not say so."""
    return schema if {"type", "anyOf", "oneOf", "allOf", "$ref"} & schema.keys() else {**schema, "type": "object"}


def _with_properties(tool: Tool) -> Tool:
    """A tool whose parameters list their properties, which may have been a reference to what lists them."""
    if not {"$ref", "allOf"} & tool.parameters.keys():
        return tool
    definitions = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    return replace(tool, parameters=definitions | SchemaReferences(tool.parameters).merged(tool.parameters))


def _of_property(parameters: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    schema = parameters["properties"][key]
    if isinstance(schema, bool):
        return {} if schema else {"not": {}}
    if "$ref" not in str(schema):
        return dict(schema)
    pointer = quote(key.replace("~", "~0").replace("/", "~1"))
    document = {"$id": _DOCUMENT, **parameters}
    return {"$defs": {"parameters": document}, "$ref": f"{document['$id']}#/properties/{pointer}"}


def _unsupported_of_text(schema: Mapping[str, Any]) -> str:
    """A keyword of a string's schema that is not enforced where it stands as it is; empty for none."""
    if refused := [keyword for keyword in _REFUSED_OF_STRINGS if keyword in schema]:
        return refused[0]
    alternatives = schema.get("anyOf")
    for alternative in alternatives if isinstance(alternatives, list) else ():
        if isinstance(alternative, Mapping) and alternative.keys() - {"type", "title", "description"}:
            return "anyOf"
    if _lengths(schema) is None:
        return "maxLength" if schema.get("maxLength") else "minLength"
    return ""


def _lengths(schema: Mapping[str, Any]) -> tuple[int, int | None] | None:
    """The bounds of a string's length; None if they are not enforced."""
    least, most = schema.get("minLength") or 0, schema.get("maxLength")
    if not isinstance(least, int) or not isinstance(most, int | None) or max(least, most or 0) > _MAX_CHARACTERS:
        return None
    return least, most


def _text_of_length(schema: Mapping[str, Any]) -> str:
    least, most = _lengths(schema) or (0, None)
    return f"/(?s:.{{{least},{'' if most is None else most}}})/" if least or most is not None else ANY_TEXT


def _refusal(tool: Tool, what: str, keyword: str) -> RequestError:
    return RequestError(
        f"tools: {what} of the function '{tool.name}' has '{keyword}', which cannot be enforced in this model's format "
        "of calls: leave it out, or 'strict' with tool_choice 'auto'.",
        param="tools",
    )
