"""Arithmetic: sums, differences, products and quotients, word problems, comparisons, and short follow-ups.

Hard results come with their working, so that each written token is an easy step. The key is the problem itself, so a
held-out problem is new in every wording.
"""

from __future__ import annotations

from random import Random

from quill.chat import Message, Sample, single_turn
from quill.checks import LastNumber, Mentions
from quill.phrasing import ask
from quill.tasks import expressions, numbers, wordproblems
from quill.tasks.wordproblems import worked
from quill.words import NUMBER_WORDS

TASK = "arithmetic"

_SIGNS = {
    "+": ("+", " + ", " plus ", "+ "),
    "-": ("-", " - ", " minus ", " − "),
    "*": ("*", " * ", " x ", "x", " × ", " times ", " multiplied by "),
    "/": ("/", " / ", " ÷ ", " divided by "),
}

_QUESTIONS = (
    (
        "[what is|what's|how much is|calculate|compute|solve|work out|tell me|what does|can you "
        "calculate|give me] {problem}"
    ),
    "{problem}",
    "{problem} =",
    "{problem} = ?",
    "[what is|what's] the [result|answer|value] of {problem}",
    "[i need|i want to know] {problem}",
    "{problem} is what",
    "what do you get for {problem}",
)

_COMMANDS = {
    "+": (
        "add {a} and {b}",
        "add {a} to {b}",
        "[what is |what's |]the sum of {a} and {b}",
        "[{a} and {b} together|{a} and {b} added]",
    ),
    "-": (
        "subtract {b} from {a}",
        "take {b} [away |]from {a}",
        "[what is |]the difference [of|between] {a} and {b}",
        "{a} take away {b}",
    ),
    "*": ("multiply {a} [by|with|and] {b}", "[what is |]the product of {a} and {b}", "{a} multiplied with {b}"),
    "/": (
        "divide {a} by {b}",
        "split {a} [by|into] {b}",
        "how often does {b} go into {a}",
        "[what is |]the quotient of {a} and {b}",
    ),
}


def make(rng: Random) -> Sample:
    luck = rng.random()
    if luck < 0.46:
        return _plain_problem(rng)
    if luck < 0.6:
        return wordproblems.make(rng)
    if luck < 0.68:
        return _comparison(rng)
    if luck < 0.76:
        return _follow_up(rng)
    if luck < 0.79:
        return _claim(rng)
    return numbers.make(rng) if luck < 0.84 else expressions.make(rng)


def _operands(rng: Random) -> tuple[int, str, int]:
    sign = rng.choice("++--**//")
    if sign == "*":
        a, b = rng.choice(((12, 12), (99, 9), (99, 12), (99, 99), (99, 99), (999, 12), (999, 99), (9999, 9)))
        return rng.randint(0, a), sign, rng.randint(0, b)
    if sign == "/" and rng.random() < 0.05:
        return rng.randint(0, 12), sign, rng.randint(1, 20)
    if sign == "/":
        divisor, quotient = rng.randint(1, 12), rng.randint(1, rng.choice((12, 12, 30, 99)))
        return divisor * quotient + (rng.randrange(divisor) if rng.random() < 0.35 else 0), sign, divisor
    top = rng.choice((12, 99, 99, 999, 999, 9999, 9999, 99999, 999999, 9999999))
    a, b = rng.randint(0, top), rng.randint(0, rng.choice((top, top, 99)))
    if top > 99 and rng.random() < 0.3:
        a, b = _carrying(rng, len(str(top)))
    if sign == "-" and rng.random() < 0.85:
        a, b = max(a, b), min(a, b)
    return a, sign, b


def _carrying(rng: Random, digits: int) -> tuple[int, int]:
    """Two numbers whose digits mostly add up to 9 or 10, so that carries run far."""
    upper = [rng.randint(0, 9) for _ in range(digits)]
    lower = [min(9, max(0, rng.choice((9, 9, 9, 10, rng.randint(0, 18))) - digit)) for digit in upper]
    return int("".join(map(str, upper))), int("".join(map(str, lower)))


def _key(a: int, sign: str, b: int) -> str:
    """Sums and products up to 12 are to be known by heart; larger problems are told apart by their operands."""
    if max(a, b) <= 12:
        return f"{TASK}|2+2"
    low, high = sorted((a, b))
    return f"{TASK}|{low} {high}"


