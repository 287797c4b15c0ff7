"""Structural tags as a grammar: text in which certain tags are followed by a certain form, as tool calls are.

Reads both forms that vLLM takes: `structures` with `triggers`, and `format`, whose parts nest. A tag's texts may
contain the model's special tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llguidance import regex_to_lark

from quire.text.output_parsers.lark_rules import quoted

SpecialTokens = Mapping[str, int]
"""Ids of tokens that stand for no text, by their names."""
TEXT = "/(.|\\n)*/"
MAX_DEPTH = 32

Parts = dict[str, Any]


def grammar_from_structural_tag(
    text: str, schema: Callable[[Any], Any], lark_of: Callable[[str], str], special: SpecialTokens
) -> str:
    """Return the grammar of a structural tag, a JSON object. `schema` prepares a JSON schema, and `lark_of` translates
    a grammar in a request's syntax to Lark. Raises ValueError if the tag is malformed, or has a part that is not
    supported."""
    tag = json.loads(text)
    if isinstance(tag.get("format"), dict):
        top = tag["format"]
    else:
        top = {
            "type": "triggered_tags",
            "triggers": _list(tag, "triggers", "the structural tag"),
            "tags": [_legacy(structure) for structure in _list(tag, "structures", "the structural tag")],
        }
    writer = _Writer(schema, lark_of, special)
    start = writer.expression(top, last=True, depth=0)
    return writer.grammar(start)


def _legacy(structure: Any) -> Parts:
    schema = structure.get("schema") if isinstance(structure, dict) else None
    if schema is None:
        raise ValueError("each of structures needs begin, schema and end")
    content = {"type": "json_schema", "json_schema": schema}
    return {"type": "tag", "begin": structure.get("begin"), "content": content, "end": structure.get("end", "")}


class _Writer:
    """Writes rules, and says by which expressions they are used."""

    def __init__(self, schema: Callable[[Any], Any], lark_of: Callable[[str], str], special: SpecialTokens) -> None:
        self._schema = schema
        self._lark_of = lark_of
        self._special = special
        self._rules: list[str] = []
        self._grammars: list[dict[str, str]] = []
        self._kinds: dict[str, Callable[[Parts, bool, int], str]] = {
            "any_text": self._any_text,
            "const_string": lambda part, last, depth: self._literal(_text(part, "value")),
            "grammar": self._grammar,
            "json_schema": self._json_schema,
            "or": self._or,
            "regex": lambda part, last, depth: pattern(_text(part, "pattern")),
            "sequence": self._sequence,
            "tag": self._tag,
            "tags_with_separator": self._tags_with_separator,
            "triggered_tags": self._triggered_tags,
        }

    def grammar(self, start: str) -> str:
        """The whole grammar."""
        lark = "\n".join([f"start: {start}", *self._rules])
        if not self._grammars:
            return lark
        return json.dumps({"grammars": [{"name": "structural_tag", "lark_grammar": lark}, *self._grammars]})

    def expression(self, part: Any, *, last: bool, depth: int) -> str:
        """A part; `last` if nothing follows it."""
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in self._kinds:
            raise ValueError(f"'{str(kind)[:64]}' is not a supported part of a structural tag: use one of "
                             f"{', '.join(self._kinds)}")  # fmt: skip
        if depth > MAX_DEPTH:
            raise ValueError(f"the parts are nested more than {MAX_DEPTH} deep")
        return self._kinds[kind](part, last, depth + 1)

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def _literal(self, text: str) -> str:
        return literal(text, self._special) or '""'

    def _any_text(self, part: Parts, last: bool, depth: int) -> str:
        if not last:
            raise ValueError("any_text must come last, or in a tag with an end")
        return TEXT

    def _grammar(self, part: Parts, last: bool, depth: int) -> str:
        name = f"g{len(self._grammars)}"
        self._grammars.append({"name": name, "lark_grammar": self._lark_of(_text(part, "grammar"))})
        return f"@{name}"

    def _json_schema(self, part: Parts, last: bool, depth: int) -> str:
        schema = part.get("json_schema")
        if not isinstance(schema, dict | bool):
            raise ValueError("json_schema must be a JSON schema")
        return self._rule(f"%json {json.dumps(self._schema(schema))}")

    def _or(self, part: Parts, last: bool, depth: int) -> str:
        parts = _list(part, "elements", "or")
        return f"({' | '.join(self.expression(each, last=last, depth=depth) for each in parts)})"

    def _sequence(self, part: Parts, last: bool, depth: int) -> str:
        parts = _list(part, "elements", "sequence")
        end = len(parts) - 1
        return " ".join(self.expression(each, last=last and i == end, depth=depth) for i, each in enumerate(parts))

    def _tag(self, part: Parts, last: bool, depth: int, begin: str | None = None) -> str:
        begin = _text(part, "begin") if begin is None else begin
        ends = part.get("end", "")
        ends = ends if isinstance(ends, list) else [ends]
        if not ends or not all(isinstance(end, str) for end in ends):
            raise ValueError("a tag's end must be a text or a list of texts")
        content = part.get("content")
        opened = literal(begin, self._special)
        if isinstance(content, dict) and content.get("type") == "any_text" and all(ends):
            closed = self._or_rule([self._text_until(end) for end in ends])
            return f"{opened} {closed}"
        inner = self.expression(content, last=last and not any(ends), depth=depth)
        closed = self._or_rule([self._literal(end) for end in ends]) if any(ends) else ""
        return f"{opened} {inner} {closed}"

    def _tags_with_separator(self, part: Parts, last: bool, depth: int) -> str:
        tags = self._or_rule([self._tag(tag, False, depth) for tag in _list(part, "tags", "tags_with_separator")])
        separator = self._literal(_text(part, "separator"))
        found = tags if part.get("stop_after_first") else f"{tags} ({separator} {tags})*"
        return f"({found})" if part.get("at_least_one") else f"({found})?"

    def _triggered_tags(self, part: Parts, last: bool, depth: int) -> str:
        """Free text in which each trigger begins one of its tags. With `at_least_one` a tag comes first."""
        triggers = _list(part, "triggers", "triggered_tags")
        tags = _list(part, "tags", "triggered_tags")
        rest: dict[str, list[str]] = {}
        for tag in tags:
            begin = _text(tag, "begin")
            trigger = next((each for each in triggers if isinstance(each, str) and each and begin.startswith(each)), "")
            if not trigger:
                raise ValueError(f"no trigger begins the tag {quoted(begin[:64])}")
            rest.setdefault(trigger, []).append(self._tag(tag, False, depth, begin=begin[len(trigger) :]))
        bodies = {trigger: self._or_rule(each) for trigger, each in rest.items()}
        first = self._or_rule([f"{literal(trigger, self._special)} {body}" for trigger, body in bodies.items()])
        later = self._or_rule([f"{self._text_until(trigger)} {body}" for trigger, body in bodies.items()])
        if part.get("stop_after_first"):
            return first if part.get("at_least_one") else f"({later} | {TEXT})"
        tail = self._rule(TEXT) if last else ""
        return f"{first} {later}* {tail}" if part.get("at_least_one") else f"{later}* {tail}"

    def _text_until(self, text: str) -> str:
        """Any text up to and with the first `text` in it."""
        parts = literal(text, self._special)
        if parts.startswith("<["):
            return f"{self._rule(TEXT)} {parts}"
        head, _, more = parts.partition(" <[")
        return " ".join([self._rule(f"{TEXT} {head}", "[lazy]"), f"<[{more}" if more else ""]).strip()

    def _or_rule(self, alternatives: Sequence[str]) -> str:
        return self._rule(" | ".join(alternatives))


def _list(part: Any, name: str, what: str) -> list[Any]:
    value = part.get(name) if isinstance(part, dict) else None
    if not isinstance(value, list) or not value:
        raise ValueError(f"{what} needs a list of {name}")
    return value


def _text(part: Any, name: str) -> str:
    value = part.get(name) if isinstance(part, dict) else None
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a text")
    return value


def pattern(regex: str) -> str:
    """A regular expression, as Lark."""
    return f"/{regex_to_lark(regex, use_ascii='')}/"


def literal(text: str, special: SpecialTokens) -> str:
    """A text in which special tokens stand for themselves: "<|tool|>{" is the token <|tool|> and a brace."""
    if not text:
        return ""
    if not special:
        return quoted(text)
    names = "|".join(re.escape(name) for name in sorted(special, key=len, reverse=True))
    parts = [part for part in re.split(f"({names})", text) if part]
    return " ".join(f"<[{special[part]}]>" if part in special else quoted(part) for part in parts)
