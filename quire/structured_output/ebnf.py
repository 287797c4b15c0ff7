"""Grammars in EBNF (`root ::= …`, as llama.cpp and XGrammar write them) as Lark.

Owns the syntax: strings and character classes with escapes, groups, `|`, `* + ?`, `{m,n}`, comments. Rules that are
regular, and regular stretches of other rules, become single terminals: letter by letter, a large vocabulary would take
too long. As in Lark, a terminal takes as much of the text as it can.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from quire.structured_output.lark_text import quoted

MAX_DEPTH = 100
"""Groups inside each other."""
_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*) | (?P<define>(?P<name>[A-Za-z_][\w.-]*)\s*::=) | (?P<ref>[A-Za-z_][\w.-]*)
    | (?P<string>"(?:[^"\\\n]|\\.)*") | (?P<chars>\[\^?(?:[^\]\\\n]|\\.)*\]) | (?P<count>\{\s*\d+\s*(?:,\s*\d*\s*)?\})
    | (?P<mark>[()|*+?.])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
_LETTERS = {"n": "\n", "r": "\r", "t": "\t", "0": "\0", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}


@dataclass(frozen=True)
class _Terminal:
    """A string or a set of characters, as Lark."""

    lark: str


@dataclass(frozen=True)
class _Ref:
    name: str


@dataclass(frozen=True)
class _Repeat:
    item: _Node
    count: str
    """`*`, `+`, `?` or `{m,n}`."""


@dataclass(frozen=True)
class _Sequence:
    items: tuple[_Node, ...]


@dataclass(frozen=True)
class _Choice:
    items: tuple[_Node, ...]


_Node = _Terminal | _Ref | _Repeat | _Sequence | _Choice
_EMPTY = _Sequence(())


def is_ebnf(text: str) -> bool:
    """Whether a grammar is EBNF; else it is Lark."""
    return "::=" in text


def lark_from_ebnf(text: str) -> str:
    """The same grammar as Lark.

    Raises:
        ValueError: It is malformed; the message says where.
    """
    rules = _Parser(text).rules()
    if "root" not in rules:
        raise ValueError("the grammar has no rule 'root'")
    _check_references(rules)
    rules = {name: _without_tail_recursion(name, node) for name, node in rules.items()}
    return _Writer(rules).lark()


class _Parser:
    """Reads rules from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = _tokens(text)
        self._next = 0
        self._depth = 0

    def rules(self) -> dict[str, _Node]:
        rules: dict[str, _Node] = {}
        while self._kind() == "define":
            name = self._take().group("name")
            if name in rules:
                raise ValueError(f"the rule '{name}' stands twice")
            rules[name] = self._choice()
        if self._kind():
            raise self._error("a rule, as in 'root ::= …', is expected")
        return rules

    def _choice(self) -> _Node:
        items = [self._sequence()]
        while self._is("|"):
            self._take()
            items.append(self._sequence())
        return items[0] if len(items) == 1 else _Choice(tuple(items))

    def _sequence(self) -> _Node:
        items: list[_Node] = []
        while self._kind() not in ("", "define") and not self._is("|") and not self._is(")"):
            items.append(self._repeated())
        return items[0] if len(items) == 1 else _Sequence(tuple(items))

    def _repeated(self) -> _Node:
        item = self._item()
        while self._kind() == "count" or self._is("*") or self._is("+") or self._is("?"):
            count = self._take().group()
            item = _Repeat(item, re.sub(r"\s", "", count))
        return item

    def _item(self) -> _Node:
        if self._is("("):
            return self._group()
        if self._is("."):
            self._take()
            return _Terminal(r"/[^\n]/")
        match self._kind():
            case "string":
                text = _unescape(self._take().group()[1:-1])
                return _Terminal(quoted(text)) if text else _EMPTY
            case "chars":
                return _Terminal(f"/{_characters(self._take().group())}/")
            case "ref":
                return _Ref(self._take().group())
        raise self._error("a string, a set of characters, a rule's name or '(' is expected")

    def _group(self) -> _Node:
        self._take()
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"groups are nested more than {MAX_DEPTH} deep")
        inner = self._choice()
        self._depth -= 1
        if not self._is(")"):
            raise self._error("')' is expected")
        self._take()
        return inner

    def _kind(self) -> str:
        return self._tokens[self._next].lastgroup or "" if self._next < len(self._tokens) else ""

    def _is(self, mark: str) -> bool:
        return self._kind() == "mark" and self._tokens[self._next].group() == mark

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