def _problem_text(rng: Random, a: int, sign: str, b: int) -> str:
    if max(a, b) <= 20 and rng.random() < 0.08:
        spoken = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}[sign]
        return f"{NUMBER_WORDS[a]} {spoken} {NUMBER_WORDS[b]}"
    return f"{a}{rng.choice(_SIGNS[sign])}{b}"


def _plain_problem(rng: Random) -> Sample:
    a, sign, b = _operands(rng)
    answer, result = worked(a, sign, b)
    if rng.random() < 0.15:
        question = ask(rng, _COMMANDS[sign], a=a, b=b)
    else:
        question = ask(rng, _QUESTIONS, fold=True, problem=_problem_text(rng, a, sign, b))
    return single_turn(TASK, _key(a, sign, b), question, f"{answer}.", LastNumber(str(result)))


def _comparison(rng: Random) -> Sample:
    if rng.random() < 0.4:
        whole = rng.randint(0, 20)
        a, b = f"{whole}.{rng.randint(1, 9)}", f"{rng.choice((whole, whole, rng.randint(0, 20)))}.{rng.randint(10, 99)}"
        if rng.random() < 0.5:
            a, b = b, a
    else:
        top = rng.choice((20, 100, 1000, 10000))
        a, b = str(rng.randint(0, top)), str(rng.randint(0, top))
    if float(a) == float(b):
        return _comparison(rng)
    larger = rng.random() < 0.6
    adjective = rng.choice(("bigger", "larger", "greater", "higher") if larger else ("smaller", "less", "lower"))
    best, other = sorted((a, b), key=float, reverse=larger)
    key = f"{TASK}|compare {min(a, b)} {max(a, b)}"
    if rng.random() < 0.25:
        question = ask(rng, "is {a} {adjective} than {b}", a=a, b=b, adjective=adjective)
        verdict = ("Yes", "No") if best == a else ("No", "Yes")
        return single_turn(
            TASK, key, question, f"{verdict[0]}, {best} is {adjective}.", Mentions((verdict[0], best), (verdict[1],))
        )
    question = ask(
        rng,
        (
            "[which|what] is {adjective}[,|:|] {a} or {b}",
            "which number is {adjective}[,|:|] {a} or {b}",
            "{a} or {b}, which is {adjective}",
            "is {a} or {b} {adjective}",
        ),
        a=a,
        b=b,
        adjective=adjective,
    )
    return single_turn(TASK, key, question, f"{other} is not {adjective}: {best} is.", LastNumber(best))


def _follow_up(rng: Random) -> Sample:
    """A problem, then one that starts from its result."""
    a, sign, b = _operands(rng)
    first, result = worked(a, sign, b)
    if not 0 <= result <= 9999 or (sign == "/" and a % b):
        return _follow_up(rng)
    then, c = rng.choice("+-*"), rng.randint(1, 99)
    if then == "*":
        c = rng.randint(2, 9)
        if result > 99:
            return _follow_up(rng)
    words = {
        "+": "[add {c}|add {c} to that|plus {c}|now add {c}|and {c} more|add {c} to it]",
        "-": "[subtract {c}|take away {c}|minus {c}|now subtract {c} from that|take {c} off]",
        "*": "[times {c}|multiply that by {c}|now multiply it by {c}|multiply by {c}]",
    }[then]
    second, last = worked(result, then, c)
    messages = (
        Message("user", ask(rng, _QUESTIONS, fold=True, problem=_problem_text(rng, a, sign, b))),
        Message("assistant", f"{first}."),
        Message("user", ask(rng, words, end=".", c=c)),
        Message("assistant", f"{second}."),
    )
    return Sample(TASK, _key(a, sign, b), messages, LastNumber(str(last)))


def _claim(rng: Random) -> Sample:
    """Is 1 + 1 = 3?"""
    a, sign, b = _operands(rng)
    answer, result = worked(a, sign, b)
    if sign == "/":
        return _claim(rng)
    claimed = result if rng.random() < 0.4 else result + rng.choice((-10, -2, -1, 1, 2, 10))
    problem = _problem_text(rng, a, sign, b)
    patterns = (
        "is {p} [=|equal to] {c}",
        "{p} = {c}",
        "{p} = {c}, right",
        "does {p} [equal|make] {c}",
        "is it true that {p} is {c}",
    )
    question = ask(rng, patterns, p=problem, c=claimed)
    verdict = ("Yes", "No") if claimed == result else ("No", "Yes")
    return single_turn(
        TASK, _key(a, sign, b), question, f"{verdict[0]}, {answer}.", Mentions((verdict[0], str(result)), (verdict[1],))
    )
