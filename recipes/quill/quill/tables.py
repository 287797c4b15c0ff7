"""The facts of Quill's world as tables, read from ``texts/tables.txt``; a row is one fact.

Facts only: the questions about them are in ``tasks``. Words without relations live in ``words``.
"""

from __future__ import annotations

from pathlib import Path


def _sections() -> dict[str, str]:
    text = (Path(__file__).parent / "texts" / "tables.txt").read_text(encoding="utf-8")
    named = (part.split("\n", 1) for part in text.split("\n\n")[1:])
    return {name: body.strip() for name, body in named}


_SECTIONS = _sections()


def _rows(name: str) -> tuple[tuple[str, ...], ...]:
    """``a=b=c;`` as (a, b, c)."""
    rows = " ".join(_SECTIONS[name].split()).split(";")
    return tuple(tuple(cell.strip() for cell in row.split("=")) for row in rows if row.strip())


def _pairs(name: str) -> dict[str, str]:
    return {row[0]: row[1] for row in _rows(name)}


def _groups(name: str) -> dict[str, str]:
    """``kind: member, member`` as member to kind."""
    lines = (line.split(": ", 1) for line in _SECTIONS[name].splitlines())
    return {member.strip(): kind for kind, members in lines for member in members.split(",")}


CAPITALS = _pairs("capitals")
CONTINENTS = _groups("continents")  # countries on two continents are left out
CURRENCIES = _pairs("currencies")
SPOKEN = _pairs("spoken")

OPPOSITES = _pairs("opposites")
PLURALS = _pairs("plurals")
PASTS = _pairs("pasts")
RHYMES = _pairs("rhymes")

SOUNDS = _pairs("sounds")
YOUNG = _pairs("young")
LEGS = _pairs("legs")
DIETS = _pairs("diets")
CLASSES = _groups("classes")
FLIERS = tuple(animal for animal, way in _groups("motion").items() if way == "flies")
WALKERS = tuple(animal for animal, way in _groups("motion").items() if way == "walks")

KINDS = _groups("kinds")
MASS_NOUNS = frozenset(_groups("mass_nouns"))
THING_COLOURS = _pairs("thing_colours")
COLOUR_MIXES = _rows("colour_mixes")
SIDES = _pairs("sides")

ELEMENTS = _rows("elements")  # name, symbol, atomic number
UNITS = _rows("units")  # number, parts, whole

PLANETS = ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune")
ORDINALS = (
    *("first", "second", "third", "fourth", "fifth", "sixth"),
    *("seventh", "eighth", "ninth", "tenth", "eleventh", "twelfth"),
)
MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
