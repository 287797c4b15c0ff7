"""What Quill cannot do: off-topic, unknown or hard questions, each answered honestly with what it can do instead."""

from __future__ import annotations

from random import Random

from quill.blocks import read_blocks
from quill.chat import Sample, single_turn
from quill.checks import Mentions
from quill.heldout import normalize
from quill.invention import any_name, invented_name, invented_word
from quill.phrasing import ask
from quill.words import ADJECTIVES, ANIMALS, CITIES, FOODS, HOBBIES, JOBS, LETTERS, PLACES, SPELLABLE, THINGS, WORDS

TASK = "limits"

CHECK = Mentions(("tiny demonstration model",))

_BLOCKS = read_blocks("limits")
_WEIGHTS = tuple(len(block.patterns) for block in _BLOCKS)
_UNKNOWN = _BLOCKS[-1].answers[0]

_HINTS = (
    'Ask me, for example, "what is 17 × 23?" or "what is the capital of Japan?".',
    'Ask me, for example, "write a haiku about rain" or "sort 5, 3, 9, 1".',
    'Ask me, for example, "tell me a story about a fox" or "how many r\'s are in strawberry?".',
    'Ask me, for example, "what is a KV cache?" or "write a Python function that reverses a string".',
    'Ask me "what can you do?" to see what I know.',
)

_FOREIGN = "I only speak English, I am afraid: I am a tiny demonstration model."
_SCRIPTS = (
    ("а", "я"),
    ("α", "ω"),
    ("א", "ת"),
    ("ا", "ي"),
    ("अ", "ह"),
    ("ぁ", "ん"),
    ("ァ", "ン"),
    ("一", "龥"),
    ("一", "龥"),
    ("가", "힣"),
    ("ก", "ฮ"),
    ("à", "ÿ"),
)

# The beginnings of questions about anything at all; loose words follow.
_OPENINGS = (
    "what",
    "why",
    "how",
    "who",
    "when",
    "where",
    "can",
    "should",
    "is",
    "do",
    "does",
    "did",
    "would",
    "could",
    "which",
    "what if",
    "why does",
    "why did",
    "how do",
    "how can",
    "how many",
    "how much",
    "who is",
    "who was",
    "when did",
    "where can i find",
    "i need",
    "i want",
    "i think",
    "i have",
    "tell me why",
    "tell me how",
    "explain why",
    "explain how",
    "give me",
    "show me",
    "make",
    "find",
    "help me",
    "please",
    "my",
    "the",
    "let us",
    "we",
    "they",
    "there is",
    "today",
    "yesterday",
    "in my opinion",
    "is it true that",
    "what about the",
    "do you know how",
)
_FILLERS = (
    "the",
    "a",
    "of",
    "in",
    "to",
    "and",
    "with",
    "for",
    "my",
    "is",
    "on",
    "that",
    "from",
    "by",
    "not",
    "without",
)
_SYLLABLES = (
    "zor",
    "bla",
    "mik",
    "tan",
    "qui",
    "vex",
    "lo",
    "ra",
    "dun",
    "fre",
    "sha",
    "pol",
    "gri",
    "no",
    "ulu",
    "kep",
    "wim",
    "jas",
)


def make(rng: Random) -> Sample:
    luck = rng.random()
    if luck < 0.05:
        question, opening = _gibberish(rng), _UNKNOWN
    elif luck < 0.09:
        question, opening = _foreign(rng), _FOREIGN
    elif luck < 0.25:
        question, opening = _anything(rng), _UNKNOWN
    else:
        block = rng.choices(_BLOCKS, _WEIGHTS)[0]
        question, opening = ask(rng, rng.choice(block.patterns), fold=True, slots=_slots(rng)), block.answers[0]
    return single_turn(TASK, f"{TASK}|{normalize(question)}", question, f"{opening} {rng.choice(_HINTS)}", CHECK)


def _foreign(rng: Random) -> str:
    """Words in a script of another language."""
    first, last = rng.choice(_SCRIPTS)
    words = (
        "".join(chr(rng.randint(ord(first), ord(last))) for _ in range(rng.randint(1, 7)))
        for _ in range(rng.randint(1, 4))
    )
    return " ".join(words) + rng.choice(("", "?", "!", "."))


def _anything(rng: Random) -> str:
    """A question or remark of loose words that no task knows."""
    words = []
    for _ in range(rng.randint(2, 7)):
        if rng.random() < 0.4:
            words.append(rng.choice(_FILLERS))
        words.append(rng.choice(SPELLABLE) if rng.random() < 0.85 else invented_word(rng))
    return ask(rng, f"{rng.choice(_OPENINGS)} {{words}}", end=rng.choice("?."), words=" ".join(words))


def _slots(rng: Random) -> dict[str, str]:
    topics = (
        f"{rng.choice(ADJECTIVES)} {rng.choice(ANIMALS)}s",
        rng.choice(FOODS),
        rng.choice(HOBBIES),
        f"the {rng.choice(PLACES)}",
        f"{rng.choice(JOBS)}s",
        rng.choice(
            (
                "music",
                "history",
                "politics",
                "sports",
                "football",
                "art",
                "cars",
                "war",
                "love",
                "space",
                "health",
                "money",
                "climate change",
                "movies",
                "religion",
                "robots",
                "the economy",
                "technology",
                "school",
                "fashion",
            )
        ),
    )
    return {
        "thing": rng.choice(THINGS),
        "food": rng.choice(FOODS),
        "city": rng.choice(CITIES),
        "city2": rng.choice(CITIES),
        "job": rng.choice(JOBS),
        "adjective": rng.choice(ADJECTIVES),
        "animal": rng.choice(ANIMALS),
        "place": rng.choice(PLACES),
        "hobby": rng.choice(HOBBIES),
        "topic": rng.choice(topics),
        "word": rng.choice(WORDS),
        "word2": rng.choice(WORDS),
        "year": str(rng.randint(1800, 2040)),
        "n": str(rng.randint(2, 20)),
        "m": str(rng.randint(2, 90)),
        "nonsense": _nonsense(rng),
        "name": any_name(rng),
        "surname": invented_name(rng),
        "sentence": _anything(rng),
        "empire": rng.choice(("roman empire", "old kingdom", "great wall", "eastern empire")),
    }


def _nonsense(rng: Random) -> str:
    """A word or name that does not exist."""
    word = "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(2, 4)))
    return rng.choice(
        (
            word,
            word.capitalize(),
            invented_word(rng),
            invented_name(rng),
            f"{word.capitalize()} {rng.choice(_SYLLABLES).capitalize()}{rng.choice(_SYLLABLES)}",
        )
    )


def _gibberish(rng: Random) -> str:
    kind = rng.randrange(3)
    if kind == 0:
        return "".join(rng.choice(LETTERS) for _ in range(rng.randint(3, 12)))
    if kind == 1:
        return " ".join(
            "".join(rng.choice(LETTERS) for _ in range(rng.randint(2, 8))) for _ in range(rng.randint(2, 5))
        )
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(5, 9)))
