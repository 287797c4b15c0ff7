"""Arithmetic in other words: even, odd and prime numbers, neighbours, doubles, halves, squares and series."""

from __future__ import annotations

from random import Random

from quill.chat import Sample, single_turn
from quill.checks import Check, LastNumber, Mentions
from quill.phrasing import ask

TASK = "arithmetic"


def make(rng: Random) -> Sample:
    """Even or odd, prime or not, what comes next, doubles, halves and percentages."""
    n = rng.randint(0, rng.choice((20, 100, 999)))
    kind = rng.choice(("even", "prime", "next", "previous", "double", "half", "square", "series"))
    check: Check
    if kind == "even":
        parity, other = ("even", "odd") if n % 2 == 0 else ("odd", "even")
        asked = rng.choice(("even", "odd"))
        question = ask(
            rng, "is {n} [an|] {asked}[| number]" if asked == "even" else "is {n} odd[| or even]", n=n, asked=asked
        )
        answer, check = f"{'Yes' if parity == asked else 'No'}, {n} is {parity}.", Mentions((parity,), (other,))
    elif kind == "prime":
        n = rng.randint(2, 120)
        divisor = next((d for d in range(2, n) if n % d == 0), None)
        question = ask(rng, "is {n} [a prime|prime|a prime number]", n=n)
        if divisor is None:
            answer, check = f"Yes, {n} is prime.", Mentions(("yes",), ("no", "not"))
        else:
            answer, check = f"No, {n} = {divisor} × {n // divisor}.", Mentions(("no",), ("yes",))
    elif kind in ("next", "previous"):
        result = n + 1 if kind == "next" else n - 1
        where = "after" if kind == "next" else "before"
        question = ask(rng, "[what|which] number [comes|is] {where} {n}", n=n, where=where)
        answer, check = f"The number {where} {n} is {result}.", LastNumber(str(result))
    elif kind == "series":
        start, step = rng.randint(0, 30), rng.randint(1, 10)
        shown = ", ".join(str(start + step * i) for i in range(rng.randint(3, 5)))
        result = int(shown.rsplit(", ", 1)[-1]) + step
        question = ask(
            rng,
            (
                "[what comes next|continue|what is the next number|which number is next]: {shown}",
                "{shown}, what comes next",
                "{shown}, ...",
            ),
            shown=shown,
        )
        answer, check = f"Each step adds {step}, so next comes {result}.", LastNumber(str(result))
        return single_turn(TASK, f"{TASK}|series {shown}", question, answer, check)
    else:
        question, answer, result = _scaled(rng, kind)
        check = LastNumber(str(result))
        return single_turn(TASK, f"{TASK}|{answer}", question, answer, check)
    return single_turn(TASK, f"{TASK}|{kind} {n}", question, answer, check)


def _scaled(rng: Random, kind: str) -> tuple[str, str, int]:
    n = rng.randint(1, 99)
    if kind == "double":
        question = ask(rng, "[what is|what's|] [double|twice|the double of] {n}", n=n)
        return question, f"Twice {n} is {2 * n}.", 2 * n
    if kind == "half":
        question = ask(rng, "[what is|what's|] half [of |]{n}", n=2 * n)
        return question, f"Half of {2 * n} is {n}.", n
    n = rng.randint(1, 20)
    question = ask(rng, ("[what is|what's|] {n} squared", "[what is|what's] the square of {n}"), n=n)
    return question, f"The square of {n} is {n * n}.", n * n
