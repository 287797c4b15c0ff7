"""Reads grammars in EBNF, as llama.cpp and XGrammar write them, into rules.

The syntax has strings and character classes with escapes, groups, `|`, `* + ?`, `{m,n}` and comments.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from quire.text.output_parsers.lark_rules import quoted

MAX_DEPTH = 100
"""How deep groups may be nested."""
_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*) | (?P<define>(?P<name>[A-Za-z_][\w.-]*)\s*::=) | (?P<ref>[A-Za-z_][\w.-]*)
    | (?P<string>"(?:[^"\\\n]|\\.)*") | (?P<chars>\[\^?(?:[^\]\\\n]|\\.)*\]) | (?P<count>\{\s*\d+\s*(?:,\s*\d*\s*)?\})
    | (?P<mark>[()|*+?.])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
_LETTERS = {"n": "\n", "r": "\r", "t": "\t", "0": "\0", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}


@dataclass(frozen=True)
class Terminal:
    """A string or a set of characters, as Lark."""

    lark: str


@dataclass(frozen=True)
class Ref:
    name: str


@dataclass(frozen=True)
class Repeat:
    item: Node
    count: str
    """`*`, `+`, `?` or `{m,n}`."""


@dataclass(frozen=True)
class Sequence:
    items: tuple[Node, ...]


@dataclass(frozen=True)
class Choice:
    items: tuple[Node, ...]


Node = Terminal | Ref | Repeat | Sequence | Choice
EMPTY = Sequence(())


class Parser:
    """Reads rules from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = _tokens(text)
        self._next = 0
        self._depth = 0

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        while self._peek() == "define":
            name = self._take().group("name")
            if name in rules:
                raise ValueError(f"the rule '{name}' stands twice")
            rules[name] = self._choice()
        if self._peek():
            raise self._error("a rule, as in 'root ::= …', is expected")
        return rules

    def _choice(self) -> Node:
        items = [self._sequence()]
        while self._peek() == "|":
            self._take()
            items.append(self._sequence())
        return items[0] if len(items) == 1 else Choice(tuple(items))

    def _sequence(self) -> Node:
        items: list[Node] = []
        while self._peek() not in ("", "define", "|", ")"):
            items.append(self._repeated())
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def _repeated(self) -> Node:
        item = self._item()
        while self._peek() in ("count", "*", "+", "?"):
            item = Repeat(item, re.sub(r"\s", "", self._take().group()))
        return item

    def _item(self) -> Node:
        match self._peek():
            case "(":
                return self._group()
            case ".":
                self._take()
                return Terminal(r"/[^\n]/")
            case "string":
                text = _unescape(self._take().group()[1:-1])
                return Terminal(quoted(text)) if text else EMPTY
            case "chars":
                return Terminal(f"/{_characters(self._take().group())}/")
            case "ref":
                return Ref(self._take().group())
        raise self._error("a string, a set of characters, a rule's name or '(' is expected")

    def _group(self) -> Node:
        self._take()
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"groups are nested more than {MAX_DEPTH} deep")
        inner = self._choice()
        self._depth -= 1
        if self._peek() != ")":
            raise self._error("')' is expected")
        self._take()
        return inner

    def _peek(self) -> str:
        """The kind of the next token, or the mark that it is; empty at the end."""
        if self._next == len(self._tokens):
            return ""
        token = self._tokens[self._next]
        return token.group() if token.lastgroup == "mark" else token.lastgroup or ""

    def _take(self) -> re.Match[str]:
        self._next += 1
        return self._tokens[self._next - 1]

    def _error(self, expected: str) -> ValueError:
        at = self._tokens[self._next].start() if self._next < len(self._tokens) else len(self._text)
        return ValueError(f"line {self._text.count(chr(10), 0, at) + 1} of the grammar: {expected}")


def _tokens(text: str) -> list[re.Match[str]]:
    tokens, at = [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            line = text.count("\n", 0, at) + 1
            raise ValueError(f"line {line} of the grammar: {quoted(text[at : at + 20])} cannot be read")
        at = match.end()
        if match.lastgroup != "space":
            tokens.append(match)
    return tokens


def _unescape(text: str) -> str:
    def character(match: re.Match[str]) -> str:
        number = match[1] or match[2] or match[3]
        if number:
            if int(number, 16) > 0x10FFFF:
                raise ValueError(f"{match[0]} is no character")
            return chr(int(number, 16))
        return _LETTERS.get(match[4], match[4])

    return _ESCAPE.sub(character, text)


def _characters(text: str) -> str:
    """A set of characters as a regular expression: `-` makes ranges unless it is escaped or at an end."""
    inner = text[1:-1]
    negated = inner.startswith("^")
    inner = inner[negated:]
    pieces = [match.group() for match in re.finditer(r"\\(?:x..|u....|U........|.)|.", inner, re.DOTALL)]
    written = []
    for place, piece in enumerate(pieces):
        if piece == "-" and 0 < place < len(pieces) - 1:
            written.append("-")
        elif piece in (r"\d", r"\w", r"\s", r"\D", r"\W", r"\S"):
            written.append(piece)
        else:
            written.append("".join(f"\\u{{{ord(character):x}}}" for character in _unescape(piece)))
    if not written:
        return r"(.|\n)" if negated else r"[^\s\S]"
    return f"[{'^' * negated}{''.join(written)}]"
