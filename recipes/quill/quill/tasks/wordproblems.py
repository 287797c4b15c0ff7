"""Arithmetic told as a little story, and the working that all plain arithmetic shows."""

from __future__ import annotations

from random import Random

from quill.chat import Sample, single_turn
from quill.checks import LastNumber
from quill.invention import any_name
from quill.phrasing import ask
from quill.words import FOODS, NUMBER_WORDS

TASK = "arithmetic"

_WORD_PROBLEMS: dict[str, tuple[str, ...]] = {
    "+": (
        "{name} has {a} {thing} and [gets|finds|buys|is given] {b} more. How many {thing} does {name} have[| now]",
        (
            "there are {a} {thing} [on the table|in the box|in the shop] and {name} [adds|brings] {b} "
            "more. How many {thing} are there"
        ),
        "i have {a} {thing} and [buy|get|find] {b} more. how many [{thing} |]do i have[| now]",
        "{name} is {b} years old. How old will {name} be in {a} years",
        "{name} has {a} {thing} and {other} has {b} {thing}. How many {thing} do they have [together|in total]",
    ),
    "-": (
        (
            "{name} has {a} {thing} and [gives away|loses|sells|eats] {b}[| of them]. How many {thing} "
            "[does {name} have left|are left]"
        ),
        "there are {a} {thing} [on the table|in the box|in the shop]. {name} takes {b}. How many {thing} are left",
        (
            "[if |]i have {a} {thing} and [eat|lose|sell|give away] {b}[| of them][.|,] how many "
            "[{thing} |][are left|do i have left]"
        ),
        "{name} is {a} years old and {other} is {b}. How many years older is {name}",
        "a book has {a} pages. {name} has read {b} pages. How many pages are left",
    ),
    "*": (
        (
            "{name} has {a} [boxes|bags|baskets] with {b} {thing} [each|in each]. How many {thing} [does "
            "{name} have|are there][| in total]"
        ),
        "one box holds {b} {thing}. How many {thing} are in {a} boxes",
        "a [train|car|bus|cyclist] travels {b} [km|kilometres|miles] in 1 hour. How far does it travel in {a} hours",
        "[{thing} cost|a ticket costs|one book costs] {b} [dollars|euros] each. How much do {a} cost",
        "{name} reads {b} pages a day. How many pages does {name} read in {a} days",
    ),
    "/": (
        "there are {a} [students|children|players] in {b} [groups|teams|rows]. How many are in each [group|team|row]",
        "{a} {thing} for {b} [children|people|friends]: how many [{thing} |]does each [child |person |friend |]get",
        "{name} shares {a} {thing} [equally |]among {b} [friends|children|people]. How many {thing} does each get",
        "{a} {thing} are [packed|put] into {b} [equal |]boxes. How many {thing} are in each box",
        "{b} tickets cost {a} dollars. How much does one ticket cost",
    ),
}


def make(rng: Random) -> Sample:
    name, other = any_name(rng), any_name(rng)
    thing = (
        rng.choice(FOODS) if rng.random() < 0.5 else rng.choice(("coins", "books", "stones", "stamps", "cards", "pens"))
    )
    sign = rng.choice("++--**/")
    a, b = (rng.randint(2, 12), rng.randint(2, 99)) if sign == "*" else (rng.randint(2, 99), rng.randint(1, 99))
    if sign == "-":
        a, b = max(a, b), min(a, b)
    elif sign == "/":
        b = rng.randint(2, 12)
        a = b * rng.randint(1, 12)
    question = ask(rng, _WORD_PROBLEMS[sign], name=name, other=other, a=a, b=_in_words(rng, b), thing=thing)
    answer, result = worked(b, sign, a) if sign == "*" else worked(a, sign, b)
    key = f"{TASK}|{name} {thing} {sign} {a} {b}"
    return single_turn(TASK, key, question, f"{answer}, so the answer is {result}.", LastNumber(str(result)))


def _in_words(rng: Random, n: int) -> str:
    return NUMBER_WORDS[n] if n <= 12 and rng.random() < 0.3 else str(n)


def worked(a: int, sign: str, b: int) -> tuple[str, int]:
    """The answer as text, with working where it helps, and the result."""
    if sign in "+-":
        return _added(a, sign, b)
    if sign == "/":
        rest = f", and {a % b} is left over" if a % b else ""
        return f"{a} ÷ {b} = {a // b}{rest}", a % b or a // b
    if a > 12 and b > 12 and b % 10:
        tens, ones = b - b % 10, b % 10
        return f"{a} × {b} = {a} × {tens} + {a} × {ones} = {a * tens} + {a * ones} = {a * b}", a * b
    if a > 20 and 1 < b <= 12:
        places = [int(digit) * 10**power for power, digit in enumerate(reversed(str(a))) if digit != "0"][::-1]
        if len(places) > 1:
            products = " + ".join(f"{place} × {b}" for place in places)
            sums = " + ".join(str(place * b) for place in places)
            return f"{a} × {b} = {products} = {sums} = {a * b}", a * b
    return f"{a} × {b} = {a * b}", a * b


def _added(a: int, sign: str, b: int) -> tuple[str, int]:
    """Large numbers are added in two parts, so that a carry never has far to go."""
    result = a + b if sign == "+" else a - b
    rest = a % 1000 + b % 1000 if sign == "+" else a % 1000 - b % 1000
    if max(a, b) < 1000 or result < 0 or result - rest in (0, a):
        return f"{a} {sign} {b} = {result}", result
    return f"{a} {sign} {b} = {result - rest} {'-' if rest < 0 else '+'} {abs(rest)} = {result}", result
