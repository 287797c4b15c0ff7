"""The vocabulary of Quill's world: plain word lists that the tasks draw from, read from ``texts/words.txt``.

Knows nothing about questions or answers; facts (words that stand in a relation) live in ``tables``.
"""

from __future__ import annotations

from pathlib import Path


def _lists() -> dict[str, tuple[str, ...]]:
    """Each part of the file is a name on a line of its own, then words parted by commas."""
    text = (Path(__file__).parent / "texts" / "words.txt").read_text(encoding="utf-8")
    named = (part.split("\n", 1) for part in text.split("\n\n")[1:])
    return {name: tuple(" ".join(words.split()).split(", ")) for name, words in named}


_LISTS = _lists()

NAMES = _LISTS["names"]
ANIMALS = _LISTS["animals"]
THINGS = _LISTS["things"]
FOODS = _LISTS["foods"]
COLOURS = _LISTS["colours"]
ADJECTIVES = _LISTS["adjectives"]
PLACES = _LISTS["places"]
CITIES = _LISTS["cities"]
JOBS = _LISTS["jobs"]
HOBBIES = _LISTS["hobbies"]
WORDS = _LISTS["words"]
PEOPLE = _LISTS["people"]
RELATIVES = _LISTS["relatives"]
DREAMS = _LISTS["dreams"]
TOPICS = (*ANIMALS, *THINGS, *PLACES, *_LISTS["verse_subjects"])
VERBS = _LISTS["verbs"]
NOUNS = _LISTS["nouns"]
WEATHERS = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "cold", "warm", "mild")

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
NUMBER_WORDS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)
LITTLE_WORDS = (
    "the",
    "a",
    "I",
    "am",
    "is",
    "and",
    "my",
    "to",
    "of",
    "in",
    "on",
    "you",
    "are",
    "not",
    "it",
    "was",
    "we",
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"

SPELLABLE: tuple[str, ...] = tuple(
    sorted({*WORDS, *ANIMALS, *THINGS, *FOODS, *COLOURS, *ADJECTIVES, *PLACES, *JOBS, *HOBBIES, *NUMBER_WORDS})
)
