"""Grammars in Lark that clients send for the input of a tool, for a place within a call.

A model writes the input as the text of a JSON string, or as it is; so each string and regular expression of the grammar
is written anew, and what is regular becomes one terminal: the compiler's lexer would not find where a terminal ends if
the next one begins with an escape as well. Parts of Lark that cannot be kept, such as priorities and look-around, are
refused by name.

Source: the Lark documentation's grammar reference.
"""

from __future__ import annotations

import json
import re
import unicodedata
from typing import NamedTuple

from quire.engine.structured_output.ebnf import lark_of
from quire.engine.structured_output.ebnf_parser import EMPTY, Choice, Node, Ref, Repeat, Sequence, Terminal
from quire.text.output_parsers.lark_rules import quoted

MAX_DEPTH = 100
"""How deep groups may be nested."""
COMMON = {
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "CR": r"\r",
    "C_COMMENT": r"\/\*([^*]|\*+[^*\/])*\*+\/",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "DIGIT": "[0-9]",
    "ESCAPED_STRING": r'"([^"\\\n]|\\.)*"',
    "FLOAT": r"[0-9]+[eE][+\-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+\-]?[0-9]+)?",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "LCASE_LETTER": "[a-z]",
    "LETTER": "[A-Za-z]",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "NUMBER": r"[0-9]+([eE][+\-]?[0-9]+)?|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+\-]?[0-9]+)?",
    "SH_COMMENT": r"#[^\n]*",
    "SIGNED_FLOAT": r"[+\-]?([0-9]+[eE][+\-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+\-]?[0-9]+)?)",
    "SIGNED_INT": r"[+\-]?[0-9]+",
    "SIGNED_NUMBER": r"[+\-]?([0-9]+([eE][+\-]?[0-9]+)?|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+\-]?[0-9]+)?)",
    "SQL_COMMENT": r"--[^\n]*",
    "UCASE_LETTER": "[A-Z]",
    "WORD": "[A-Za-z]+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}
"""Terminals of Lark's grammar `common`, as regular expressions."""
_TOKEN = re.compile(
    r"""(?P<space>[ \t]+|(?://|\#)[^\n]*) | (?P<line>(?:\r?\n[ \t]*)+) | (?P<string>"(?:\\.|[^"\\\n])*"i?)
    | (?P<regex>/(?:\\.|[^/\\\n])+/[a-z]*) | (?P<import>%import[^\n]*?(?=[ \t]*(?://|\r?\n|\Z)))
    | (?P<directive>%[a-z]+)
    | (?P<rule>_?[a-z][_a-z0-9]*) | (?P<terminal>_?[A-Z][_A-Z0-9]*) | (?P<alias>->[ \t]*\w+) | (?P<range>\.\.)
    | (?P<count>[*+] | \?(?![a-z_]) | ~[ \t]*[0-9]+(?:[ \t]*\.\.[ \t]*[0-9]+)?
        | \{[ \t]*[0-9]+[ \t]*(?:,[ \t]*[0-9]*)?[ \t]*\})
    | (?P<mark>[()\[\]{}|?!:,.~&<>@]|[0-9]+)""",
    re.VERBOSE,
)  # fmt: skip
_IMPORT = re.compile(
    r"%import[ \t]+common(?:\.(?P<one>\w+)(?:[ \t]*->[ \t]*(?P<alias>_?[A-Z][_A-Z0-9]*))?|[ \t]*\((?P<more>[^()]*)\))"
)
_ESCAPE = re.compile(
    r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|[ux]\{([0-9A-Fa-f]{1,6})\}|U([0-9A-Fa-f]{8})|(.))", re.DOTALL
)
_LETTERS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "b": "\b", "0": "\0", "a": "\a"}
_CATEGORY = re.compile(r"\\([pP])(?:\{(\w\w?)\}|(\w))")
_QUANTIFIER = re.compile(r"[*+?]|\{[0-9]+(?:,[0-9]*)?\}")
_GROUP = re.compile(r"\((?:\?(?:P?<\w+>|(?P<flags>[a-z]*):))?")
_OF_JSON = ('"', "\\", *map(chr, range(32)))
_SPACES = "\t\n\v\f\r"
_CLASSES = "dDsSwW"
_UNKNOWN = {
    ".": "priorities", "{": "templates", "<": "special tokens", "@": "references to other grammars", "~": "negations",
    "&": "intersections",
}  # fmt: skip


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


_END = _Token("end", "", -1)


