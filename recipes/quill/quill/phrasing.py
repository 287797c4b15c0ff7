"""How people type: from one pattern to many wordings, cases, punctuations and the odd slip.

A pattern such as ``"[what is|what's] the capital of {country}"`` stands for all its bracketed choices; brackets nest.
Knows nothing about any task.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from random import Random

_INNERMOST = re.compile(r"\[([^\[\]]*)\]")
_SPACES = re.compile(r"  +")
_SLOT = re.compile(r"(\{\w+\})")

_PREFIXES = (
    *("haha, ", "lol, ", "great, ", "thanks, ", "cool, ", "please ", "hey, ", "ok, "),
    *("so, ", "quill, ", "hey quill, ", "hi, ", "now ", "um, ", "ok now ", "and "),
)
_SUFFIXES = (" please", ", please", " thanks", ", thank you", " quill", ", quill", " now", " my friend", " today")


def expand(rng: Random, pattern: str) -> str:
    """One wording of the pattern; ``{slots}`` are left as they stand."""
    while "[" in pattern:
        pattern = _INNERMOST.sub(lambda match: rng.choice(match[1].split("|")), pattern)
    return _SPACES.sub(" ", pattern).strip(" ")


def ask(
    rng: Random,
    patterns: Sequence[str] | str,
    end: str = "?",
    fold: bool = False,
    wrap: bool = True,
    slots: Mapping[str, object] | None = None,
    **more_slots: object,
) -> str:
    """A question as somebody might type it.

    ``end`` is the punctuation a careful writer would use. ``fold`` lets the typing style change the case of the slots
    as well, which suits questions whose answer does not depend on it. ``wrap`` allows a polite word before or after.
    """
    values = {**(slots or {}), **more_slots}
    carrier = expand(rng, patterns if isinstance(patterns, str) else rng.choice(patterns))
    if wrap and rng.random() < 0.12:
        # A suffix would look like one more item where a list ends the question.
        before = rng.random() < 0.6 or carrier.endswith("}")
        carrier = rng.choice(_PREFIXES) + carrier if before else carrier + rng.choice(_SUFFIXES)
    restyle, mark = _typing_style(rng, end)
    slip = rng.choice(_SLIPS) if rng.random() < 0.06 else None
    pieces = []
    for piece in _SLOT.split(carrier):
        if piece.startswith("{"):
            value = str(values[piece[1:-1]])
            pieces.append(restyle(value) if fold and restyle is not _as_sentence else value)
        else:
            pieces.append(restyle(slip(rng, piece) if slip else piece))
    text = "".join(pieces)
    if restyle is _as_sentence:
        text = text[:1].upper() + text[1:]
    return text + mark


def _typing_style(rng: Random, end: str) -> tuple[Callable[[str], str], str]:
    luck = rng.random()
    if luck < 0.45:
        return _as_sentence, end
    if luck < 0.78:
        return str.lower, ""
    if luck < 0.88:
        return str.lower, end
    if luck < 0.95:
        return _as_sentence, ""
    if luck < 0.98:
        return str.upper, rng.choice(("", end))
    return _as_sentence, rng.choice(("!", "??", "...", " " + end, end + end))


def _as_sentence(text: str) -> str:
    return re.sub(r"\bi\b", "I", text)


def misspelt(rng: Random, text: str) -> str:
    """One longer word has two neighbouring letters swapped, a letter missing or a letter twice."""
    words = list(re.finditer(r"[a-z]{4,}", text))
    if not words:
        return text
    at = rng.choice(words).start() + rng.randrange(1, 3)
    a, b = text[at], text[at + 1]
    return text[:at] + rng.choice((b + a, b + a, b, a + a + b)) + text[at + 2 :]


def _casual(rng: Random, text: str) -> str:
    """As typed on a phone: u for you, whats for what's."""
    return re.sub(r"[a-z']+", lambda match: _SHORT_FORMS.get(match[0], match[0]), text)


def _drawn_out(rng: Random, text: str) -> str:
    """The last letter several times: hiii."""
    return text + text[-1] * rng.randint(1, 4) if text[-1:].isalpha() else text


_SLIPS: tuple[Callable[[Random, str], str], ...] = (misspelt, misspelt, misspelt, _casual, _casual, _drawn_out)
_SHORT_FORMS = {
    "you": "u",
    "are": "r",
    "what": "wat",
    "what's": "whats",
    "please": "plz",
    "thanks": "thx",
    "your": "ur",
    "why": "y",
    "i'm": "im",
    "don't": "dont",
    "can't": "cant",
    "you're": "youre",
    "that's": "thats",
    "because": "cuz",
    "see": "c",
    "okay": "k",
}


@cache
def article(noun: str) -> str:
    return "an" if noun[0].lower() in "aeiou" else "a"


def a_or_an(noun: str) -> str:
    """The noun with its indefinite article."""
    return f"{article(noun)} {noun}"


def listed(items: Sequence[str]) -> str:
    """``a``, ``a and b`` or ``a, b and c``."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]
