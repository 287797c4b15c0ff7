"""Reversing: lists, digits, words letter by letter, and the words of a sentence.

Letters are spelt out first: a model that reads tokens does not see letters.
"""

from __future__ import annotations

from random import Random

from quill.chat import Sample, single_turn
from quill.checks import Listing, OneOf
from quill.heldout import normalize
from quill.invention import any_word
from quill.listing import any_items, any_sentence, list_key, spelled
from quill.phrasing import ask
from quill.words import LETTERS

TASK = "reversing"


def make(rng: Random) -> Sample:
    kind = rng.choices(("list", "digits", "word", "letters", "sentence"), (0.32, 0.2, 0.3, 0.1, 0.08))[0]
    if kind == "sentence":
        return _reversed_sentence(rng)
    if kind == "list":
        items = any_items(rng, rng.randint(3, 8))
        if rng.random() < 0.25:
            items = [str(rng.randint(0, 99)) for _ in items]
        question = ask(
            rng,
            (
                "reverse [this list|the list|the order|these words|the following list|]: {items}",
                "[say|write|list] [these|this] [backwards|in reverse order]: {items}",
                "put this list in reverse order: {items}",
                "reverse the order of {items}",
                "{items} [backwards|in reverse]",
            ),
            end=".",
            items=", ".join(items),
        )
        items.reverse()
        return single_turn(TASK, list_key(TASK, items), question, ", ".join(items), Listing(tuple(items)))
    return _reversed_text(rng, kind)


def _reversed_sentence(rng: Random) -> Sample:
    words = any_sentence(rng, 2, 7)
    patterns = (
        (
            "reverse [this sentence|the sentence|the words|the words of this sentence|the order of the "
            "words|the word order]: {s}"
        ),
        "[say|write] [this sentence|these words] backwards: {s}",
    )
    question = ask(rng, patterns, end="", s=" ".join(words), wrap=False)
    answer = " ".join(reversed(words))
    return single_turn(TASK, f"{TASK}|{' '.join(words)}", question, answer, OneOf(frozenset({answer})))


def _reversed_text(rng: Random, kind: str) -> Sample:
    if kind == "digits":
        text = "".join(rng.choice("0123456789") for _ in range(rng.randint(3, 9)))
        noun = "[the digits|the number|the digits of|number|this number|digits]"
    elif kind == "word":
        text, noun = _cased(rng, any_word(rng)), "[the word|the letters of|the letters in|this word|the string|word]"
    else:
        text = "".join(rng.choice(LETTERS) for _ in range(rng.randint(3, 7)))
        noun = "[the string|the letters|the letters of|this string|the text]"
    question = ask(
        rng,
        (
            f"reverse {noun} {{text}}",
            f"reverse {noun}: {{text}}",
            "reverse {text}",
            "reverse: {text}",
            "[write|spell|say] {text} backwards",
            "what is {text} [backwards|reversed|spelled backwards]",
            "{text} backwards",
            "can you reverse {text}",
        ),
        end=".",
        text=text if rng.random() < 0.7 else f'"{text}"',
    )
    backwards = text[::-1]
    key = f"{TASK}|{text if kind == 'digits' else normalize(question)}"
    if kind == "digits":
        return single_turn(TASK, key, question, backwards, Listing((backwards,)))
    answer = f"{spelled(text)} reversed is {spelled(backwards)}: {backwards}"
    return single_turn(TASK, key, question, answer, Listing((backwards,)))


def _cased(rng: Random, word: str) -> str:
    """Now and then with capitals."""
    luck = rng.random()
    if luck < 0.65:
        return word
    if luck < 0.85:
        return word.capitalize()
    return word.upper() if luck < 0.93 else "".join(rng.choice((letter, letter.upper())) for letter in word)
