"""Formats of JSON Schema that the grammar compiler does not know.

Those that are regular languages become patterns, which grammars enforce. Others are checked on finished values.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

_UNRESERVED = r"a-zA-Z0-9\-._~"
_SUB_DELIMS = "!$&'()*+,;="
_UCSCHAR = r"\u{A0}-\u{D7FF}\u{F900}-\u{FDCF}\u{FDF0}-\u{FFEF}" + "".join(
    rf"\u{{{plane:X}{'1000' if plane == 14 else '0000'}}}-\u{{{plane:X}FFFD}}" for plane in range(1, 15)
)
_IPRIVATE = r"\u{E000}-\u{F8FF}\u{F0000}-\u{FFFFD}\u{100000}-\u{10FFFD}"
_PERCENT = "%[0-9a-fA-F]{2}"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LONGEST_HOSTNAME = 253
_IPV4 = rf"(?:{_OCTET}\.){{3}}{_OCTET}"


def _ipv6() -> str:
    """RFC 3986's IPv6address: each form has another number of groups behind `::`."""
    group = "[0-9a-fA-F]{1,4}"
    last = f"(?:{group}:{group}|{_IPV4})"
    forms = [f"(?:{group}:){{6}}{last}", f"::(?:{group}:){{5}}{last}"]
    for before in range(5):
        front = f"(?:(?:{group}:){{0,{before}}}{group})?"
        forms.append(f"{front}::(?:{group}:){{{4 - before}}}{last}")
    forms += [f"(?:(?:{group}:){{0,5}}{group})?::{group}", f"(?:(?:{group}:){{0,6}}{group})?::"]
    return f"(?:{'|'.join(forms)})"


def _reference(more: str = "", more_in_queries: str = "", *, absolute: bool) -> str:
    """A URI, or also a relative reference, by RFC 3986; an IRI by RFC 3987 if `more` characters are not reserved."""
    own = _UNRESERVED + more + _SUB_DELIMS
    of_segment, of_authority = f"(?:[{own}:@]|{_PERCENT})", f"(?:[{own}:]|{_PERCENT})"
    literal = rf"\[(?:{_ipv6()}|[vV][0-9a-fA-F]+\.[{_UNRESERVED}{_SUB_DELIMS}:]+)\]"
    authority = f"(?:{of_authority}*@)?(?:{literal}|(?:[{own}]|{_PERCENT})*)(?::[0-9]*)?"
    segments = f"(?:/{of_segment}*)*"
    rooted = f"//{authority}{segments}|/(?:{of_segment}+{segments})?"
    tail = rf"(?:\?(?:[{own}:@/?{more_in_queries}]|{_PERCENT})*)?(?:#(?:[{own}:@/?]|{_PERCENT})*)?"
    found = f"[a-zA-Z][a-zA-Z0-9+\\-.]*:(?:{rooted}|(?:{of_segment}+{segments})?){tail}"
    if absolute:
        return found
    return f"{found}|(?:{rooted}|(?:(?:[{own}@]|{_PERCENT})+{segments})?){tail}"  # no colon in the first segment


def _uri_template() -> str:
    """RFC 6570: literals and expressions."""
    literal = rf"(?:[!#$&-;=?@A-Z\[\]_a-z~{_UCSCHAR}{_IPRIVATE}]|{_PERCENT})"
    name = f"(?:[a-zA-Z0-9_]|{_PERCENT})"
    variable = rf"{name}(?:\.?{name})*(?::[1-9][0-9]{{0,3}}|\*)?"
    return rf"(?:{literal}|\{{[+#./;?&=,!@|]?{variable}(?:,{variable})*\}})*"


_POINTER = "(?:/(?:[^/~]|~[01])*)*"
PATTERNS = {
    name: f"^(?:{pattern})$"
    for name, pattern in {
        "iri": _reference(_UCSCHAR, _IPRIVATE, absolute=True),
        "iri-reference": _reference(_UCSCHAR, _IPRIVATE, absolute=False),
        "json-pointer": _POINTER,  # RFC 6901
        "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
        "uri-reference": _reference(absolute=False),
        "uri-template": _uri_template(),
    }.items()
}
"""The regular expression of each of these formats, for the compiler."""

_ATOM = r"[a-zA-Z0-9!#$%&'*+\-/=?^_`{|}~\u0080-\U0010ffff]+"
_LOCAL_PART = re.compile(rf'{_ATOM}(?:\.{_ATOM})*|"(?:[^\x00-\x1f\x7f"\\]|\\[ -~])*"')


def _is_idn_hostname(text: str) -> bool:
    """Whether a text is a name of hosts by RFC 5890, in labels of Unicode or of ASCII."""
    import idna

    labels = re.split("[.\u3002\uff0e\uff61]", text)
    try:
        encoded = [idna.encode(label).decode() for label in labels]
        if any(unicodedata.bidirectional(character) in ("R", "AL", "AN") for character in text):
            for label in encoded:
                idna.check_bidi(idna.decode(label), check_ltr=True)
    except (idna.IDNAError, UnicodeError):
        return False
    return len(".".join(encoded)) <= _LONGEST_HOSTNAME


def _is_idn_email(text: str) -> bool:
    """Whether a text is an address of mail by RFC 6531."""
    local, at, host = text.rpartition("@")
    named = _is_idn_hostname(unicodedata.normalize("NFC", host))
    return bool(at) and _LOCAL_PART.fullmatch(local) is not None and named


