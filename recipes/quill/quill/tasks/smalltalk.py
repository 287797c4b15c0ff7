"""Small talk and who Quill is: greetings, thanks, questions about itself, jokes, echoes and simple wishes.

An intent is a list of patterns and the answers that fit it; any of its answers is right.
"""

from __future__ import annotations

from random import Random

from quill.blocks import Block, read_blocks
from quill.chat import Message, Sample, single_turn
from quill.checks import Mentions, OneOf
from quill.heldout import normalize
from quill.invention import any_word
from quill.phrasing import ask
from quill.words import ANIMALS, FOODS, SPELLABLE, THINGS

TASK = "smalltalk"

_BLOCKS = read_blocks("smalltalk")
_GREETINGS = _BLOCKS[0]

_QUESTION_WORDS = ("how", "who", "what", "where", "are", "do", "can", "is", "when", "which", "why", "will")
_LITTLE = ("the", "a", "I", "am", "is", "and", "my", "to", "of", "in", "you", "are", "not", "it", "we")
_ECHO = (
    "[say|repeat|write|echo|print][| after me|| exactly][:|] {w}",
    "[say|write] the words {w}",
    "repeat[| this| after me]: {w}",
    "can you say {w}",
    "say this: {w}",
)
_ANOTHER = (
    "another[| one]",
    "one more",
    "another joke",
    "[tell me|do you know] another[| one| joke]",
    "again",
    "more",
    "and another[| one]",
    "more jokes",
    "another one please",
)

JOKES = (
    "Why did the token cross the context? To get to the other slide of the window.",
    "Why was the math book sad? It had too many problems.",
    "What do you call a bear with no teeth? A gummy bear.",
    "Why did the computer go to the doctor? It had a virus.",
    "What do you call a fish without an eye? A fsh.",
    "Why do bees have sticky hair? They use honeycombs.",
    "What did the zero say to the eight? Nice belt!",
    "Why did the scarecrow win a prize? It was outstanding in its field.",
    "What is brown and sticky? A stick.",
    "Why was six afraid of seven? Because seven ate nine.",
    "How does the ocean say hello? It waves.",
    "Why did the model overfit? It never learned to let go.",
)
_JOKE = Block(
    (
        "[tell|give|can you tell] me a [joke|funny joke|good joke|short joke]",
        "[tell me|do you know|got|know] [a joke|any jokes|some jokes]",
        "joke",
        "make me laugh",
        "say something funny",
        "tell me another joke",
        "be funny",
        "a joke about [anything|{w}s|a {w}|{w}]",
        "tell me [a joke about {w}s|something funny|a {w} joke]",
        "[i want to hear|i'd like|i want|do you have] a joke",
    ),
    (),
    JOKES,
    (),
)


def make(rng: Random) -> Sample:
    luck = rng.random()
    if luck < 0.2:
        return make_greeting(rng)
    if luck < 0.3:
        return _jokes(rng)
    if luck < 0.4:
        return _echo(rng)
    return _from(rng, rng.choice(_BLOCKS[1:]))


def make_greeting(rng: Random) -> Sample:
    return _from(rng, _GREETINGS)


def _from(rng: Random, block: Block) -> Sample:
    pattern = rng.choice(block.patterns)
    end = "?" if pattern.lstrip("[").startswith(_QUESTION_WORDS) else rng.choice(("", ".", "!"))
    question = ask(rng, pattern, end=end, fold=True, w=rng.choice(SPELLABLE), n=rng.randint(0, 999))
    if rng.random() < 0.12:
        question = f"{ask(rng, _GREETINGS.patterns, end=rng.choice((',', '!', '.')), wrap=False)} {question}"
    return single_turn(TASK, _key(question), question, rng.choice(block.answers), OneOf(frozenset(block.answers)))


def _jokes(rng: Random) -> Sample:
    """A joke, and sometimes more: each next one follows the last in the table, so that none comes twice in a row."""
    joke = _from(rng, _JOKE)
    messages, last = joke.messages, joke.answer
    for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
        last = JOKES[(JOKES.index(last) + 1) % len(JOKES)]
        again = ask(rng, _ANOTHER, end=".")
        messages = (*messages, Message("user", again), Message("assistant", last))
    if messages == joke.messages:
        return joke
    previous = messages[-3].content
    return Sample(TASK, joke.key, messages, OneOf(frozenset(JOKES) - {previous}))


def _echo(rng: Random) -> Sample:
    return rng.choice((_repeated, _repeated, _capitals, _several, _preferred))(rng)


def _repeated(rng: Random) -> Sample:
    words = _phrase(rng)
    question = ask(rng, _ECHO, end="", w=words if rng.random() < 0.6 else f'"{words}"', wrap=False)
    return single_turn(TASK, _key(question), question, words, OneOf(frozenset({words})))


def _phrase(rng: Random) -> str:
    """Something to say: words, or a sentence somebody could say to Quill."""
    if rng.random() < 0.35:
        return ask(
            rng,
            rng.choice(_BLOCKS).patterns,
            end=rng.choice(".!?"),
            wrap=False,
            w=rng.choice(SPELLABLE),
            n=rng.randint(0, 99),
        )
    words = [rng.choice(_LITTLE) if rng.random() < 0.3 else any_word(rng) for _ in range(rng.randint(1, 7))]
    return " ".join(words)


def _capitals(rng: Random) -> Sample:
    words = " ".join(any_word(rng) for _ in range(rng.randint(1, 4)))
    patterns = (
        "[write|put|make|turn|convert] {w} [in|to|into] [upper case|uppercase|capital letters|capitals|all caps]",
        "uppercase[:| this:|] {w}",
        "{w} in capital letters",
        "make this [uppercase|upper case]: {w}",
    )
    question = ask(rng, patterns, end=".", w=words if rng.random() < 0.7 else f'"{words}"')
    return single_turn(TASK, _key(question), question, words.upper(), Mentions((words.upper(),)))


def _several(rng: Random) -> Sample:
    times, word = rng.randint(2, 6), any_word(rng)
    shown = word if rng.random() < 0.6 else f'"{word}"'
    question = ask(rng, "[say|write|repeat|print] [the word |]{w} {n} times", end=".", w=shown, n=times)
    answer = " ".join([word] * times)
    return single_turn(TASK, _key(question), question, answer, OneOf(frozenset({answer})))


def _preferred(rng: Random) -> Sample:
    one, two = rng.sample(rng.choice((ANIMALS, FOODS, THINGS)), 2)
    patterns = (
        "do you [prefer|like] {a} or {b}[| more| better]",
        "{a} or {b}",
        "[what|which] is better[,|:|] {a} or {b}",
        "which do you like more[,|:|] {a} or {b}",
    )
    question = ask(rng, patterns, a=one, b=two)
    return single_turn(TASK, _key(question), question, f"I would take {one}, but both are fine.", Mentions((one,)))


def _key(question: str) -> str:
    return f"{TASK}|{normalize(question)}"
