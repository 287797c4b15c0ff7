"""Short stories from a small grammar of our own, about what was asked for.

Checked by rules: what was asked for is mentioned, the length is right, the text ends properly and repeats no sentence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from quill.chat import Sample, single_turn
from quill.checks import WellFormedText
from quill.heldout import normalize
from quill.invention import any_name, any_word
from quill.phrasing import article, ask, expand
from quill.tasks import verses
from quill.tasks.wordfacts import plural
from quill.words import ADJECTIVES, ANIMALS, DREAMS, JOBS, NAMES, PEOPLE, PLACES, THINGS

TASK = "stories"


@dataclass(frozen=True)
class Cast:
    name: str
    kind: str
    thing: str
    place: str
    friend: str
    topic: str

    def fill(self, text: str) -> str:
        filled = text.format(
            name=self.name,
            kind=self.kind,
            thing=self.thing,
            place=self.place,
            friend=self.friend,
            topic=self.topic,
            a_kind=f"{article(self.kind)} {self.kind}",
            a_thing=f"{article(self.thing)} {self.thing}",
            a_friend=f"{article(self.friend)} {self.friend}",
        )
        opening = 2 if filled.startswith('"') else 1
        return filled[:opening].upper() + filled[opening:]


_OPENINGS = (
    "once upon a time there was {a_kind} called {name} who lived near the {place}.",
    "in a small house by the {place} lived {name}, {a_kind} with a good heart.",
    "{name} was {a_kind} who knew every corner of the {place}.",
    "far away, behind the {place}, {a_kind} called {name} woke up early.",
)
_PLOTS: tuple[tuple[str, ...], ...] = (
    (
        "[one morning|one day|one quiet evening] {name} found {a_thing} [under a tree|in the grass|beside the path].",
        (
            "[nobody knew who had lost it|it looked old and important|it shone in the light], so {name} "
            "went from door to door to ask."
        ),
        "at the last door stood {a_friend} who [began to cry with joy|could hardly believe it|smiled at once].",
        '"my {thing}!" said the {friend}. "I have looked for it all [week|year|winter]."',
        (
            "{name} gave it back, and the two of them [shared a warm supper|talked until the stars came "
            "out|became good friends]."
        ),
    ),
    (
        "more than anything {name} wanted {a_thing}, but there was [not a single coin|no money] in the house.",
        "so {name} helped {a_friend} [for seven days|all summer long|from dawn to dusk] and never complained.",
        "[on the last day|when the work was done] the {friend} brought out a parcel tied with string.",
        "inside lay {a_thing}, [finer than in any dream|small but perfect|bright as the morning].",
        "{name} learned that day that [patience is worth more than luck|kind work comes back|good things take time].",
    ),
    (
        (
            "one night [a storm came over the hills|the wind put out every light|the moon hid behind a "
            "cloud], and {a_friend} lost the way home."
        ),
        "{name} heard [a small voice|somebody calling] in the dark and [took|picked up] the {thing}.",
        "step by step {name} followed the voice until the two of them met at the {place}.",
        '"do not be afraid," said {name}, and held up the {thing}.',
        (
            "together they walked home, and [the {friend} was never lost again|by morning the sky was "
            "clear|nobody felt afraid any more]."
        ),
    ),
    (
        "one day the {thing} of {name} [was gone|broke in two|fell into the water].",
        "{name} looked [high and low|in every corner|everywhere], but found only {a_friend} who was sad as well.",
        '"let us help each other," said {name}, and the {friend} nodded.',
        (
            "[before the sun went down|after a long day|with a little luck] they had [made|found] a "
            "better {thing} than before."
        ),
        "since then they meet at the {place} every [week|morning|spring] and laugh about it.",
    ),
)
# For a story about anything that is neither a character, a thing nor a place.
_DREAM = (
    "[day and night|since childhood|more than anything] {name} dreamed of {topic}.",
    (
        "[nobody in the village|no one at the {place}] knew anything about {topic}, but {a_friend} had "
        "an old book about it."
    ),
    "{name} read it from the first page to the last, [by candle light|under the blanket|beside the stove].",
    '"now I know what to do," said {name}, and packed {a_thing} and some bread.',
    (
        "the way was long, but in the end {name} [came home with the best story|saw it all|understood] "
        "and told everybody about {topic}."
    ),
)
_ENDINGS = (
    "the end.",
    "and that is the story of {name}.",
    "and so {name} went to sleep with a smile.",
    "from then on {name} was never alone.",
)

_REQUESTS = (
    (
        "[tell me|write|write me|give me|make up|can you tell me|can you write|i want|i'd like|please "
        "write] [a|a short|a little|a small] [story|tale|bedtime story]"
    ),
    (
        "[tell me|write|write me|give me|i want] a [scary|funny|sad|happy|long|very "
        "short|nice|good|new|fairy|strange] [story|tale]"
    ),
    "[a short story|story|short story]",
    "[tell|write] a [story|short story]",
)

_ABOUT = ("about", "about", "about", "with", "on")


def make(rng: Random) -> Sample:
    return _story(rng) if rng.random() < 0.7 else verses.make(rng)


def _story(rng: Random) -> Sample:
    cast = Cast(
        any_name(rng), _character(rng), rng.choice(THINGS), rng.choice(PLACES), _character(rng), _story_topic(rng)
    )
    wish, asked = _wish(rng, cast)
    if "{name}" not in wish:
        cast = replace(cast, name=rng.choice(NAMES))
    pattern = f"{rng.choice(_REQUESTS)} {rng.choice(_ABOUT)} {wish}" if wish else rng.choice(_REQUESTS)
    question = ask(
        rng,
        pattern,
        end=".",
        name=cast.name if rng.random() < 0.85 else cast.name.lower(),
        kind=cast.kind,
        thing=cast.thing,
        place=cast.place,
        friend=cast.friend,
        kinds=plural(cast.kind),
        topic=cast.topic,
    )
    plot = _DREAM if "{topic}" in wish else rng.choice(_PLOTS)
    sentences = [rng.choice(_OPENINGS), *(expand(rng, sentence) for sentence in plot), rng.choice(_ENDINGS)]
    answer = " ".join(cast.fill(sentence) for sentence in sentences)
    check = WellFormedText(asked, min_lines=1, max_lines=4, min_words=45, max_words=160)
    return single_turn(TASK, f"{TASK}|{normalize(question)}", question, answer, check)


def _character(rng: Random) -> str:
    noun = rng.choice(ANIMALS + JOBS + PEOPLE)
    return noun if rng.random() < 0.7 else f"{rng.choice(ADJECTIVES)} {noun}"


def _wish(rng: Random, cast: Cast) -> tuple[str, tuple[str, ...]]:
    """What the story is asked to hold, as a pattern, and the words it must mention."""
    kind, thing, friend = (
        f"{article(noun)} {{{slot}}}"
        for noun, slot in ((cast.kind, "kind"), (cast.thing, "thing"), (cast.friend, "friend"))
    )
    wishes: tuple[tuple[str, tuple[str, ...]], ...] = (
        (kind, (cast.kind,)),
        (thing, (cast.thing,)),
        ("{name}", (cast.name,)),
        (f"{kind} [called|named] {{name}}", (cast.kind, cast.name)),
        (f"{kind} and {thing}", (cast.kind, cast.thing)),
        (f"{{name}}[,| and] {thing}", (cast.name, cast.thing)),
        (f"{kind} and {friend}", (cast.kind, cast.friend)),
        (f"{kind} [called|named] {{name}} and {thing}", (cast.kind, cast.name, cast.thing)),
        (f"{kind} in [a|the] {{place}}", (cast.kind, cast.place)),
        (f"{{name}}, {friend} and {thing}", (cast.name, cast.friend, cast.thing)),
        (f"{kind}, {thing} and [a|the] {{place}}", (cast.kind, cast.thing, cast.place)),
        ("[two|three|some] {kinds}", (cast.kind,)),
        ("{kinds}", (cast.kind,)),
        (f"{kind} [called|named] {{name}} and [her|his|a|their] {{friend}}", (cast.kind, cast.name, cast.friend)),
        (f"{kind} who [finds|has|wants|loses|needs] {thing}", (cast.kind, cast.thing)),
        (f"{kind} who [lives|sleeps|works|hides] in [a|the] {{place}}", (cast.kind, cast.place)),
        (f"{thing} in [a|the] {{place}}", (cast.thing, cast.place)),
        ("the {place}", (cast.place,)),
        ("{topic}", (cast.topic,)),
        ("{topic}", (cast.topic,)),
        (f"how {{name}} [found|lost] {thing}", (cast.name, cast.thing)),
        ("", ()),
    )
    return rng.choice(wishes)


def _story_topic(rng: Random) -> str:
    luck = rng.random()
    if luck < 0.4:
        return rng.choice(DREAMS)
    return f"{any_word(rng)} {any_word(rng)}" if luck < 0.7 else any_word(rng)
