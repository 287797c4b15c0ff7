"""Memory over turns: what the user told about themselves, asked for later in the same conversation.

Between telling and asking stand other exchanges, and sometimes a correction; the newest statement counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from quill.blocks import Block, read_blocks
from quill.chat import Message, Sample
from quill.checks import Mentions
from quill.invention import any_word, invented_name
from quill.phrasing import article, ask
from quill.words import ANIMALS, CITIES, COLOURS, FOODS, HOBBIES, JOBS, NAMES, RELATIVES, WORDS

TASK = "memory"

Between = Callable[[Random], Sample]

_OPEN_CHANCE = 0.3  # that a value is one that stands in no list
_POOLS: dict[str, tuple[str, ...]] = {
    "names": NAMES,
    "cities": CITIES,
    "colours": COLOURS,
    "foods": FOODS,
    "animals": ANIMALS,
    "jobs": JOBS,
    "hobbies": HOBBIES,
    "words": WORDS,
    "numbers": tuple(str(n) for n in range(5, 100)),
}


@dataclass(frozen=True)
class Attribute:
    """Something a user tells; ``{v}`` is its value in all of the patterns."""

    pool: str
    told: tuple[str, ...]
    confirmed: str
    asked: tuple[str, ...]
    recalled: str

    def value(self, rng: Random) -> str:
        if self.pool == "numbers" or rng.random() > _OPEN_CHANCE:
            return rng.choice(_POOLS[self.pool])
        return invented_name(rng) if self.pool in ("names", "cities") else any_word(rng)


def _attribute(block: Block, relative: str = "") -> Attribute:
    told, asked, answers = (
        tuple(text.replace("{r}", relative) for text in texts)
        for texts in (block.patterns, block.questions, block.answers)
    )
    return Attribute(block.words[0], told, answers[0], asked, answers[1])


*_OWN_BLOCKS, _RELATIVE_BLOCK = read_blocks("memory")
_OWN = tuple(_attribute(block) for block in _OWN_BLOCKS)
_RELATED = tuple(_attribute(_RELATIVE_BLOCK, relative) for relative in RELATIVES)

_CORRECTIONS = (
    "sorry, {told}",
    "[actually|no], {told}",
    "i was wrong, {told}",
    "wait, {told}",
    "correction: {told}",
    "oh, i mean {told}",
    "{told}",
    "now {told}",
)
_UNKNOWN = "You have not told me that yet."


def make(rng: Random, between: Between) -> Sample:
    """``between`` makes the exchanges that stand between telling and asking."""
    if rng.random() < 0.12:
        return _told_and_asked(rng)
    attributes = _draw(rng, rng.randint(1, 4))
    values = {attribute: attribute.value(rng) for attribute in attributes}
    messages: list[Message] = []
    if rng.random() < 0.35 and len(attributes) > 1:
        messages += (Message("user", _joint(rng, values)), Message("assistant", "Thanks, I will remember that."))
    else:
        for attribute, value in values.items():
            messages += _told(rng, attribute, value, attribute.told)
            messages += _aside(rng, between, 0.25)
    if rng.random() < 0.2:
        corrected = rng.choice(attributes)
        values[corrected] = corrected.value(rng)
        corrections = [c.replace("{told}", told) for c in _CORRECTIONS for told in corrected.told[:4]]
        messages += _told(rng, corrected, values[corrected], corrections)
    messages += _aside(rng, between, 0.6)
    expected = ""
    for attribute in rng.sample(attributes, rng.randint(1, len(attributes))):
        expected = values[attribute]
        messages += _asked(rng, attribute, _filled(attribute.recalled, expected))
    check = Mentions((expected,))
    if rng.random() < 0.1:
        missing = rng.choice([attribute for attribute in (*_OWN, *_RELATED) if attribute not in attributes])
        messages += _asked(rng, missing, _UNKNOWN)
        check = Mentions(("not told",))
    return Sample(TASK, f"{TASK}|{messages[0].content}", tuple(messages), check)


def make_unknown(rng: Random) -> Sample:
    """The question without the telling: Quill must not make an answer up."""
    messages = _asked(rng, _draw(rng, 1)[0], _UNKNOWN)
    return Sample(TASK, f"{TASK}|{messages[0].content}", tuple(messages), Mentions(("not told",)))


def _told_and_asked(rng: Random) -> Sample:
    """All in one message."""
    values = {attribute: attribute.value(rng) for attribute in _draw(rng, rng.randint(1, 3))}
    asked = rng.choice(list(values))
    text = f"{_joint(rng, values).rstrip('.')}. {ask(rng, asked.asked)}"
    answer = _filled(asked.recalled, values[asked])
    messages = (Message("user", text), Message("assistant", answer))
    return Sample(TASK, f"{TASK}|{text}", messages, Mentions((values[asked],)))


def _draw(rng: Random, count: int) -> list[Attribute]:
    return rng.sample((*_OWN, *rng.sample(_RELATED, 4)), count)


def _told(rng: Random, attribute: Attribute, value: str, patterns: Sequence[str]) -> list[Message]:
    shown = value.lower() if value.istitle() and rng.random() < 0.12 else value
    told = _with_article(ask(rng, patterns, end=".", v=shown, wrap=False), shown)
    return [Message("user", told), Message("assistant", _filled(attribute.confirmed, value))]


def _joint(rng: Random, values: Mapping[Attribute, str]) -> str:
    """Several statements in one message."""
    statements = [
        _with_article(ask(rng, attribute.told, end="", v=value, wrap=False), value)
        for attribute, value in values.items()
    ]
    return rng.choice((". ", ", ", " and ", ", and ")).join(statements) + rng.choice((".", ""))


def _asked(rng: Random, attribute: Attribute, answer: str) -> list[Message]:
    return [Message("user", ask(rng, attribute.asked)), Message("assistant", answer)]


def _aside(rng: Random, between: Between, chance: float) -> list[Message]:
    messages: list[Message] = []
    while rng.random() < chance and len(messages) < 8:
        messages += between(rng).messages
    return messages


def _with_article(text: str, noun: str) -> str:
    """``a owl`` to ``an owl``, as most people write."""
    return text.replace(f" a {noun}", f" {article(noun)} {noun}")


def _filled(pattern: str, value: str) -> str:
    text = pattern.format(v=value, a=article(value))
    return text[:1].upper() + text[1:]
