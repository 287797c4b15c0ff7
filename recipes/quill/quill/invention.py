"""Words and names that are in no list, so that Quill learns to copy, spell and sort what it has never seen."""

from __future__ import annotations

from random import Random

from quill.words import CITIES, LETTERS, NAMES, SPELLABLE

_CONSONANTS = (
    "b",
    "bl",
    "br",
    "c",
    "ch",
    "cl",
    "d",
    "dr",
    "f",
    "fl",
    "g",
    "gr",
    "h",
    "j",
    "k",
    "l",
    "m",
    "n",
    "p",
    "ph",
    "pl",
    "qu",
    "r",
    "s",
    "sh",
    "sp",
    "st",
    "str",
    "t",
    "th",
    "tr",
    "v",
    "w",
    "wh",
    "y",
    "z",
)
_VOWELS = ("a", "e", "i", "o", "u", "a", "e", "i", "o", "ai", "ea", "ee", "ie", "oo", "ou", "y")
_CODAS = ("", "", "", "n", "r", "s", "l", "m", "t", "ck", "nd", "ng", "st", "x", "d", "lt", "sh", "ss", "ll", "tte")


def invented_word(rng: Random) -> str:
    """Syllables, or pieces of real words put together, or now and then mere letters."""
    luck = rng.random()
    if luck < 0.4:
        return "".join(_syllable(rng) for _ in range(rng.randint(1, 4)))
    if luck < 0.93:
        pieces = [_piece(rng) for _ in range(rng.randint(2, 4))]
        return "".join(pieces)
    return "".join(rng.choice(LETTERS) for _ in range(rng.randint(3, 9)))


def invented_name(rng: Random) -> str:
    return "".join(_syllable(rng) for _ in range(rng.randint(1, 3))).capitalize()


def any_word(rng: Random) -> str:
    return rng.choice(SPELLABLE) if rng.random() < 0.5 else invented_word(rng)


def any_name(rng: Random) -> str:
    """A first name, mostly a known one."""
    return rng.choice(NAMES) if rng.random() < 0.75 else invented_name(rng)


def any_full_name(rng: Random) -> str:
    return any_name(rng) if rng.random() < 0.75 else f"{any_name(rng)} {invented_name(rng)}"


def any_city(rng: Random) -> str:
    return rng.choice(CITIES) if rng.random() < 0.85 else invented_name(rng)


def _syllable(rng: Random) -> str:
    return rng.choice(_CONSONANTS) + rng.choice(_VOWELS) + rng.choice(_CODAS)


def _piece(rng: Random) -> str:
    word = rng.choice(SPELLABLE)
    start = rng.randrange(max(1, len(word) - 2))
    return word[start : start + rng.randint(2, 5)]
