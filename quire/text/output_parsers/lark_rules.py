"""Writing a grammar in Lark: rules with names of their own, literals in which special tokens are tokens.

Knows nothing about calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quire.errors import RequestError
from quire.structured_outputs_params import MAX_CONSTRAINT_BYTES
from quire.text.output_parsers.formats import NUMBER

ANY_TEXT = "/(?s:.*)/"
LEFT_OUT = "// x-quire: "
"""Begins a line that names a tool, and what is not enforced of its arguments, as JSON."""


class LarkRules:
    """The rules of one grammar while it is written. Special tokens are named by id: no text matches them."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._special_ids = special_ids
        self._rules: dict[str, str] = {}
        self._terminals: dict[str, str] = {}
        self._left_out: dict[str, list[str]] = {}
        self._size = 0
        tokens = sorted((*special_ids, NUMBER), key=len, reverse=True)
        self._tokens = re.compile("|".join(map(re.escape, tokens)))

    def is_special(self, token: str) -> bool:
        return token in self._special_ids

    def add(self, name: str, body: str, options: str = "") -> str:
        """Add a rule, and return its name, which is new. Raises RequestError if the grammar is longer than a
        constraint may be, before it is longer than memory."""
        self._size += len(body)
        if self._size > MAX_CONSTRAINT_BYTES:
            raise RequestError(
                f"tools: the grammar of their calls is limited to {MAX_CONSTRAINT_BYTES} bytes: send fewer or smaller "
                "schemas.",
                param="tools",
            )
        name = f"{name}_{len(self._rules)}"
        self._rules[name] = f"{name}{options}: {body}"
        return name

    def terminal(self, body: str) -> str:
        """The name of the terminal with this body, which is added once."""
        if body not in self._terminals:
            self._terminals[body] = f"T{len(self._terminals)}"
        return self._terminals[body]

    def literal(self, text: str) -> Iterator[str]:
        """The items that match a text: strings, special tokens, digits for NUMBER."""
        at = 0
        for match in self._tokens.finditer(text):
            if match.start() > at:
                yield quoted(text[at : match.start()])
            token = match.group()
            yield self.terminal("/[0-9]{1,4}/") if token == NUMBER else f"<[{self._special_ids[token]}]>"
            at = match.end()
        if at < len(text):
            yield quoted(text[at:])

    def json(
        self, schema: Mapping[str, Any], *, name: str = "", tool: str = "", strict: bool = True, **options: Any
    ) -> str:
        """Add a rule that matches JSON of a schema, which must be complete in itself and is as it was sent: whoever has
        the grammar compiled prepares it, by what its `x-quire` says. The client knows it by `name`. It is of the
        arguments of this `tool`, or of an answer. A `strict` schema is refused if it cannot be enforced in full;
        `options` are those of `prepare_schema`."""
        known = {key: value for key, value in schema.items() if key not in ("x-guidance", "x-quire")}
        spacing = {"whitespace_pattern": options["whitespace"]} if options.get("whitespace") is not None else {}
        asked = {"name": name, "tool": tool, "strict": strict, **options}
        return self.add("json", "%json " + json.dumps({**known, "x-guidance": spacing, "x-quire": asked}))

    def input(self, tool: str, definition: str, *, within_json: bool, never: Sequence[str] = (), end: str = "") -> str:
        """Add a rule that matches the input of a tool, by the grammar in Lark that a client has sent, and the `end` of
        it. Whoever has the grammar compiled rewrites that."""
        asked = {"definition": definition, "within_json": within_json, "never": never, "end": end}
        return self.add("input", "%lark " + json.dumps({"x-quire": tool, **asked}))

    def leave_out(self, tool: str, what: str) -> None:
        """Note what the grammar does not enforce of the arguments of a tool that is not strict."""
        self._left_out.setdefault(tool, []).append(what)

    def text_up_to(self, end: str) -> str:
        """Any text up to the first `end`, and that."""
        first, *rest = self.literal(end)
        if first.startswith("<"):
            return " ".join([self.terminal(ANY_TEXT), first, *rest])
        return " ".join([self.add("head", f"{self.terminal(ANY_TEXT)} {first}", "[lazy]"), *rest])

    def text_without_line(self, start: str) -> str:
        """Any text that has no line which begins with this pattern."""
        return self.terminal(rf"{ANY_TEXT} & ~/(?s:(.*\n)?[ \t\r\n]*{start}.*)/")

    def text(self, start: str) -> str:
        """The whole grammar."""
        terminals = [f"{name}: {body}" for body, name in self._terminals.items()]
        notes = [LEFT_OUT + json.dumps([tool, what]) for tool, what in self._left_out.items()]
        return "\n".join([*notes, f"start: {start}", *self._rules.values(), *terminals, ""])


def quoted(text: str) -> str:
    """A string of Lark."""
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """A part of a regular expression that matches this text alone."""
    return "".join("\\" + character if character in r"/.^$*+?()[]{}|\\" else character for character in text)
