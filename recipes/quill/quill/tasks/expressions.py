"""Arithmetic beyond one sign: expressions reduced step by step, decimals, powers, roots, percentages, units of time."""

from __future__ import annotations

from collections.abc import Callable
from math import factorial
from random import Random

from quill.chat import Sample, single_turn
from quill.checks import LastNumber
from quill.phrasing import ask, listed

TASK = "arithmetic"

_QUESTIONS = (
    "[what is|what's|how much is|calculate|compute|solve|work out|evaluate] {x}",
    "{x}",
    "{x} =",
    "[what is|what's] the [result|value] of {x}",
)

Term = int | str  # a number, a sign or a parenthesis


def make(rng: Random) -> Sample:
    return rng.choices([make for make, _ in _KINDS], [share for _, share in _KINDS])[0](rng)


def _expression(rng: Random) -> Sample:
    """Three or four numbers; each step of the answer takes one more sign away."""
    while True:
        terms = _terms(rng)
        steps = reduction(terms)
        if steps and all(-999 <= t <= 9999 for step in steps for t in step if isinstance(t, int)):
            break
    compact = rng.random() < 0.35
    shown = _text(terms, spaced=not compact)
    if rng.random() < 0.7:
        shown = shown.replace("×", rng.choice("**x")).replace("÷", "/")
    question = ask(rng, _QUESTIONS, x=shown)
    answer = " = ".join(_text(step) for step in [terms, *steps])
    return single_turn(TASK, f"{TASK}|{_text(terms)}", question, f"{answer}.", LastNumber(str(steps[-1][0])))


def _terms(rng: Random) -> list[Term]:
    top = rng.choice((9, 12, 20, 50))
    count = rng.choice((3, 3, 3, 4))
    terms: list[Term] = [rng.randint(1, top)]
    for _ in range(count - 1):
        sign = rng.choice("++--××÷")
        terms += [sign, rng.randint(1, 12 if sign in "×÷" else top)]
    if rng.random() < 0.35:
        at = 2 * rng.randrange(count - 1)
        terms[at : at + 3] = ["(", *terms[at : at + 3], ")"]
    return terms