def _is_regex(text: str) -> bool:
    """Whether a text is a regular expression of ECMA-262, read as with its flag `u`. As without it, punctuation may be
    escaped, and brackets that open nothing stand for themselves."""
    try:
        _RegExp(text).check()
    except ValueError:
        return False
    return True


CHECKED: dict[str, Callable[[str], bool]] = {
    "idn-email": _is_idn_email,
    "idn-hostname": _is_idn_hostname,
    "regex": _is_regex,
}
"""Whether a text is of each of these formats, which no grammar enforces."""

_QUANTIFIER = re.compile(r"(?:[*+?]|\{([0-9]+)(,([0-9]*))?\})\??")
_GROUP = re.compile(r"\((?:\?(?:([=!]|<[=!])|:|<([^>]*)>|([ims]*)(?:-([ims]*))?:))?")
_ESCAPE = re.compile(
    r"\\(?:([dDsSwW]|[pP]\{(?:\w+=)?\w+\})|([fnrtv]|0(?![0-9])|c[A-Za-z]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}"
    r"|u\{[0-9a-fA-F]+\}|[^A-Za-z0-9]))",
    re.ASCII | re.DOTALL,
)
"""Its groups are a class of characters, and a character."""
_BACK = re.compile(r"\\(?:([1-9][0-9]*)|k<([^>]*)>)")
_CONTROLS = {"f": 12, "n": 10, "r": 13, "t": 9, "v": 11, "0": 0}


class _RegExp:
    """Reads a regular expression from left to right. Its methods raise ValueError where it is wrong."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._num_groups = 0
        self._names: set[str] = set()
        self._referred: set[str | int] = set()

    def check(self) -> None:
        self._names = self._disjunction()
        if self._at < len(self._text):
            raise ValueError("a bracket closes nothing")
        if any(
            each > self._num_groups if isinstance(each, int) else each not in self._names for each in self._referred
        ):
            raise ValueError("no such group")

    def _disjunction(self) -> set[str]:
        """Read alternatives, and return the names of groups in them; two alternatives may have the same."""
        names = self._alternative()
        while self._text.startswith("|", self._at):
            self._at += 1
            names |= self._alternative()
        return names

    def _alternative(self) -> set[str]:
        names: set[str] = set()
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            within, repeatable = self._term()
            if names & within:
                raise ValueError("two groups have one name")
            names |= within
            if (quantifier := _QUANTIFIER.match(self._text, self._at)) is not None:
                least, _, most = quantifier.groups()
                if not repeatable or (most and int(least) > int(most)):
                    raise ValueError("nothing to repeat")
                self._at = quantifier.end()
        return names

    def _term(self) -> tuple[set[str], bool]:
        """Read a term, and return the names in it, and whether it may be repeated."""
        character = self._text[self._at]
        if character == "(":
            return self._group()
        if character == "[":
            self._class()
        elif character == "\\":
            return set(), self._escape()
        elif _QUANTIFIER.match(self._text, self._at):
            raise ValueError("nothing to repeat")
        else:
            self._at += 1
        return set(), character not in "^$"

    def _group(self) -> tuple[set[str], bool]:
        opened = _GROUP.match(self._text, self._at)
        assert opened is not None
        around, name, added, removed = opened.groups()
        self._at = opened.end()
        if self._text.startswith("?", self._at):
            raise ValueError("no such group")
        flags = (added or "") + (removed or "")
        if len(set(flags)) < len(flags) or opened[0] == "(?-:":
            raise ValueError("a flag stands twice")
        if name is not None and re.fullmatch(r"[^\W\d$][\w$]*|[$_][\w$]*", name) is None:
            raise ValueError("not a name")
        self._num_groups += name is not None or opened[0] == "("
        names = self._disjunction()
        if not self._text.startswith(")", self._at):
            raise ValueError("a group does not end")
        self._at += 1
        if name is not None and name in names:
            raise ValueError("two groups have one name")
        return (names | {name} if name is not None else names), around is None

    def _escape(self) -> bool:
        """Read an escape outside of classes, and return whether it may be repeated."""
        if self._text[self._at + 1 : self._at + 2] in ("b", "B"):
            self._at += 2
            return False
        back = _BACK.match(self._text, self._at)
        if back is not None:
            self._referred.add(int(back[1]) if back[1] else back[2])
            self._at = back.end()
        else:
            self._character()
        return True

    def _character(self) -> int | None:
        """Read a character, and return its number; None for a class of characters."""
        if self._text[self._at] != "\\":
            self._at += 1
            return ord(self._text[self._at - 1])
        escape = _ESCAPE.match(self._text, self._at)
        if escape is None:
            raise ValueError("no such escape")
        self._at = escape.end()
        written = escape[2]
        if written is None:
            return None
        if written in _CONTROLS:
            return _CONTROLS[written]
        if written[0] == "c":
            return ord(written[1]) % 32
        if written[0] in "xu":
            number = int(written[1:].strip("{}"), 16)
            if number > 0x10FFFF:
                raise ValueError("no such character")
            return number
        return ord(written)

    def _class(self) -> None:
        self._at += 2 if self._text.startswith("[^", self._at) else 1
        while not self._text.startswith("]", self._at):
            first = self._of_class()
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                last = self._of_class()
                if first is not None and last is not None and first > last:
                    raise ValueError("a range is empty")
        self._at += 1

    def _of_class(self) -> int | None:
        if self._at >= len(self._text):
            raise ValueError("a class does not end")
        if self._text.startswith("\\b", self._at):
            self._at += 2
            return 8
        return self._character()
