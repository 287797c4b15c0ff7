"""One-line Python functions, described in words and checked by running them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random

from quill.blocks import Block, read_blocks
from quill.chat import Sample, single_turn
from quill.checks import Computes
from quill.heldout import normalize
from quill.phrasing import ask

TASK = "functions"


@dataclass(frozen=True)
class Spec:
    """What a function does: its usual name, its parameters, how people describe it, and the expression it returns.

    ``{n}`` in a description and in the expression is a small constant. ``arguments`` names the cases to try.
    """

    name: str
    parameters: str
    descriptions: tuple[str, ...]
    expression: str
    arguments: str


_CASES = {
    "int": ((0,), (1,), (2,), (7,), (-3,), (12,), (15,), (40,), (97,)),
    "natural": ((0,), (1,), (2,), (5,), (9,)),
    "pair": ((0, 0), (1, 2), (7, 3), (-4, 9), (10, 10)),
    "triple": ((1, 2, 3), (9, 4, 7), (-5, 0, 5), (2, 2, 2)),
    "numbers": (([1],), ([3, 1, 2],), ([5, -4, 5, 8, 6],), ([10, 20, 30, 41],), ([2, 2, 9],)),
    "text": (("",), ("a",), ("Hello World",), ("level",), ("some longer text here",), ("ABC abc",)),
    "nonempty": (("a",), ("Hello World",), ("level",), ("some longer text here",), ("ABC abc",)),
    "words": ((["a"],), (["pear", "fig", "banana"],), (["Tom", "eva", "Al"],), (["x", "yy", "zzz", "x"],)),
    "two lists": (([1, 2], [3]), ([], [1]), ([4, 4, 5], [5, 4]), ([1], [1])),
    "text and letter": (("banana", "a"), ("", "x"), ("hello world", "l"), ("abc", "z")),
    "dict": (({"a": 1},), ({"x": 3, "y": 2},), ({},)),
}


def _spec(block: Block) -> Spec:
    head, expression = block.answers[0].split("): ", 1)
    name, parameters = head.split("(")
    return Spec(name, parameters, block.patterns, expression, block.words[0])


_SPECS = tuple(_spec(block) for block in read_blocks("functions"))

_FORMS = (
    (
        "[write|write me|give me|create|make|define|implement|can you write|i need|show me] a [Python "
        "|one-line Python |short Python |]function that {d}"
    ),
    "[write|create|define|implement] a [Python |]function [called|named] {f} that {d}",
    "[Python|Python code|code|one-line Python function]: {d}",
    "[Python function|function|Python code|code] that {d}",
    "write a Python function {f}({p}) that {d}",
    "how do i write a [Python |]function that {d}",
    "[write|implement|define] [a |the |][Python |]function {f}({p})",
    "{f}({p}) in Python",
    "{noun} in Python",
    "Python {noun}[| function]",
    "[write|show me|give me|implement] [a |]{noun}[| function][| in Python]",
    "{noun} function[| in Python]",
    "in Python, write a function that {d}",
    "[write|give me|create] a [Python |]function to {do}",
    "Python function to {do}",
    "[how do i|how can i|how to] {do} in Python",
    "{do} in Python",
    "[write|give me] [Python |]code to {do}",
    "can you write a [Python |]function to {do}",
    "[write|give me] a Python function for {doing}",
    "write {f}({p}): it {d}",
    "write code that {d}",
    "a Python one-liner that {d}",
)
# Names that say alone what the function does.
_SPEAKING = frozenset(
    [
        "is_even",
        "is_odd",
        "is_positive",
        "is_negative",
        "is_prime",
        "factorial",
        "fibonacci",
        "digit_sum",
        "is_leap_year",
        "average",
        "count_vowels",
        "is_palindrome",
        "fizzbuzz",
        "greet",
        "reverse_list",
        "sort_list",
        "count_words",
        "remove_spaces",
        "longest_word",
        "square",
        "cube",
    ]
)
_OTHER_PARAMETERS = {
    "x": ("n", "num", "number", "a", "value", "y"),
    "n": ("x", "num", "number", "k"),
    "xs": ("nums", "numbers", "lst", "items", "values", "l", "data"),
    "s": ("text", "string", "word", "t", "sentence"),
    "words": ("strings", "items", "ws"),
}
_OTHER_NAMES = (
    "f",
    "solve",
    "compute",
    "my_function",
    "func",
    "g",
    "run",
    "answer",
    "result",
    "task",
    "do_it",
    "calc",
    "process",
    "helper",
)


def make(rng: Random) -> Sample:
    spec = rng.choice(_SPECS)
    n = str(
        rng.randint(2, 12) if spec.name not in ("power_n", "repeat", "first_n", "long_words") else rng.randint(2, 5)
    )
    recursive = spec.name in spec.expression
    form = rng.choice(_FORMS)
    name = spec.name.replace("_n", f"_{n}") if spec.name.endswith("_n") else spec.name
    if "{d" not in form and spec.name not in _SPEAKING:
        form = _FORMS[0]
    if "{f}" in form and "{d" in form and not recursive and rng.random() < 0.5:
        name = rng.choice(_OTHER_NAMES)
    description = rng.choice(spec.descriptions).replace("{n}", n)
    parameters, expression = spec.parameters, spec.expression.replace("{n}", n)
    if "{p}" in form and parameters in _OTHER_PARAMETERS and rng.random() < 0.6:
        renamed = rng.choice(_OTHER_PARAMETERS[parameters])
        expression = re.sub(rf"\b{parameters}\b", renamed, expression)
        parameters = renamed
    verb, _, rest = description.partition(" ")
    question = ask(
        rng,
        form,
        end=".",
        d=description,
        do=f"{_plain(verb)} {rest}",
        doing=f"{_gerund(verb)} {rest}",
        f=name,
        p=parameters,
        noun=spec.name.replace("_n", f" {n}").replace("_", " "),
    )
    code = f"def {name}({parameters}): return {expression}"
    return single_turn(
        TASK,
        f"{TASK}|{normalize(question)}",
        question,
        f"```python\n{code}\n```",
        Computes(_cases(spec, parameters, expression)),
    )


def _plain(verb: str) -> str:
    """``adds`` to ``add``, ``squares`` to ``square``, ``checks`` to ``check``."""
    return verb[:-2] if verb.endswith(("sses", "shes", "ches", "xes")) else verb.removesuffix("s")


def _gerund(verb: str) -> str:
    plain = _plain(verb)
    if plain in ("get", "split", "sum", "put"):
        return f"{plain}{plain[-1]}ing"
    return f"{plain.removesuffix('e')}ing"


def _cases(spec: Spec, parameters: str, expression: str) -> str:
    """What the reference expression gives for each argument; the expressions are the ones written in this file."""
    reference: dict[str, object] = {}
    exec(f"def {spec.name}({parameters}): return {expression}", reference)
    function = reference[spec.name]
    assert callable(function)
    return repr([(arguments, function(*arguments)) for arguments in _CASES[spec.arguments]])