def reduction(terms: list[Term]) -> list[list[Term]]:
    """What is left after each step: parentheses first, then × and ÷, then + and -; empty if a quotient is not whole."""
    steps: list[list[Term]] = []
    current = list(terms)
    while len(current) > 1:
        if "(" in current:
            at = current.index("(") + 1
        else:
            strong = [i for i, term in enumerate(current) if term in ("×", "÷")]
            at = (strong[0] if strong else 1) - 1
        a, sign, b = current[at], current[at + 1], current[at + 2]
        assert isinstance(a, int)
        assert isinstance(b, int)
        if sign == "÷" and (b == 0 or a % b):
            return []
        value = {"+": a + b, "-": a - b, "×": a * b, "÷": a // b if b else 0}[str(sign)]
        if current[at - 1 : at] == ["("]:
            current[at - 1 : at + 4] = [value]
        else:
            current[at : at + 3] = [value]
        steps.append(list(current))
    return steps


def _text(terms: list[Term], spaced: bool = True) -> str:
    joined = (" " if spaced else "").join(str(term) for term in terms)
    return joined.replace("( ", "(").replace(" )", ")")


def _decimals(rng: Random) -> Sample:
    places = rng.choice((1, 1, 2))
    a, b = (rng.randint(1, rng.choice((99, 999))) for _ in range(2))
    sign = rng.choice("+-")
    if sign == "-":
        a, b = max(a, b), min(a, b)
    x, y = (f"{n / 10**places:.{places}f}" for n in (a, b))
    result = f"{(a + b if sign == '+' else a - b) / 10**places:.{places}f}"
    question = ask(rng, _QUESTIONS, x=rng.choice((f"{x} {sign} {y}", f"{x}{sign}{y}")))
    return single_turn(TASK, f"{TASK}|{x} {sign} {y}", question, f"{x} {sign} {y} = {result}.", LastNumber(result))


def _power(rng: Random) -> Sample:
    base, exponent = rng.choice(
        ((2, rng.randint(2, 10)), (10, rng.randint(2, 6)), (rng.randint(2, 20), 2), (rng.randint(2, 10), 3))
    )
    patterns = (
        "[what is|what's|calculate|] {a} [to the power of|to the power|raised to|to the] {b}",
        "[what is|what's|calculate|] {a}^{b}",
        "[what is|what's|calculate|] {a}**{b}",
    )
    question = ask(rng, patterns, a=base, b=exponent)
    steps = " × ".join([str(base)] * exponent)
    return single_turn(
        TASK,
        f"{TASK}|{question}",
        question,
        f"{base}^{exponent} = {steps} = {base**exponent}.",
        LastNumber(str(base**exponent)),
    )


def _root(rng: Random) -> Sample:
    root = rng.randint(1, 30)
    patterns = (
        "[what is|what's|calculate|] the square root of {x}",
        "[what is |]sqrt({x})",
        "square root of {x}",
        "√{x}",
        "sqrt {x}",
    )
    question = ask(rng, patterns, x=root * root)
    answer = f"{root} × {root} = {root * root}, so the square root of {root * root} is {root}."
    return single_turn(TASK, f"{TASK}|{question}", question, answer, LastNumber(str(root)))


def _percentage(rng: Random) -> Sample:
    percent = rng.choice((rng.randint(1, 99), 5 * rng.randint(1, 20)))
    whole = rng.choice((100, 200, 300, 400, 500, 1000, 20 * rng.randint(1, 20), 10 * rng.randint(1, 50)))
    if percent * whole % 100:
        return _percentage(rng)
    question = ask(rng, "[what is|what's|how much is|calculate|] {a}[%| %| percent] of {b}", a=percent, b=whole)
    product, part = percent * whole, percent * whole // 100
    answer = f"{percent} × {whole} ÷ 100 = {product} ÷ 100 = {part}."
    return single_turn(TASK, f"{TASK}|{percent}% {whole}", question, answer, LastNumber(str(part)))


_SCALES = (
    ("seconds", 60, "minute"),
    ("minutes", 60, "hour"),
    ("hours", 24, "day"),
    ("days", 7, "week"),
    ("months", 12, "year"),
    ("centimetres", 100, "metre"),
    ("metres", 1000, "kilometre"),
    ("grams", 1000, "kilogram"),
    ("cents", 100, "dollar"),
    ("inches", 12, "foot"),
    ("years", 10, "decade"),
    ("years", 100, "century"),
    ("eggs", 12, "dozen"),
)


def _duration(rng: Random) -> Sample:
    part, scale, whole = rng.choice(_SCALES)
    n = rng.randint(2, 30)
    several = {"foot": "feet", "century": "centuries", "dozen": "dozen"}.get(whole, f"{whole}s")
    patterns = (
        "how many {p} [are in|are there in|are|in|do you get from] {n} {w}",
        "{n} {w} in {p}",
        "[convert|change] {n} {w} [to|into] {p}",
        "how many {p} do {n} {w} have",
    )
    question = ask(rng, patterns, p=part, n=n, w=several)
    answer = f"{n} × {scale} = {n * scale}, so {n} {several} are {n * scale} {part}. The answer is {n * scale}."
    return single_turn(TASK, f"{TASK}|{n} {several} {part}", question, answer, LastNumber(str(n * scale)))


def _several(rng: Random) -> Sample:
    """The sum or the average of a list."""
    numbers = [rng.randint(1, rng.choice((10, 50, 100))) for _ in range(rng.randint(2, 5))]
    average = rng.random() < 0.4
    if average:
        numbers[-1] += -sum(numbers) % len(numbers)
    noun = "[average|mean]" if average else "[sum|total]"
    patterns = (f"[what is|what's|calculate|find|] the {noun} of {{x}}", f"{noun} of {{x}}", f"{noun}: {{x}}") + (
        () if average else ("add {x}", "add up {x}")
    )
    shown = listed([str(n) for n in numbers]) if rng.random() < 0.6 else ", ".join(map(str, numbers))
    question = ask(rng, patterns, x=shown)
    total = sum(numbers)
    steps = [" + ".join(map(str, [sum(numbers[: i + 1]), *numbers[i + 1 :]])) for i in range(len(numbers))]
    answer = " = ".join(steps)
    if average:
        answer += f", and {total} ÷ {len(numbers)} = {total // len(numbers)}"
        total //= len(numbers)
    return single_turn(TASK, f"{TASK}|{noun} {numbers}", question, f"{answer}.", LastNumber(str(total)))


def _factorial(rng: Random) -> Sample:
    n = rng.randint(1, 9)
    question = ask(
        rng,
        (
            "[what is|what's|] {n}!",
            "[what is |]the factorial of {n}",
            "{n} factorial",
            "[what is|calculate] {n} factorial",
        ),
        n=n,
    )
    steps = " × ".join(str(i) for i in range(1, n + 1))
    answer = f"{n}! = {steps} = {factorial(n)}." if n > 1 else "1! = 1."
    return single_turn(TASK, f"{TASK}|{question}", question, answer, LastNumber(str(factorial(n))))


_KINDS: tuple[tuple[Callable[[Random], Sample], float], ...] = (
    (_expression, 0.33),
    (_decimals, 0.12),
    (_power, 0.08),
    (_root, 0.08),
    (_percentage, 0.13),
    (_duration, 0.09),
    (_several, 0.13),
    (_factorial, 0.04),
)
