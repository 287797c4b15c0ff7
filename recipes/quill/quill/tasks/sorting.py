"""Sorting: words by the alphabet, numbers up or down."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from quill.chat import Sample, single_turn
from quill.checks import Listing
from quill.listing import any_items, list_key, list_text
from quill.phrasing import ask

TASK = "sorting"


def make(rng: Random) -> Sample:
    luck = rng.random()
    if luck < 0.45:
        return _sorted_numbers(rng)
    if luck < 0.52:
        return _sorted_by_length(rng)
    items = any_items(rng, rng.randint(2, 8))
    question = ask(
        rng,
        (
            (
                "sort [these words|these|the words|this list|the following words|the following|] "
                "[alphabetically|in alphabetical order|from a to z|]: {items}"
            ),
            "put [these words|these|them|the words] in alphabetical order: {items}",
            "alphabetical order: {items}",
            "order alphabetically: {items}",
            "[arrange|order] [these|the words|these words] [alphabetically|from a to z]: {items}",
            "sort {items}",
            "sort {items} alphabetically",
            "sort [names|words|the names|these names|animals|cities|the list|the words]: {items}",
            "sort these alphabetically {items}",
        ),
        end=".",
        items=list_text(rng, items),
    )
    ordered = sorted(items, key=str.casefold)
    return single_turn(TASK, list_key(TASK, ordered), question, ", ".join(ordered), Listing(tuple(ordered)))


def _sorted_by_length(rng: Random) -> Sample:
    items = any_items(rng, rng.randint(3, 6))
    items = list({len(item): item for item in items}.values())
    patterns = (
        "sort [these words|these|the words|] by length: {items}",
        "[order|arrange] [these words|these] by length: {items}",
        "sort [these |]from shortest to longest: {items}",
    )
    question = ask(rng, patterns, end=".", items=", ".join(items))
    ordered = sorted(items, key=len)
    return single_turn(TASK, list_key(TASK, sorted(items)), question, ", ".join(ordered), Listing(tuple(ordered)))


def _sorted_numbers(rng: Random) -> Sample:
    top = rng.choice((10, 20, 100, 100, 1000, 10000))
    numbers = [rng.randint(-top if rng.random() < 0.15 else 0, top) for _ in range(rng.randint(2, 9))]
    down = rng.random() < 0.3
    if down:
        patterns: Sequence[str] = (
            (
                "sort [these numbers|these|this list|] [from largest to smallest|in descending "
                "order|from high to low|from biggest to smallest]: {items}"
            ),
            "put [these numbers|these] in descending order: {items}",
            "[order|arrange] from largest to smallest: {items}",
            "sort {items} [in descending order|descending|from largest to smallest]",
        )
    else:
        patterns = (
            (
                "sort [these numbers|these|the numbers|this list|the following numbers|] [from smallest "
                "to largest|in ascending order|from low to high|]: {items}"
            ),
            "put [these numbers|these|the numbers] in order: {items}",
            "[order|arrange] [these numbers|these] from smallest to largest: {items}",
            "sort {items}",
            "sort [numbers|the list|list]: {items}",
            "sort {items} [in ascending order|ascending|from smallest to largest]",
            "can you sort {items}",
        )
    ordered = [str(n) for n in sorted(numbers, reverse=down)]
    question = ask(rng, patterns, end=".", items=list_text(rng, [str(n) for n in numbers]))
    key = list_key(TASK, sorted(ordered))
    return single_turn(TASK, key, question, ", ".join(ordered), Listing(tuple(ordered)))
