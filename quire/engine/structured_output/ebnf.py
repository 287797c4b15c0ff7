"""Grammars in EBNF (`root ::= …`) as Lark.

Rules that are regular, and regular stretches of other rules, become single terminals: letter by letter, a large
vocabulary would take too long. As in Lark, a terminal takes as much of the text as it can.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import groupby

from quire.engine.structured_output.ebnf_parser import EMPTY, Choice, Node, Parser, Ref, Repeat, Sequence, Terminal

_DEFINITION = re.compile(r"^\s*[\w.-]+\s*::=", re.MULTILINE)


def is_ebnf(text: str) -> bool:
    """Whether a grammar is EBNF, not Lark."""
    return _DEFINITION.search(text) is not None


def lark_from_ebnf(text: str) -> str:
    """Translate an EBNF grammar to Lark. Raises ValueError for a malformed grammar; the message says where."""
    return lark_of(Parser(text).rules())


def lark_of(rules: Mapping[str, Node], root: str = "root", but: str = "") -> str:
    """The rules as Lark, whose first line is `start:` and what `root` is called there: T… if it is regular. All
    terminals are `but` this, which is added to their bodies. Raises ValueError if a rule is missing."""
    if root not in rules:
        raise ValueError(f"the grammar has no rule '{root}'")
    for name, node in rules.items():
        for used in _references(node):
            if used not in rules:
                raise ValueError(f"the rule '{name}' uses '{used}', which is not defined")
    return _Writer({name: _without_tail_recursion(name, node) for name, node in rules.items()}, root, but).lark()


def _references(node: Node) -> set[str]:
    match node:
        case Ref(name):
            return {name}
        case Repeat(item, _):
            return _references(item)
        case Sequence(items) | Choice(items):
            return set().union(*map(_references, items)) if items else set()
    return set()


def _without_tail_recursion(name: str, node: Node) -> Node:
    """`a ::= "x" a | "y"` is `a ::= "x"* "y"`, which is regular (Arden's rule)."""
    if not isinstance(node, Choice):
        return node
    loops, ends = [], []
    for each in node.items:
        items = each.items if isinstance(each, Sequence) else (each,)
        if items and items[-1] == Ref(name):
            loops.append(Sequence(items[:-1]))
            items = items[:-1]
        else:
            ends.append(each)
        if any(name in _references(item) for item in items):
            return node
    if not loops or not ends:
        return node
    return Sequence((Repeat(Choice(tuple(loops)), "*"), Choice(tuple(ends))))


class _Writer:
    """Writes the rules that the root reaches: regular ones as terminals (T…), others as rules (r…)."""

    def __init__(self, rules: dict[str, Node], root: str, but: str) -> None:
        self._rules = rules
        self._root = root
        self._but = but
        self._regular = _regular(rules)
        self._numbers = {name: number for number, name in enumerate(rules)}
        self._written: list[str] = []
        self._num_stretches = 0

    def lark(self) -> str:
        for name in self._reached():
            node = self._rules[name]
            body = self._whole(node) if name in self._regular else self._rule(node)
            self._written.append(f"{self._name(name)}: {body}")
        return "\n".join([f"start: {self._name(self._root)}", *self._written])

    def _reached(self) -> list[str]:
        found, open_names = {self._root: None}, [self._root]
        while open_names:
            for name in sorted(_references(self._rules[open_names.pop()])):
                if name not in found:
                    found[name] = None
                    open_names.append(name)
        return list(found)

    def _name(self, rule: str) -> str:
        return f"{'T' if rule in self._regular else 'r'}{self._numbers[rule]}"

    def _whole(self, node: Node) -> str:
        """The body of a terminal."""
        return f"({self._terminal(node)}){self._but}" if self._but else self._terminal(node)

    def _terminal(self, node: Node) -> str:
        match node:
            case Terminal(lark):
                return lark
            case Ref(name):
                return self._name(name)
            case Repeat(item, count):
                return f"({self._terminal(item)}){count}"
            case Sequence(items):
                return " ".join(f"({self._terminal(item)})" for item in items) or '""'
            case Choice(items):
                return " | ".join(f"({self._terminal(item)})" for item in items)

    def _rule(self, node: Node) -> str:
        """A part of a rule that is not regular; its regular stretches become terminals."""
        if _is_regular(node, self._regular):
            return self._stretch([node])
        match node:
            case Ref(name):
                return self._name(name)
            case Repeat(item, count):
                return f"({self._rule(item)}){count}"
            case Choice(items):
                return " | ".join(f"({self._rule(item)})" for item in items)
            case Sequence(items):
                return self._sequence(items)
        raise AssertionError("a terminal is regular")

    def _sequence(self, items: tuple[Node, ...]) -> str:
        parts = []
        for regular, group in groupby(items, lambda item: _is_regular(item, self._regular)):
            stretch = list(group)
            parts += [self._stretch(stretch)] if regular else [f"({self._rule(item)})" for item in stretch]
        return " ".join(parts)

    def _stretch(self, items: list[Node]) -> str:
        if items == [EMPTY]:
            return '""'
        self._num_stretches += 1
        name = f"S{self._num_stretches}"
        self._written.append(f"{name}: {self._whole(Sequence(tuple(items)))}")
        return name


def _regular(rules: dict[str, Node]) -> frozenset[str]:
    """Rules that use, in the end, only terminals. They are found from the leaves."""
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


def _is_regular(node: Node, regular: frozenset[str]) -> bool:
    return _references(node) <= regular
