"""Facts about words, letters, numerals and the calendar, from the rows of ``tables``."""

from __future__ import annotations

from random import Random

from quill import tables
from quill.phrasing import ask
from quill.words import DAYS, LETTERS, MONTHS

Fact = tuple[str, str, tuple[str, ...]]  # question, answer, words any right answer holds


def make_fact(rng: Random) -> Fact:
    return rng.choice((_word_fact, _word_fact, _rhyme, _letter, _roman, _calendar))(rng)


def _word_fact(rng: Random) -> Fact:
    kind = rng.randrange(3)
    if kind == 0:
        left, right = rng.choice(list(tables.OPPOSITES.items()))
        if rng.random() < 0.4 and list(tables.OPPOSITES.values()).count(right) == 1 and right not in tables.OPPOSITES:
            left, right = right, left
        question = ask(
            rng,
            (
                "[what is|what's|tell me|give me|name] the opposite of {x}",
                "opposite of {x}",
                "the antonym of {x}",
                "which word means the opposite of {x}",
            ),
            fold=True,
            x=rng.choice((left, f'"{left}"')),
        )
        return question, f"The opposite of {left} is {right}.", (right,)
    if kind == 1:
        one, many = rng.choice(list(tables.PLURALS.items()))
        question = ask(
            rng,
            (
                "[what is|what's|tell me|give me] the plural [form |]of {x}",
                "plural of {x}",
                "one {x}, two what",
                "how do you write more than one {x}",
            ),
            fold=True,
            x=rng.choice((one, f'"{one}"')),
        )
        return question, f"The plural of {one} is {many}.", (many,)
    verb, past = rng.choice(list(tables.PASTS.items()))
    question = ask(
        rng,
        (
            "[what is|what's|tell me|give me] the past [tense |form |]of {x}",
            "past tense of {x}",
            "how do you say {x} in the past",
        ),
        fold=True,
        x=rng.choice((verb, f'"{verb}"')),
    )
    return question, f"The past tense of {verb} is {past}.", (past,)


def _rhyme(rng: Random) -> Fact:
    word, rhyme = rng.choice(list(tables.RHYMES.items()))
    if rng.random() < 0.5:
        word, rhyme = rhyme, word
    patterns = (
        "[what|which word] rhymes with {x}",
        "[give me|find|tell me|name] a [rhyme for|word that rhymes with] {x}",
        "a rhyme [for|with] {x}",
    )
    question = ask(rng, patterns, fold=True, x=rng.choice((word, f'"{word}"')))
    return question, f"A word that rhymes with {word} is {rhyme}.", (rhyme,)


def _letter(rng: Random) -> Fact:
    at = rng.randrange(26)
    letter = LETTERS[at]
    kind = rng.randrange(3)
    if kind == 0 and at < 25:
        question = ask(rng, "[what|which] letter [comes|is] after {x}", fold=True, x=letter)
        return question, f"After {letter} comes {LETTERS[at + 1]}.", (LETTERS[at + 1],)
    if kind == 1 and at > 0:
        question = ask(rng, "[what|which] letter [comes|is] before {x}", fold=True, x=letter)
        return question, f"Before {letter} comes {LETTERS[at - 1]}.", (LETTERS[at - 1],)
    vowel = letter in "aeiou"
    question = ask(rng, "is {x} a [vowel|consonant]", fold=True, x=letter)
    return (
        question,
        f"The letter {letter} is a {'vowel' if vowel else 'consonant'}.",
        ("vowel" if vowel else "consonant",),
    )


def _roman(rng: Random) -> Fact:
    n = rng.randint(1, 100)
    numeral = _numeral(n)
    if rng.random() < 0.5:
        question = ask(
            rng,
            (
                "[what is|write|how do you write] {x} in roman numerals",
                "{x} in roman numerals",
                "roman numeral for {x}",
            ),
            x=n,
        )
        return question, f"{n} in Roman numerals is {numeral}.", (numeral,)
    question = ask(
        rng, ("[what|which] number is [the roman numeral |]{x}", "what does the roman numeral {x} mean"), x=numeral
    )
    return question, f"The Roman numeral {numeral} is {n}.", (str(n),)


def _numeral(n: int) -> str:
    steps = ((100, "C"), (90, "XC"), (50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I"))
    text = ""
    for value, letters in steps:
        text += letters * (n // value)
        n %= value
    return text


def _calendar(rng: Random) -> Fact:
    kind = rng.randrange(4)
    if kind == 3:
        at, after = rng.randrange(12), rng.random() < 0.5
        where, other = ("after", MONTHS[(at + 1) % 12]) if after else ("before", MONTHS[at - 1])
        patterns = ("[what|which] month [comes|is] {w} {x}", "name the month {w} {x}", "the month {w} {x}")
        question = ask(rng, patterns, fold=True, x=MONTHS[at], w=where)
        return question, f"The month {where} {MONTHS[at]} is {other}.", (other,)
    if kind == 0:
        at, after = rng.randrange(7), rng.random() < 0.5
        where, other = ("after", DAYS[(at + 1) % 7]) if after else ("before", DAYS[at - 1])
        question = ask(
            rng,
            ("[what|which] day [comes|is] {w} {x}", "name the day {w} {x}", "the day {w} {x}"),
            fold=True,
            x=DAYS[at],
            w=where,
        )
        return question, f"The day {where} {DAYS[at]} is {other}.", (other,)
    at = rng.randrange(12)
    if kind == 1:
        question = ask(
            rng, ("how many days does {x} have", "how many days are in {x}", "days in {x}"), fold=True, x=MONTHS[at]
        )
        days = str(tables.MONTH_DAYS[at])
        return question, f"{MONTHS[at]} has {days} days{', or 29 in a leap year' if at == 1 else ''}.", (days,)
    question = ask(
        rng,
        ("[what|which] is the {x} month[| of the year]", "name the {x} month", "the {x} month of the year"),
        fold=True,
        x=tables.ORDINALS[at],
    )
    return question, f"The {tables.ORDINALS[at]} month is {MONTHS[at]}.", (MONTHS[at],)


def plural(noun: str) -> str:
    if noun in tables.PLURALS:
        return tables.PLURALS[noun]
    return (
        noun[:-1] + "ies" if noun.endswith("fly") else noun + ("es" if noun.endswith(("s", "x", "ch", "sh")) else "s")
    )
