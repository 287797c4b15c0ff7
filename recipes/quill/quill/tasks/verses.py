"""Poems and haiku: a verse of our own with what was asked for put in.

Checked by rules: the topic is mentioned, the lines are as many as they should be, the text ends properly.
"""

from __future__ import annotations

from random import Random

from quill.chat import Sample, single_turn
from quill.checks import WellFormedText
from quill.heldout import normalize
from quill.invention import any_word
from quill.phrasing import article, ask, expand
from quill.tasks.wordfacts import plural
from quill.words import ADJECTIVES, COLOURS, TOPICS

TASK = "stories"


_HAIKU = (
    (
        "Morning light is here,",
        "[soft|cool|pale] wind [moves over|sings around|rests on] the {x}:",
        "nothing else to say.",
    ),
    ("An old quiet day,", "and in it, [bright|small|still], the {x},", "waiting for the rain."),
    ("The {x} [alone|at dusk|at dawn],", "a leaf falls without a sound,", "the evening listens."),
    ("Under the grey sky", "I think of the {x} again;", "the first snow begins."),
    ("Who has seen the {x}?", "The river asks every stone,", "the stones keep silent."),
)
_POEM = (
    (
        "I saw the {x} at break of day,",
        "it stood so quiet on my way,",
        "I stayed a while and did not speak,",
        "and thought of it the whole long week.",
    ),
    (
        "The {x} is more than what you see,",
        "it holds a quiet mystery,",
        "look once again, look close and long,",
        "and you will find a hidden song.",
    ),
    (
        "When evening falls and lights are low,",
        "I think of the {x} I used to know,",
        "it asks for nothing, it only stays,",
        "and brightens up the darkest days.",
    ),
    (
        "Oh {x}, oh {x}, so plain, so fine,",
        "I wish your quiet ways were mine,",
        "the busy world runs on and on,",
        "but you are there when it is gone.",
    ),
)


def make(rng: Random) -> Sample:
    return rng.choice((_haiku, _poem))(rng)


def _haiku(rng: Random) -> Sample:
    topic = _topic(rng)
    request = "[write|write me|give me|compose|make|can you write|tell me|i want] a haiku"
    return _verse(
        rng,
        topic,
        (f"{request} about {{x}}", "haiku about {x}", "a haiku about {x}", f"{request} on {{x}}", request),
        rng.choice(_HAIKU),
    )


def _poem(rng: Random) -> Sample:
    topic = _topic(rng)
    request = (
        "[write|write me|give me|compose|make|can you write|tell me|i want] a [|short |little ][poem|rhyme|verse|song]"
    )
    return _verse(
        rng,
        topic,
        (
            f"{request} about {{x}}",
            f"{request} about {{x}}",
            "[poem|song] about {x}",
            f"{request} for {{x}}",
            "[write|write me] a {x} poem",
            request,
        ),
        rng.choice(_POEM),
    )


def _topic(rng: Random) -> str:
    """One to three words; known or not, they only have to be copied."""
    noun = rng.choice(TOPICS) if rng.random() < 0.7 else any_word(rng)
    if rng.random() < 0.3:
        noun = plural(noun)
    luck = rng.random()
    if luck < 0.08:
        return f"{noun} and {rng.choice(('', 'the '))}{rng.choice(TOPICS)}"
    if luck < 0.2:
        return f"{rng.choice(ADJECTIVES + COLOURS)} {noun}"
    return f"{rng.choice(TOPICS)} {noun}" if luck < 0.35 else noun


def _verse(rng: Random, topic: str, patterns: tuple[str, ...], lines: tuple[str, ...]) -> Sample:
    pattern = rng.choice(patterns)
    if "{x}" not in pattern:
        topic = rng.choice(TOPICS)
    shown = rng.choice((topic, topic, f"the {topic}", f"{article(topic)} {topic}", f"my {topic}"))
    question = ask(rng, pattern, end=".", fold=True, x=shown)
    answer = "\n".join(expand(rng, line).format(x=topic) for line in lines)
    check = WellFormedText((topic,) if "{x}" in pattern else (), len(lines), len(lines), 10, 60)
    return single_turn(TASK, f"{TASK}|{normalize(question)}", question, answer, check)