def input_grammar(definition: str, *, within_json: bool, never: tuple[str, ...] = (), end: str = "") -> str:
    """The grammar in llguidance's dialect, to stand in braces behind `%lark`.

    Args:
        definition: The grammar as the client sent it.
        within_json: Whether the text is that of a JSON string, instead of standing as it is.
        never: Texts that no terminal may have, because they would end the input.
        end: What follows the input.

    Raises:
        ValueError: The grammar is wrong, or has a part that cannot be kept. The message says what and where.
    """
    but = "".join(f" & ~/(?s:.*){''.join(map(_spelled, text))}(?s:.*)/" for text in never)
    written = lark_of(_Grammar(definition, _OF_JSON if within_json else ()).rules(), "start", but)
    if not end:
        return written
    first, _, rest = written.partition("\n")
    root = first.removeprefix("start: ")
    if not root.startswith("T"):
        return f"{first} {quoted(end)}\n{rest}"
    return f"start: all\nall[lazy]: {root} {quoted(end)}\n{rest}"


class _Grammar:
    """Reads a grammar from left to right."""

    def __init__(self, definition: str, special: tuple[str, ...]) -> None:
        self._definition = definition
        self._special = special
        self._tokens = _tokens(definition)
        self._next = 0
        self._depth = 0
        self._in_rule = True

    def rules(self) -> dict[str, Node]:
        """The rules and terminals by name. What is ignored stands in front of the start, and behind each terminal of a
        rule."""
        rules: dict[str, Node] = {}
        ignored: list[Node] = []
        while self._peek().kind != "end":
            token = self._take()
            if token.kind == "line":
                continue
            if token.text == "%ignore":
                self._in_rule = False
                ignored.append(self._choice())
            elif token.kind == "import":
                rules |= self._imported(token)
            elif token.kind in ("rule", "terminal"):
                if token.text in rules:
                    raise self._error(f"'{token.text}' is defined twice", token)
                self._in_rule = token.kind == "rule"
                self._colon(token)
                rules[token.text] = self._choice()
            elif token.text not in ("?", "!"):  # which form trees
                raise self._error(f"'{token.text[:40]}' is not supported", token)
        behind = Repeat(ignored[0] if len(ignored) == 1 else Choice(tuple(ignored)), "*") if ignored else EMPTY
        rules = {name: _spaced(node, behind) if name.islower() else node for name, node in rules.items()}
        if ignored and "start" in rules:
            rules["start"] = Sequence((behind, rules["start"]))
        return rules

    def _peek(self) -> _Token:
        return self._tokens[self._next] if self._next < len(self._tokens) else _END

    def _take(self) -> _Token:
        self._next += 1
        return self._tokens[self._next - 1]

    def _colon(self, name: _Token) -> None:
        sign = self._peek()
        if sign.text != ":":
            what = _UNKNOWN.get(sign.text, "options of rules" if sign.text == "[" else "")
            raise self._error(f"{what} are not supported" if what else f"':' is expected behind '{name.text}'", name)
        self._take()

    def _imported(self, token: _Token) -> dict[str, Node]:
        found = _IMPORT.fullmatch(token.text)
        if found is None:
            raise self._error("only terminals of 'common' can be imported", token)
        names = [each.strip() for each in (found["one"] or found["more"]).split(",")]
        for name in names:
            if name not in COMMON:
                raise self._error(f"'common' has no terminal '{name[:40]}' that is supported", token)
        return {found["alias"] or name: self._terminal(COMMON[name], "", token) for name in names}

    def _choice(self) -> Node:
        items = [self._sequence()]
        while self._continues():
            self._take()
            items.append(self._sequence())
        return items[0] if len(items) == 1 else Choice(tuple(items))

    def _continues(self) -> bool:
        """Whether another alternative follows, maybe in a new line."""
        ahead = self._next
        while ahead < len(self._tokens) and self._tokens[ahead].kind == "line":
            ahead += 1
        if ahead < len(self._tokens) and self._tokens[ahead].text == "|":
            self._next = ahead
            return True
        return False

    def _sequence(self) -> Node:
        items: list[Node] = []
        while True:
            token = self._peek()
            if token.kind == "line" and self._depth and not self._continues():
                self._take()
            elif token.kind in ("line", "end") or token.text in ("|", ")", "]"):
                break
            elif token.kind == "alias":
                self._take()
            else:
                items.append(self._repeated())
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def _repeated(self) -> Node:
        item = self._item()
        while (token := self._peek()).kind == "count":
            self._take()
            numbers = re.findall("[0-9]+", token.text)
            ranged = len(numbers) == 2 or "," in token.text
            count = f"{{{','.join(numbers)}{',' if ranged and len(numbers) == 1 else ''}}}" if numbers else token.text
            item = Repeat(item, count)
        return item

    def _item(self) -> Node:
        token = self._take()
        match token.kind:
            case "string":
                return self._string(token)
            case "regex":
                inner, _, flags = token.text[1:].rpartition("/")
                return self._terminal(inner, flags, token)
            case "terminal":
                return Ref(token.text)
            case "rule" if self._in_rule:
                return Ref(token.text)
            case "rule":
                raise self._error(f"the rule '{token.text}' cannot be a part of a terminal", token)
        if token.text in "([":
            grouped = self._group(")" if token.text == "(" else "]")
            return grouped if token.text == "(" else Repeat(grouped, "?")
        raise self._error(f"{_UNKNOWN.get(token.text, repr(token.text[:40]))} cannot stand here", token)

    def _group(self, end: str) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"groups are nested more than {MAX_DEPTH} deep", self._peek())
        inner = self._choice()
        self._depth -= 1
        if self._peek().text != end:
            raise self._error(f"'{end}' is expected", self._peek())
        self._take()
        return inner

    def _string(self, token: _Token) -> Node:
        value = _unescaped(token.text.removesuffix("i")[1:-1])
        if self._peek().kind == "range":
            self._take()
            last = self._take() if self._peek().kind == "string" else _END
            other = _unescaped(last.text[1:-1])
            if len(value) != 1 or len(other) != 1 or value > other:
                raise self._error("a range has one character at each end", token)
            return self._terminal(f"[{_spelled(value)}-{_spelled(other)}]", "", token)
        if not value:
            return EMPTY
        if token.text.endswith("i"):
            return self._terminal("".join(map(_spelled, value)), "i", token)
        return Terminal(quoted(json.dumps(value, ensure_ascii=False)[1:-1] if self._special else value))

    def _terminal(self, regex: str, flags: str, token: _Token) -> Terminal:
        if set(flags) - set("imslu"):
            raise self._error(f"flags '{flags}' of a regular expression are not supported", token)
        try:
            return Terminal(f"/{_Regex(regex, self._special, 'i' in flags, 's' in flags).text()}/")
        except ValueError as error:
            raise self._error(str(error), token) from None

    def _error(self, problem: str, token: _Token) -> ValueError:
        at = len(self._definition) if token.at < 0 else token.at
        return ValueError(f"line {self._definition.count(chr(10), 0, at) + 1} of the grammar: {problem}")