def _check_references(rules: dict[str, _Node]) -> None:
    for name, node in rules.items():
        for used in _references(node):
            if used not in rules:
                raise ValueError(f"the rule '{name}' uses '{used}', which is not defined")


def _references(node: _Node) -> set[str]:
    match node:
        case _Ref(name):
            return {name}
        case _Repeat(item, _):
            return _references(item)
        case _Sequence(items) | _Choice(items):
            return set().union(*map(_references, items)) if items else set()
    return set()


def _without_tail_recursion(name: str, node: _Node) -> _Node:
    """`a ::= "x" a | "y"` is `a ::= "x"* "y"`, which is regular (Arden's rule)."""
    if not isinstance(node, _Choice):
        return node
    loops, ends = [], []
    for each in node.items:
        items = each.items if isinstance(each, _Sequence) else (each,)
        if items and items[-1] == _Ref(name):
            loops.append(_Sequence(items[:-1]))
            items = items[:-1]
        else:
            ends.append(each)
        if any(name in _references(item) for item in items):
            return node
    if not loops or not ends:
        return node
    return _Sequence((_Repeat(_Choice(tuple(loops)), "*"), _Choice(tuple(ends))))


class _Writer:
    """Writes the rules that the root reaches: regular ones as terminals (T…), others as rules (r…)."""

    def __init__(self, rules: dict[str, _Node]) -> None:
        self._rules = rules
        self._regular = _regular(rules)
        self._numbers = {name: number for number, name in enumerate(rules)}
        self._written: list[str] = []
        self._num_stretches = 0

    def lark(self) -> str:
        for name in self._reached():
            if name in self._regular:
                self._written.append(f"T{self._numbers[name]}: {self._terminal(self._rules[name])}")
            else:
                self._written.append(f"r{self._numbers[name]}: {self._rule(self._rules[name])}")
        return "\n".join([f"start: {self._name('root')}", *self._written])

    def _reached(self) -> list[str]:
        found, open_names = {"root": None}, ["root"]
        while open_names:
            for name in sorted(_references(self._rules[open_names.pop()])):
                if name not in found:
                    found[name] = None
                    open_names.append(name)
        return list(found)

    def _name(self, rule: str) -> str:
        return f"{'T' if rule in self._regular else 'r'}{self._numbers[rule]}"

    def _terminal(self, node: _Node) -> str:
        match node:
            case _Terminal(lark):
                return lark
            case _Ref(name):
                return self._name(name)
            case _Repeat(item, count):
                return f"({self._terminal(item)}){count}"
            case _Sequence(items):
                return " ".join(f"({self._terminal(item)})" for item in items) or '""'
            case _Choice(items):
                return " | ".join(f"({self._terminal(item)})" for item in items)

    def _rule(self, node: _Node) -> str:
        """A part of a rule that is not regular; its regular stretches become terminals."""
        if _is_regular(node, self._regular):
            return self._stretch([node])
        match node:
            case _Ref(name):
                return self._name(name)
            case _Repeat(item, count):
                return f"({self._rule(item)}){count}"
            case _Choice(items):
                return " | ".join(f"({self._rule(item)})" for item in items)
            case _Sequence(items):
                return self._sequence(items)
        raise AssertionError("a terminal is regular")

    def _sequence(self, items: tuple[_Node, ...]) -> str:
        parts: list[str] = []
        stretch: list[_Node] = []
        for item in items:
            if _is_regular(item, self._regular):
                stretch.append(item)
                continue
            if stretch:
                parts.append(self._stretch(stretch))
                stretch = []
            parts.append(f"({self._rule(item)})")
        if stretch:
            parts.append(self._stretch(stretch))
        return " ".join(parts)

    def _stretch(self, items: list[_Node]) -> str:
        if items == [_EMPTY]:
            return '""'
        self._num_stretches += 1
        name = f"S{self._num_stretches}"
        self._written.append(f"{name}: {self._terminal(_Sequence(tuple(items)))}")
        return name


def _regular(rules: dict[str, _Node]) -> frozenset[str]:
    """Rules that use, in the end, only terminals: found from the leaves."""
    users: dict[str, set[str]] = {name: set() for name in rules}
    missing = {name: _references(node) for name, node in rules.items()}
    for name, used in missing.items():
        for each in used:
            users[each].add(name)
    ready = [name for name, used in missing.items() if not used]
    regular = set(ready)
    while ready:
        done = ready.pop()
        for user in users[done]:
            missing[user].discard(done)
            if not missing[user] and user not in regular:
                regular.add(user)
                ready.append(user)
    return frozenset(regular)


def _is_regular(node: _Node, regular: frozenset[str]) -> bool:
    return _references(node) <= regular
