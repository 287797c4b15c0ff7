"""Naming: "name three animals", "five random numbers", "pick one of these". Any fitting answer is right."""

from __future__ import annotations

from random import Random

from quill import tables
from quill.chat import Sample, single_turn
from quill.checks import Picks
from quill.heldout import normalize
from quill.phrasing import ask
from quill.words import ANIMALS, CITIES, COLOURS, FOODS, HOBBIES, JOBS, LETTERS, NAMES, NUMBER_WORDS, WORDS

_BIRDS = tuple(animal for animal, group in tables.CLASSES.items() if group == "bird")
_MAMMALS = tuple(animal for animal, group in tables.CLASSES.items() if group == "mammal")
_EUROPE = tuple(country for country in tables.CAPITALS if tables.CONTINENTS.get(country) == "Europe")
_ASIA = tuple(country for country in tables.CAPITALS if tables.CONTINENTS.get(country) == "Asia")
_AFRICA = tuple(country for country in tables.CAPITALS if tables.CONTINENTS.get(country) == "Africa")


def _kind(kind: str) -> tuple[str, ...]:
    return tuple(word for word, its in tables.KINDS.items() if its == kind)


_POOLS: dict[str, tuple[str, ...]] = {
    "animals": ANIMALS,
    "mammals": _MAMMALS,
    "birds": _BIRDS,
    "fruits": _kind("fruit"),
    "vegetables": _kind("vegetable"),
    "tools": _kind("tool"),
    "[musical |]instruments": _kind("musical instrument"),
    "vehicles": _kind("vehicle"),
    "sports": _kind("sport"),
    "drinks": _kind("drink"),
    "colo[u|]rs": COLOURS,
    "foods": FOODS,
    "[first |]names": NAMES,
    "[jobs|professions]": JOBS,
    "hobbies": HOBBIES,
    "[cities|towns]": CITIES,
    "countries": tuple(tables.CAPITALS),
    "[european countries|countries in europe]": _EUROPE,
    "[asian countries|countries in asia]": _ASIA,
    "[african countries|countries in africa]": _AFRICA,
    "[capitals|capital cities]": tuple(tables.CAPITALS.values()),
    "[european capitals|capitals in europe]": tuple(tables.CAPITALS[country] for country in _EUROPE),
    "planets": tables.PLANETS,
    "[chemical |]elements": tuple(name for name, _, _ in tables.ELEMENTS),
    "[languages]": tuple(sorted(set(tables.SPOKEN.values()))),
    "currencies": tuple(sorted(set(tables.CURRENCIES.values()))),
    "[random |english |]words": WORDS,
    "letters": tuple(LETTERS),
    "[random |]numbers": tuple(str(n) for n in range(1, 101)),
    "programming languages": (
        *("Python", "Java", "C", "Rust", "Go", "Ruby", "Haskell", "Swift", "Kotlin", "JavaScript"),
    ),
    "[metals]": ("iron", "gold", "silver", "copper", "tin", "lead", "zinc", "nickel", "aluminium", "platinum"),
}

_REQUESTS = (
    "[name|list|give me|tell me|say|write|show me] {n} {x}",
    "[can you |please ][name|list] {n} {x}",
    "[give me|make|write] a list of {n} {x}",
    "{n} {x}",
    "i need {n} {x}",
    "what are {n} {x}",
    "[name|list|give me|tell me|show me] [some|a few] {x}",
    "[give me|make|write] a list of {x}",
    "what {x} do you know",
    "examples of {x}",
)


def make(rng: Random) -> Sample:
    return _pick(rng) if rng.random() < 0.25 else _name(rng)


def _name(rng: Random) -> Sample:
    noun, names = rng.choice(list(_POOLS.items()))
    pool = sorted(set(names))
    request = rng.choice(_REQUESTS)
    count = rng.randint(2, min(8, len(pool))) if "{n}" in request else 5
    shown = rng.choice((str(count), NUMBER_WORDS[count]))
    question = ask(rng, request.replace("{x}", noun), end=".", fold=True, n=shown)
    # In order, so that no item can come twice.
    chosen = sorted(rng.sample(pool, count), key=pool.index)
    check = Picks(frozenset(pool), count)
    return single_turn("naming", f"naming|{normalize(question)}", question, ", ".join(chosen), check)


def _pick(rng: Random) -> Sample:
    if rng.random() < 0.5:
        low, high = rng.choice((0, 1)), rng.choice((3, 5, 6, 10, 10, 20, 50, 100))
        patterns: tuple[str, ...] = (
            "[pick|choose|give me|tell me|say|think of] a [random |]number [between|from] {a} [and|to] {b}",
            "a [random |]number [between|from] {a} [and|to] {b}",
            "random number from {a} to {b}",
        )
        question = ask(rng, patterns, end=".", a=low, b=high)
        pool = [str(n) for n in range(low, high + 1)]
    else:
        pool = rng.sample(rng.choice((ANIMALS, FOODS, COLOURS, CITIES, NAMES, WORDS)), rng.randint(2, 5))
        patterns = (
            "[pick|choose|select] one[| of these| of them]: {items}",
            "[pick|choose] [one of|between|from] {items}",
            "which one[| of these]: {items}",
        )
        question = ask(rng, patterns, end=".", items=", ".join(pool))
    return single_turn("naming", f"naming|{normalize(question)}", question, rng.choice(pool), Picks(frozenset(pool), 1))
