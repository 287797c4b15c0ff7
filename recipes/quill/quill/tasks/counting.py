"""Counting: letters, words and list items, and what else is seen by walking along a word or a list.

Words are spelt out first: a model that reads tokens does not see letters. Lists are walked with a running count.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from quill.chat import Sample, single_turn
from quill.checks import LastNumber, Listing, Mentions
from quill.heldout import normalize
from quill.invention import any_word
from quill.listing import any_items, any_sentence, list_key, list_text, spelled, times
from quill.phrasing import ask
from quill.tables import ORDINALS
from quill.words import ANIMALS, COLOURS, LETTERS, THINGS

TASK = "counting"


_PALINDROMES = (
    "racecar",
    "level",
    "radar",
    "madam",
    "noon",
    "kayak",
    "civic",
    "rotor",
    "refer",
    "anna",
    "otto",
    "eve",
    "wow",
)


def make(rng: Random) -> Sample:
    kind = rng.choices(("letters", "length", "items", "among", "upwards", "other"), (0.3, 0.2, 0.12, 0.18, 0.08, 0.12))[
        0
    ]
    if kind == "letters":
        return _letter_count(rng)
    if kind == "length":
        return _word_length(rng)
    if kind == "items":
        return _item_count(rng) if rng.random() < 0.6 else _sentence_count(rng)
    if kind == "other":
        return rng.choice((_nth_letter, _nth_letter, _extreme, _palindrome))(rng)
    return _count_among(rng) if kind == "among" else _count_upwards(rng)


def _letter_count(rng: Random) -> Sample:
    word = any_word(rng) if rng.random() < 0.88 else f"{any_word(rng)} {any_word(rng)}"
    if rng.random() < 0.12:
        return _vowel_count(rng, word)
    letter = rng.choice(word.replace(" ", "")) if rng.random() < 0.85 else rng.choice(LETTERS)
    shown = rng.choice((letter, letter, f'"{letter}"', f"'{letter}'", letter.upper()))
    plural = rng.choice((f"{letter}'s", f"{letter}s", f"letters {letter}", f"{letter.upper()}s", f"{letter.upper()}'s"))
    question = ask(
        rng,
        (
            "how many times does [the letter |]{shown} [appear|occur] in [the word |]{word}",
            "how many {plural} [are in|are there in|in|does {word} have] [the word |]{word}",
            "count the {plural} in [the word |]{word}",
            "how often [does|is] {shown} in [the word |]{word}",
            "how many {plural} in {word}",
            "how many {plural} are in {word}",
        ),
        shown=shown,
        plural=plural,
        word=rng.choice((word, word, f'"{word}"')),
    )
    count = word.count(letter)
    answer = f"{spelled(word)}: the letter {letter} appears {times(count)}."
    return single_turn(TASK, f"{TASK}|{normalize(question)}", question, answer, LastNumber(str(count)))


def _vowel_count(rng: Random, word: str) -> Sample:
    vowels = rng.random() < 0.7
    found = [letter for letter in word.replace(" ", "") if (letter in "aeiou") == vowels]
    kind = "vowel" if vowels else "consonant"
    patterns = (
        "how many {k}s [are in|are there in|in|does] {w}",
        "count the {k}s in [the word |]{w}",
        "number of {k}s in {w}",
    )
    question = ask(rng, patterns, k=kind, w=rng.choice((word, f'"{word}"')))
    answer = f"{spelled(word)} has the {kind}s {' '.join(found) or 'none'}, {len(found)} in all."
    return single_turn(TASK, f"{TASK}|{normalize(question)}", question, answer, LastNumber(str(len(found))))


def _word_length(rng: Random) -> Sample:
    word = any_word(rng) if rng.random() < 0.88 else f"{any_word(rng)} {any_word(rng)}"
    shown = rng.choice((word, word, f'"{word}"'))
    length = len(word.replace(" ", ""))
    if rng.random() < 0.3:
        question = ask(
            rng,
            ("[spell|how do you spell|can you spell] [the word |]{word}", "spell out {word}", "spelling of {word}"),
            word=shown,
        )
        letters = spelled(word)
        key = f"{TASK}|{normalize(question)}"
        return single_turn(
            TASK, key, question, f"{letters}: {length} letters.", Mentions((letters, f"{length} letters"))
        )
    question = ask(
        rng,
        (
            "how many letters [are in|are there in|does|has] [the word |]{word}[| have]",
            "count the letters [in|of] [the word |]{word}",
            "how long is the word {word}",
            "length of [the word |]{word}",
            "number of letters in {word}",
        ),
        word=shown,
    )
    answer = f"{spelled(word)}: {length} letters, so the answer is {length}."
    return single_turn(TASK, f"{TASK}|{normalize(question)}", question, answer, LastNumber(str(length)))


def _item_count(rng: Random) -> Sample:
    items = any_items(rng, rng.randint(2, 10))
    question = ask(
        rng,
        (
            "how many [items|words|things|entries] are [in this list|there|listed here]: {items}",
            "count [these|the items|the words|these words]: {items}",
            "how many words: {items}",
            "how long is this list: {items}",
            "count {items}",
        ),
        items=list_text(rng, items),
    )
    return single_turn(TASK, list_key(TASK, items), question, _counted(items), LastNumber(str(len(items))))


def _sentence_count(rng: Random) -> Sample:
    words = any_sentence(rng, 2, 12)
    sentence = " ".join(words)
    sentence = sentence.capitalize() + "." if rng.random() < 0.4 else sentence
    patterns = (
        "how many words [are in|does] [this sentence|the sentence|this|the following][| have]: {s}",
        "count the words[| in this sentence| in this text]: {s}",
        "[number of words in|word count of]: {s}",
    )
    question = ask(rng, patterns, end="", s=sentence if rng.random() < 0.7 else f'"{sentence}"', wrap=False)
    return single_turn(
        TASK,
        f"{TASK}|{sentence}",
        question,
        _counted(sentence.rstrip(".").split()),
        LastNumber(str(len(words))),
    )


def _nth_letter(rng: Random) -> Sample:
    word = any_word(rng)
    at = rng.randrange(min(len(word), len(ORDINALS)))
    ordinal, letter = ORDINALS[at], word[at]
    if rng.random() < 0.2:
        ordinal, letter = "last", word[-1]
    shown = rng.choice((word, f'"{word}"'))
    question = ask(rng, "[what is|what's|which is|tell me|] the {n} letter [of|in] [the word |]{w}", n=ordinal, w=shown)
    answer = f"{spelled(word)}: the {ordinal} letter is {letter}"
    return single_turn(TASK, f"{TASK}|{normalize(question)}", question, answer, Listing((answer.rsplit(": ", 1)[-1],)))


def _extreme(rng: Random) -> Sample:
    """The longest or shortest word, or the largest or smallest number, of a list."""
    if rng.random() < 0.5:
        items = [str(n) for n in rng.sample(range(rng.choice((20, 100, 1000))), rng.randint(2, 7))]
        adjective, by = rng.choice((("largest", 1), ("biggest", 1), ("smallest", -1), ("highest", 1), ("lowest", -1)))
        found, noun = max(items, key=lambda item: by * int(item)), "number"
    else:
        items = any_items(rng, rng.randint(2, 5))
        adjective, by = rng.choice((("longest", 1), ("shortest", -1)))
        found, noun = max(items, key=lambda item: by * len(item)), "word"
        if sum(len(item) == len(found) for item in items) > 1:
            return _extreme(rng)
    patterns = (
        "[what is|what's|which is|find] the {a} {n}[| here| of these| in this list]: {items}",
        "which {n} is the {a}: {items}",
        "{a} {n}: {items}",
    )
    question = ask(rng, patterns, a=adjective, n=noun, items=", ".join(items))
    sizes = f" ({', '.join(str(len(item)) for item in items)} letters)" if noun == "word" else ""
    answer = f"The {adjective} {noun}{sizes} is: {found}"
    return single_turn(TASK, list_key(TASK, [adjective, *items]), question, answer, Listing((found,)))


def _palindrome(rng: Random) -> Sample:
    word = any_word(rng)
    if rng.random() < 0.5:
        word = rng.choice((word[:4] + word[:4][::-1], word[:3] + word[:2][::-1], *_PALINDROMES))
    patterns = (
        "is [the word |]{w} a palindrome",
        "is {w} [the same|equal] backwards",
        "tell me if {w} is a palindrome",
    )
    question = ask(rng, patterns, w=rng.choice((word, f'"{word}"')))
    same = word == word[::-1]
    verdict = "yes, it is a palindrome" if same else "no, it is not a palindrome"
    answer = f"{spelled(word)} reversed is {spelled(word[::-1])}: {verdict}"
    return single_turn(
        TASK,
        f"{TASK}|{normalize(question)}",
        question,
        answer,
        Listing((verdict.split(", ")[0], verdict.split(", ")[1])),
    )


def _count_among(rng: Random) -> Sample:
    """How many entries of a list are one given word."""
    kinds = rng.sample(rng.choice((ANIMALS, COLOURS, THINGS)), rng.randint(2, 4))
    items = [rng.choice(kinds) for _ in range(rng.randint(4, 10))]
    asked = rng.choice(kinds)
    count = items.count(asked)
    question = ask(
        rng,
        (
            "how many times does {asked} [appear|occur] in [this list|the list]: {items}",
            "how often is {asked} in [this list|the list]: {items}",
            "count {asked} in: {items}",
            "how many times do you see {asked} here: {items}",
        ),
        asked=asked,
        items=", ".join(items),
    )
    walk = ", ".join(f"{item} {items[: i + 1].count(asked)}" for i, item in enumerate(items))
    answer = f"{walk}. So {asked} appears {times(count)}."
    return single_turn(TASK, list_key(TASK, [asked, *items]), question, answer, LastNumber(str(count)))


def _count_upwards(rng: Random) -> Sample:
    """From one number to another, up or down."""
    start, last = rng.choice(((1, rng.randint(3, 30)), (0, rng.randint(3, 20)), (rng.randint(2, 80), 0)))
    last = last or start + rng.randint(2, 15)
    down = rng.random() < 0.3
    if down:
        start, last = last, start
        patterns: tuple[str, ...] = (
            "count [down |backwards |]from {start} to {last}",
            "[list|say|write] the numbers from {start} [down |]to {last}",
        )
        if last in (0, 1):
            patterns += ("count [down|backwards] from {start}" if last else "countdown from {start}",)
    else:
        patterns = (
            "count [up |]from {start} to {last}",
            "[list|say|write] [all |]the numbers from {start} to {last}",
            "can you count from {start} to {last}",
        )
        if start == 1:
            patterns += ("count [up |]to {last}", "can you count to {last}")
    question = ask(rng, patterns, end=".", start=start, last=last)
    step = -1 if down else 1
    numbers = tuple(str(n) for n in range(start, last + step, step))
    return single_turn(TASK, f"{TASK}|{normalize(question)}", question, ", ".join(numbers), Listing(numbers))


def _counted(items: Sequence[str]) -> str:
    numbered = ", ".join(f"{i}. {item}" for i, item in enumerate(items, 1))
    return f"{numbered}. That makes {len(items)}."