def _tokens(definition: str) -> list[_Token]:
    """The tokens of a grammar, but for white space and comments."""
    found, at = [], 0
    while at < len(definition):
        token = _TOKEN.match(definition, at)
        if token is None:
            line = definition.count("\n", 0, at) + 1
            raise ValueError(f"line {line} of the grammar: {quoted(definition[at : at + 20])} cannot be read")
        if token.lastgroup != "space":
            found.append(_Token(token.lastgroup or "", token.group(), at))
        at = token.end()
    return found


def _spaced(node: Node, behind: Node) -> Node:
    """A part of a rule, with what is ignored behind each terminal."""
    if behind == EMPTY:
        return node
    match node:
        case Repeat(item, count):
            return Repeat(_spaced(item, behind), count)
        case Sequence(items):
            return Sequence(tuple(_spaced(item, behind) for item in items))
        case Choice(items):
            return Choice(tuple(_spaced(item, behind) for item in items))
        case Ref(name) if name.islower():
            return node
    return Sequence((node, behind))


class _Regex:
    """Writes a regular expression anew: `special` characters become their escapes in JSON strings."""

    def __init__(self, text: str, special: tuple[str, ...], ignoring_case: bool = False, dot_all: bool = False) -> None:
        self._text = text
        self._special = special
        self._ignoring_case = ignoring_case
        self._dot_all = dot_all
        self._at = 0
        self._depth = 0

    def text(self) -> str:
        written = self._alternatives()
        if self._at < len(self._text):
            raise ValueError("a bracket of a regular expression closes nothing")
        return f"(?:{written})"

    def _alternatives(self) -> str:
        parts = [self._sequence()]
        while self._text.startswith("|", self._at):
            self._at += 1
            parts.append(self._sequence())
        return "|".join(parts)

    def _sequence(self) -> str:
        written = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            item = self._item()
            if (count := _QUANTIFIER.match(self._text, self._at)) is not None:
                self._at = count.end()
                item += count.group()
                if self._text[self._at : self._at + 1] in ("?", "+", "*", "{"):
                    raise ValueError("lazy and possessive repetitions in regular expressions are not supported")
            written.append(item)
        return "".join(written)

    def _item(self) -> str:
        character = self._text[self._at]
        if character == "(":
            return self._group()
        if character == "[":
            return self._class()
        if character in "^$":
            raise ValueError("'^' and '$' in regular expressions are not supported: a terminal matches as a whole")
        if character in "*+?" or _QUANTIFIER.match(self._text, self._at):
            raise ValueError("a regular expression repeats nothing")
        if character == ".":
            self._at += 1
            return self._set([], negated=True) if self._dot_all else self._set([("\n", "\n")], negated=True)
        found = self._character(" in regular expressions")
        if len(found) > 1:
            return self._set([found])
        return self._set([(found, found)])

    def _group(self) -> str:
        opened = _GROUP.match(self._text, self._at)
        assert opened is not None
        if self._text.startswith("?", opened.end()):
            raise ValueError("look-around and conditions in regular expressions are not supported")
        flags = opened["flags"] or ""
        if set(flags) - set("ims"):
            raise ValueError(f"flags '{flags}' of a regular expression are not supported")
        self._at = opened.end()
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ValueError(f"groups are nested more than {MAX_DEPTH} deep")
        before = self._ignoring_case, self._dot_all
        self._ignoring_case, self._dot_all = before[0] or "i" in flags, before[1] or "s" in flags
        inner = self._alternatives()
        self._ignoring_case, self._dot_all = before
        self._depth -= 1
        if not self._text.startswith(")", self._at):
            raise ValueError("a group of a regular expression does not end")
        self._at += 1
        return f"(?:{inner})"

    def _class(self) -> str:
        negated = self._text.startswith("^", self._at + 1)
        self._at += 1 + negated
        items: list[str | tuple[str, str]] = []
        while not self._text.startswith("]", self._at) or not items:
            if self._at >= len(self._text):
                raise ValueError("a class of a regular expression does not end")
            if self._text[self._at] == "[" or self._text.startswith(("&&", "--", "~~"), self._at):
                raise ValueError("classes within classes of regular expressions are not supported: write '[' as '\\['")
            first = self._character(" in classes of regular expressions")
            if len(first) > 1:
                items.append(first)
                continue
            last = first
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                last = self._character(" in classes of regular expressions") if self._at < len(self._text) else ""
                if len(last) != 1 or last < first:
                    raise ValueError("a range of a regular expression is empty")
            items.append((first, last))
        self._at += 1
        return self._set(items, negated)

    def _character(self, where: str) -> str:
        """Read a character, or a class of characters, which is returned as it is written."""
        if self._text[self._at] != "\\":
            self._at += 1
            return self._text[self._at - 1]
        if (category := _CATEGORY.match(self._text, self._at)) is not None:
            self._at = category.end()
            return f"\\{category[1]}{{{category[2] or category[3]}}}"
        escape = _ESCAPE.match(self._text, self._at)
        if escape is None:
            raise ValueError(f"'\\' at the end of a regular expression{where}")
        self._at = escape.end()
        letter = escape[5]
        if letter is None or not letter.isalnum() or (letter in _LETTERS and letter != "b"):
            return _character_of(escape)
        if letter in _CLASSES:
            return escape.group()
        raise ValueError(f"'{escape.group()}'{where} is not supported")

    def _set(self, items: list[str | tuple[str, str]], negated: bool = False) -> str:
        """Any character of a set, or any other one. Special characters are taken out of it, and written as escapes."""
        escaped = [each for each in self._special if _holds(items, each, self._ignoring_case) != negated]
        written = "".join(
            each if isinstance(each, str) else "-".join(map(_spelled, sorted(set(each)))) for each in items
        )
        plain = f"[^{written}]" if negated and written else r"[\s\S]" if negated else f"[{written}]"
        if self._special and escaped:
            only = not negated and all(each in self._special for item in items if item[0] == item[-1] for each in item)
            if only and all(isinstance(item, tuple) and item[0] == item[1] for item in items):
                plain = ""
            else:
                plain = f"[{plain}&&[^{''.join(map(_spelled, self._special))}]]"
        if self._ignoring_case and plain:
            plain = f"(?i:{plain})"
        parts = [plain] if plain else []
        parts += ["".join(map(_spelled, json.dumps(each)[1:-1])) for each in escaped]
        return parts[0] if len(parts) == 1 and len(parts[0]) > 1 and not escaped else f"(?:{'|'.join(parts)})"


def _holds(items: list[str | tuple[str, str]], character: str, ignoring_case: bool) -> bool:
    """Whether a special character, of JSON's, is in a set. None of them has a case."""
    for item in items:
        if isinstance(item, tuple):
            found = item[0] <= character <= item[1]
        elif item[1] in "pP":
            found = unicodedata.category(character).startswith(item[3:-1]) == (item[1] == "p")
        else:
            found = (character in _SPACES if item[1] in "sS" else False) == item[1].islower()
        if found:
            return True
    return False


def _spelled(character: str) -> str:
    """A character in a regular expression."""
    return character if character.isascii() and character.isalnum() else f"\\u{{{ord(character):x}}}"


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(_character_of, text)


def _character_of(escape: re.Match[str]) -> str:
    number = escape[1] or escape[2] or escape[3] or escape[4]
    if not number:
        return _LETTERS.get(escape[5], escape[5])
    if int(number, 16) > 0x10FFFF or 0xD800 <= int(number, 16) < 0xE000:
        raise ValueError(f"'{escape[0]}' is no character")
    return chr(int(number, 16))
