"""Recall: facts planted in a text of filler sentences, asked for at the end.

The examined form has at least 1,500 tokens before the question. Training also sees short texts, and asks several
questions about one text: reading 1,500 tokens for a single answer would be a poor use of time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from quill.chat import Message, Sample
from quill.checks import Mentions
from quill.invention import any_name, any_word
from quill.phrasing import article, ask
from quill.words import (
    ADJECTIVES,
    ANIMALS,
    CITIES,
    COLOURS,
    DAYS,
    FOODS,
    HOBBIES,
    JOBS,
    PLACES,
    THINGS,
    WEATHERS,
    WORDS,
)

TASK = "recall"

# Measured with the shipped tokenizer (a test holds it): 7,300 to 7,800 characters are 1,500 to 1,900 tokens.
LONG_CHARACTERS = (7300, 7800)


@dataclass(frozen=True)
class Planted:
    """One fact: what it is about, its sentence, how it is asked, and the answer."""

    subject: str
    sentence: str
    question: str
    answer: str
    value: str


def make_long(rng: Random) -> Sample:
    return _make(rng, rng.randint(*LONG_CHARACTERS), questions=rng.randint(3, 6))


def make_exam(rng: Random) -> Sample:
    return _make(rng, rng.randint(*LONG_CHARACTERS), questions=1)


def make_short(rng: Random) -> Sample:
    return _make(rng, rng.choice((rng.randint(50, 600), rng.randint(600, 3500))), questions=rng.randint(1, 5))


def _make(rng: Random, characters: int, questions: int) -> Sample:
    facts = _facts(rng, max(questions, min(12, questions + characters // 600)))
    asked = rng.sample(facts, questions)
    sentences = []
    length = sum(len(fact.sentence) + 1 for fact in facts)
    while length < characters:
        sentences.append(_filler(rng))
        length += len(sentences[-1]) + 1
    for fact in facts:
        sentences.insert(rng.randint(0, len(sentences)), fact.sentence)
    messages = _conversation(rng, " ".join(sentences), asked)
    return Sample(TASK, f"{TASK}|{messages[0].content}", messages, Mentions((asked[-1].value,)))


def _conversation(rng: Random, text: str, asked: list[Planted]) -> tuple[Message, ...]:
    """The text with its first question, then the other questions, each on its own."""
    first = asked[0]
    opening = rng.choice(
        (
            "Read this text.",
            "Here is a text.",
            "Read the following text carefully.",
            "Text:",
            "",
            "Remember what you read here.",
        )
    )
    closing = rng.choice(("Question: ", "Now answer: ", "", "Now tell me: ", "Q: "))
    parts = [part for part in (opening, text) if part]
    form = rng.random()
    messages: tuple[Message, ...]
    if form < 0.6:
        messages = (Message("user", "\n\n".join([*parts, closing + first.question])),)
    elif form < 0.8:
        ready = rng.choice(("I have read it. What would you like to know?", "Done. What is your question?"))
        messages = (Message("user", "\n\n".join(parts)), Message("assistant", ready), Message("user", first.question))
    else:
        messages = (Message("system", f"Answer from this text.\n\n{text}"), Message("user", first.question))
    messages += (Message("assistant", first.answer),)
    for fact in asked[1:]:
        messages += (Message("user", fact.question), Message("assistant", fact.answer))
    return messages


def _facts(rng: Random, count: int) -> list[Planted]:
    """Facts about subjects that all differ, so that every question has one answer."""
    found: dict[str, Planted] = {}
    while len(found) < count:
        fact = rng.choice(_KINDS)(rng)
        found.setdefault(fact.subject, fact)
    return list(found.values())


def _code(rng: Random) -> Planted:
    noun = rng.choice(("code", "number", "secret code", "key code"))
    thing = f"{rng.choice(COLOURS + ADJECTIVES)} {rng.choice(THINGS + PLACES)}"
    value = "".join(rng.choice("0123456789") for _ in range(rng.randint(3, 6)))
    question = ask(
        rng,
        (
            "what is the {n} of the {t}",
            "what's the {n} of the {t}",
            "tell me the {n} of the {t}",
            "which {n} has the {t}",
            "do you remember the {n} of the {t}",
        ),
        n=noun,
        t=thing,
    )
    sentence = rng.choice(
        (f"The {noun} of the {thing} is {value}.", f"Remember that the {noun} of the {thing} is {value}.")
    )
    return Planted(thing, sentence, question, f"The {noun} of the {thing} is {value}.", value)


def _password(rng: Random) -> Planted:
    place, value = rng.choice(PLACES), f"{any_word(rng)}-{rng.choice(WORDS)}"
    question = ask(
        rng,
        ("what is the password [for|of] the {p}", "which password opens the {p}", "tell me the password of the {p}"),
        p=place,
    )
    return Planted(
        f"password {place}",
        f"The password of the {place} is {value}.",
        question,
        f"The password of the {place} is {value}.",
        value,
    )


def _person(
    relation: str, pool: tuple[str, ...], statement: str, questions: tuple[str, ...]
) -> Callable[[Random], Planted]:
    def plant(rng: Random) -> Planted:
        name, value = any_name(rng), rng.choice(pool)
        sentence = statement.format(name=name, value=value, a=article(value))
        question = ask(rng, questions, name=name)
        return Planted(f"{relation} {name}", sentence, question, sentence, value)

    return plant


def _meeting(rng: Random) -> Planted:
    name, value = any_name(rng), f"{rng.choice(DAYS)} at {rng.randint(1, 12)}:{rng.choice(('00', '15', '30', '45'))}"
    question = ask(
        rng,
        ("when is the meeting with {name}", "when do [we|you] meet {name}", "what time is the meeting with {name}"),
        name=name,
    )
    return Planted(
        f"meeting {name}",
        f"The meeting with {name} is on {value}.",
        question,
        f"The meeting with {name} is on {value}.",
        value,
    )


def _keeping(rng: Random) -> Planted:
    name, thing, place = any_name(rng), rng.choice(THINGS), rng.choice(PLACES)
    sentence = f"{name} keeps the {thing} in the {place}."
    question = ask(
        rng,
        ("where does {name} keep the {t}", "where is the {t} of {name}", "in which place does {name} keep the {t}"),
        name=name,
        t=thing,
    )
    return Planted(f"{thing} {name}", sentence, question, sentence, place)


_KINDS: tuple[Callable[[Random], Planted], ...] = (
    _code,
    _code,
    _code,
    _password,
    _meeting,
    _keeping,
    _person(
        "city",
        CITIES,
        "{name} lives in {value}.",
        ("where does {name} live", "[which|what] city does {name} live in", "in which city does {name} live"),
    ),
    _person(
        "food",
        FOODS,
        "{name} likes {value} best of all foods.",
        ("what is {name}'s favourite food", "[which|what] food does {name} like best"),
    ),
    _person(
        "job",
        JOBS,
        "{name} works as {a} {value}.",
        ("what is {name}'s job", "what does {name} work as", "what does {name} do for a living"),
    ),
    _person(
        "colour",
        COLOURS,
        "The favourite colour of {name} is {value}.",
        ("what is {name}'s favourite [colour|color]", "[which|what] colour does {name} like best"),
    ),
    _person(
        "pet",
        ANIMALS,
        "{name} has {a} {value} as a pet.",
        ("what pet does {name} have", "[which|what] animal does {name} have", "what is {name}'s pet"),
    ),
    _person(
        "hobby",
        HOBBIES,
        "In free time {name} enjoys {value}.",
        ("what does {name} do in free time", "what is {name}'s hobby", "[which|what] hobby does {name} have"),
    ),
)

_VERBS = (
    "found",
    "carried",
    "painted",
    "cleaned",
    "sold",
    "bought",
    "lost",
    "mended",
    "borrowed",
    "moved",
    "hid",
    "wanted",
)


def _filler(rng: Random) -> str:
    """A sentence that answers none of the questions: no person of it has a name."""
    choice = rng.choice
    kind = rng.randrange(8)
    if kind == 0:
        return f"The {choice(ADJECTIVES)} {choice(ANIMALS)} slept near the {choice(PLACES)}."
    if kind == 1:
        return f"It was {choice(WEATHERS)} over the {choice(PLACES)} on {choice(DAYS)}."
    if kind == 2:
        return f"A {choice(JOBS)} {choice(_VERBS)} the {choice(ADJECTIVES)} {choice(THINGS)} in the morning."
    if kind == 3:
        return f"People in the {choice(PLACES)} talked about {choice(FOODS)} and {choice(HOBBIES)}."
    if kind == 4:
        return f"The {choice(THINGS)} next to the {choice(THINGS)} was {choice(ADJECTIVES)} and {choice(COLOURS)}."
    if kind == 5:
        return f"Nobody knew why the {choice(PLACES)} was so {choice(ADJECTIVES)} that day."
    if kind == 6:
        return (
            f"Later the {choice(JOBS)} and the {choice(JOBS)} walked from the {choice(PLACES)} to the {choice(PLACES)}."
        )
    return f"There were {rng.randint(2, 90)} {choice(FOODS)} on the table of the {choice(PLACES)}."
