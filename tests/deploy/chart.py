"""Renders the chart where helm is not to be had: the part of Go's templates that the chart uses, and no more.

Understood are `if`/`else`/`end`, `with`, `range`, `define`, `include`, dots, literals of numbers and strings, pipes,
trimmed white space, and the functions below. Whatever else a template says is an error here, so the chart stays within
that part.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "quire"
_ACTION = re.compile(r"(\s*)\{\{(-?)\s*(.*?)\s*(-?)\}\}(\s*)", re.S)
_BLOCKS = ("if", "with", "range", "define")


@dataclass
class Node:
    """A piece of text, an action, or a block with what it holds."""

    kind: str
    text: str = ""
    body: list[Node] = field(default_factory=list)
    otherwise: list[Node] = field(default_factory=list)


def _tokens(source: str) -> Iterator[Node]:
    position = 0
    for match in _ACTION.finditer(source):
        before, trim_left, action, trim_right, after = match.groups()
        yield Node("text", source[position : match.start()] + ("" if trim_left else before))
        yield Node("action", action)
        position = match.end() if trim_right else match.end() - len(after)
    yield Node("text", source[position:])


def _parse(tokens: Iterator[Node]) -> tuple[list[Node], str]:
    """Nodes up to the next `else` or `end`, and which of them it was."""
    nodes: list[Node] = []
    for token in tokens:
        word, _, rest = token.text.partition(" ")
        if token.kind == "text":
            nodes.append(token)
        elif word in ("end", "else"):
            assert not rest, token.text
            return nodes, word
        elif word in _BLOCKS:
            body, closed_by = _parse(tokens)
            otherwise = _parse(tokens)[0] if closed_by == "else" else []
            nodes.append(Node(word, rest, body, otherwise))
        else:
            nodes.append(token)
    return nodes, ""


class Renderer:
    """The chart's templates with some values."""

    def __init__(self, release: str, values: dict[str, Any]) -> None:
        self._root = {"Values": values, "Release": {"Name": release}}
        self._named: dict[str, list[Node]] = {}

    def render(self, path: Path) -> str:
        """One file; its definitions are kept for others."""
        source = path.read_text()
        # The pattern takes white space on both sides, so two actions in a row must not share it.
        nodes, _ = _parse(_tokens(re.sub(r"\}\}(?=\s*\{\{)", "}}\0", source)))
        return self._all(nodes, self._root).replace("\0", "")

    def _all(self, nodes: list[Node], dot: Any) -> str:
        return "".join(self._one(node, dot) for node in nodes)

    def _one(self, node: Node, dot: Any) -> str:
        if node.kind == "text":
            return node.text
        if node.kind == "action":
            value = self._pipe(node.text, dot)
            return str(value).lower() if isinstance(value, bool) else str(value)
        if node.kind == "define":
            self._named[shlex.split(node.text)[0]] = node.body
            return ""
        value = self._pipe(node.text, dot)
        if node.kind == "range":
            return "".join(self._all(node.body, item) for item in value)
        inside = value if node.kind == "with" else dot
        return self._all(node.body, inside) if value else self._all(node.otherwise, dot)

    def _pipe(self, text: str, dot: Any) -> Any:
        first, *rest = (part.strip() for part in text.split("|"))
        value = self._call(re.findall(r'"[^"]*"|\S+', first), dot)
        for part in rest:
            name, *arguments = part.split()
            value = self._function(name)(*[self._value(a, dot) for a in arguments], value)
        return value

    def _call(self, words: list[str], dot: Any) -> Any:
        if len(words) == 1:
            return self._value(words[0], dot)
        name, *arguments = words
        return self._function(name)(*[self._value(argument, dot) for argument in arguments])

    def _value(self, word: str, dot: Any) -> Any:
        if word == ".":
            return dot
        if re.fullmatch(r"-?\d+|\"[^\"]*\"", word):
            return yaml.safe_load(word)
        assert re.fullmatch(r"(\.\w+)+", word), f"not understood: {word}"
        value = dot
        for name in word[1:].split("."):
            value = value[name]  # a name that no value has is an error, where helm would say nothing
        return value

    def _function(self, name: str) -> Callable[..., Any]:
        return {
            "include": lambda named, dot: self._all(self._named[named], dot).strip("\0"),
            "nindent": lambda width, text: "\n" + "\n".join(" " * width + line for line in text.splitlines()),
            "toYaml": lambda value: yaml.safe_dump(value, default_flow_style=False).rstrip(),
            "quote": lambda value: '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"',
            "printf": lambda form, *values: form % values,
            "not": lambda value: not value,
            "add": lambda *values: sum(values),
            "div": lambda left, right: left // right,
        }[name]


def merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Values with others in their place, as `helm --values` does it."""
    result = deepcopy(values)
    for name, change in changes.items():
        both = isinstance(change, dict) and isinstance(result.get(name), dict)
        result[name] = merged(result[name], change) if both else change
    return result


def render_chart(changes: dict[str, Any], release: str = "chat") -> str:
    """All resources of the chart, as one YAML text of several documents."""
    renderer = Renderer(release, merged(yaml.safe_load((CHART / "values.yaml").read_text()), changes))
    for path in sorted(CHART.glob("templates/*.tpl")):
        renderer.render(path)
    return "\n---\n".join(renderer.render(path) for path in sorted(CHART.glob("templates/*.yaml")))
