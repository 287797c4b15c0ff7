"""Lists of items to sort, count and reverse, and how lists and letters are written out.

Knows nothing about the tasks that use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from quill.invention import any_name, any_word, invented_word
from quill.words import ANIMALS, CITIES, COLOURS, FOODS, LITTLE_WORDS, NAMES, SPELLABLE, THINGS, WORDS

POOLS: tuple[tuple[str, ...], ...] = (ANIMALS, FOODS, COLOURS, THINGS, NAMES, CITIES, WORDS)


def any_items(rng: Random, count: int) -> list[str]:
    """Different words: of one kind, of all kinds, or with some nobody knows."""
    luck = rng.random()
    if luck < 0.22:
        return _look_alikes(rng, count)
    if luck < 0.6:
        return rng.sample(rng.choice(POOLS), count)
    items = {any_word(rng) if luck < 0.85 else any_name(rng) for _ in range(count)}
    return rng.sample(sorted(items), len(items))


def _look_alikes(rng: Random, count: int) -> list[str]:
    """Words of which many begin alike, so that the order hangs on a later letter."""
    pool = rng.choice((*POOLS, SPELLABLE, SPELLABLE))
    start = rng.randrange(len(pool))
    near = sorted(pool, key=str.casefold)[start : start + 3 * count]
    stem = rng.choice(SPELLABLE)[: rng.randint(2, 4)]
    made = {stem + invented_word(rng) for _ in range(count)}
    words = near if rng.random() < 0.6 else [*sorted(made), *near[:2]]
    words = list(dict.fromkeys(words))
    return rng.sample(words, min(count, len(words))) if len(words) > 2 else rng.sample(pool, count)


def any_sentence(rng: Random, least: int, most: int) -> list[str]:
    """Words in a row, some of them little ones."""
    return [rng.choice(LITTLE_WORDS) if rng.random() < 0.4 else any_word(rng) for _ in range(rng.randint(least, most))]


def list_text(rng: Random, items: Sequence[str]) -> str:
    text = rng.choice((", ", ", ", ", ", ", ", " ", ",")).join(items)
    return f"[{text}]" if "," in text and rng.random() < 0.1 else text


def list_key(task: str, items: Sequence[str]) -> str:
    return f"{task}|{' '.join(items)}"


def spelled(text: str) -> str:
    """Letter by letter; words stay apart."""
    return " ".join("-".join(word) for word in text.split())


def times(count: int) -> str:
    return f"{count} time{'' if count == 1 else 's'}"
