"""Facts from the rows of ``tables``: elements, planets, animals, shapes, units, colours and kinds of things."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from quill import tables
from quill.phrasing import a_or_an, ask, listed
from quill.tasks import wordfacts
from quill.tasks.wordfacts import Fact, plural


def make_fact(rng: Random) -> Fact:
    return rng.choice(_TABLES)(rng)


def _element(rng: Random) -> Fact:
    name, symbol, number = rng.choice(tables.ELEMENTS)
    kind = rng.randrange(3)
    if kind == 0:
        question = ask(
            rng,
            (
                "[what is|what's|tell me|] the [chemical |]symbol [of|for] {x}",
                "[chemical |]symbol [for|of] {x}",
                "which symbol [has|stands for] {x}",
                "{x} symbol",
            ),
            fold=True,
            x=name,
        )
        return question, f"The symbol of {name} is {symbol}.", (symbol,)
    if kind == 1:
        question = ask(
            rng,
            (
                "[which|what] [chemical |]element has the symbol {x}",
                "[what|which] element is {x}",
                "what does the symbol {x} stand for",
                "element {x}",
            ),
            x=symbol,
        )
        return question, f"{symbol} is the symbol of {name}.", (name,)
    question = ask(
        rng,
        (
            "[what is|what's|tell me] the atomic number of {x}",
            "atomic number of {x}",
            "how many protons [does {x} have|are in {x}]",
            "[which|what] atomic number has {x}",
        ),
        fold=True,
        x=name,
    )
    return question, f"The atomic number of {name} is {number}.", (str(number),)


def _planet(rng: Random) -> Fact:
    at = rng.randrange(8)
    name, ordinal = tables.PLANETS[at], tables.ORDINALS[at]
    kind = rng.randrange(3)
    if kind == 0:
        question = ask(
            rng,
            (
                "[which|what] is the {x} planet[| from the sun]",
                "[which|what] planet is {x} from the sun",
                "name the {x} planet",
                "the {x} planet from the sun",
            ),
            fold=True,
            x=ordinal,
        )
        return question, f"The {ordinal} planet from the sun is {name}.", (name,)
    if kind == 1:
        question = ask(
            rng,
            (
                "[which|what] number is {x} from the sun",
                "[what is|what's] the position of {x} [|in the solar system]",
                "which planet from the sun is {x}",
            ),
            fold=True,
            x=name,
        )
        return question, f"{name} is the {ordinal} planet from the sun.", (ordinal,)
    after = rng.random() < 0.5
    if at == (7 if after else 0):
        after = not after
    neighbour, where = tables.PLANETS[at + 1 if after else at - 1], "after" if after else "before"
    question = ask(
        rng, ("[which|what] planet [comes|is] {w} {x}", "name the planet {w} {x}"), fold=True, x=name, w=where
    )
    return question, f"The planet {where} {name} is {neighbour}.", (neighbour,)


def _animal(rng: Random) -> Fact:
    kind = rng.randrange(4)
    if kind == 0:
        animal, sound = rng.choice(list(tables.SOUNDS.items()))
        question = ask(
            rng,
            ("[what|which] sound does {x} make", "what does {x} [say|sound like]", "what noise does {x} make"),
            fold=True,
            x=a_or_an(animal),
        )
        return question, f"{a_or_an(animal).capitalize()} {sound}.", (sound,)
    if kind == 1:
        animal, young = rng.choice(list(tables.YOUNG.items()))
        question = ask(
            rng,
            (
                "what is a baby {x} called",
                "what do you call a [baby|young] {x}",
                "what is the young of a {x} called",
                "[name of|word for] a baby {x}",
            ),
            fold=True,
            x=animal,
        )
        return question, f"A young {animal} is called a {young}.", (young,)
    if kind == 2:
        animal, group = rng.choice(list(tables.CLASSES.items()))
        question = ask(
            rng,
            (
                "what kind of animal is {x}",
                "[what|which] class of animals does {x} belong to",
                "what type of animal is {x}",
                "is {x} a mammal[|, a bird or a fish]",
                "is {x} a bird or a reptile",
                "what is {x}",
                "what's {x}",
                "tell me what {x} is",
            ),
            fold=True,
            x=a_or_an(animal),
        )
        return question, f"{a_or_an(animal).capitalize()} is {a_or_an(group)}.", (group,)
    animal, legs = rng.choice(list(tables.LEGS.items()))
    question = ask(rng, "how many legs [does {x} have|has {x} got]", fold=True, x=a_or_an(animal))
    return question, f"{a_or_an(animal).capitalize()} has {legs} legs.", (legs,)


def _shape(rng: Random) -> Fact:
    shape, sides = rng.choice(list(tables.SIDES.items()))
    word = "faces" if shape == "cube" else "sides"
    question = ask(
        rng,
        ("how many {word} does {x} have", "how many {word} has {x}", "the number of {word} of {x}"),
        fold=True,
        x=a_or_an(shape),
        word=word,
    )
    return question, f"{a_or_an(shape).capitalize()} has {sides} {word}.", (sides,)


def _unit(rng: Random) -> Fact:
    number, part, whole = rng.choice(tables.UNITS)
    verb = rng.choice(("are in", "are there in", "in", "does {y} have"))
    pattern = "how many {x} does {y} have" if verb.startswith("does") else f"how many {{x}} {verb} {{y}}"
    return ask(rng, pattern, fold=True, x=part, y=whole), f"There are {number} {part} in {whole}.", (number,)


def _colour(rng: Random) -> Fact:
    if rng.random() < 0.4:
        one, two, mixed = rng.choice(tables.COLOUR_MIXES)
        if rng.random() < 0.5:
            one, two = two, one
        question = ask(
            rng,
            (
                "what [colour|color] do you get when you mix {x} and {y}",
                "[what is|mix] {x} and {y} [mixed|together]",
                "[what|which] [colour|color] do {x} and {y} make",
            ),
            fold=True,
            x=one,
            y=two,
        )
        return question, f"{listed((one, two)).capitalize()} make {mixed}.", (mixed,)
    thing, colour = rng.choice(list(tables.THING_COLOURS.items()))
    question = ask(
        rng,
        ("what [colour|color] is {x}", "[which|what] [colour|color] does {x} have", "the [colour|color] of {x}"),
        fold=True,
        x=thing,
    )
    return question, f"{thing.capitalize()} is {colour}.", (colour,)


def _kind_of(rng: Random) -> Fact:
    word, kind = rng.choice(list(tables.KINDS.items()))
    named = word if word in tables.MASS_NOUNS else a_or_an(word)
    patterns = (
        "what is {x}",
        "what's {x}",
        "define {x}",
        "what kind of thing is {x}",
        "[what do you know|tell me] about {x}",
        "explain what {x} is",
        "do you know what {x} is",
    )
    return ask(rng, patterns, fold=True, x=named), f"{named.capitalize()} is {a_or_an(kind)}.", (kind,)


def _diet(rng: Random) -> Fact:
    animal, food = rng.choice(list(tables.DIETS.items()))
    patterns = (
        "what does {x} eat",
        "what do {y} [eat|like to eat|live on]",
        "[the |]food of {x}",
        "what should i feed {x}",
    )
    question = ask(rng, patterns, fold=True, x=a_or_an(animal), y=plural(animal))
    return question, f"{a_or_an(animal).capitalize()} eats {food}.", (food,)


def _flight(rng: Random) -> Fact:
    flies = rng.random() < 0.5
    animal = rng.choice(sorted(tables.FLIERS if flies else tables.WALKERS))
    patterns = ("can {y} fly", "do {y} fly", "can {x} fly", "does {x} fly", "is {x} able to fly")
    question = ask(rng, patterns, fold=True, x=a_or_an(animal), y=plural(animal))
    answer = f"Yes, {a_or_an(animal)} can fly." if flies else f"No, {a_or_an(animal)} cannot fly."
    return question, answer, ("yes",) if flies else ("no",)


_TABLES: tuple[Callable[[Random], Fact], ...] = (
    *(_element, _planet, _animal, _animal, _shape, _unit, _colour, _kind_of, _kind_of, _diet, _flight),
    *[wordfacts.make_fact] * 6,
)
