"""Each check accepts every right answer and rejects wrong ones."""

import json
from pathlib import Path

import pytest
from quill.checks import (
    CallsTool,
    Check,
    Computes,
    JsonEquals,
    LastNumber,
    Listing,
    Mentions,
    OneOf,
    Picks,
    WellFormedText,
)

CALL = json.dumps({"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}})
STORY = WellFormedText(mentions=("fox", "lamp"), min_lines=1, max_lines=2, min_words=5, max_words=20)
DOUBLE = Computes(repr([((1,), 2), ((-3,), -6)]))


@pytest.mark.parametrize(
    ("check", "right", "wrong"),
    [
        (OneOf(frozenset({"Hello, friend!"})), ["hello friend", "Hello,  friend."], ["hello", "hello friends"]),
        (Mentions(("Paris",)), ["It is Paris.", "paris"], ["Parisian", ""]),
        (Mentions(("yes",), ("no",)), ["Yes, it is."], ["no", "yes and no"]),
        (LastNumber("42"), ["6 × 7 = 42.", "42", "42.0"], ["42 or 43", "forty-two", "-42"]),
        (LastNumber("-5"), ["3 - 8 = -5."], ["5"]),
        (LastNumber("1000"), ["1,000"], ["1,00"]),
        (Listing(("ant", "bee")), ["ant, bee", "Sorted: Ant, bee."], ["bee, ant", "ant bee", "ant, bee, cow"]),
        (Picks(frozenset({"a", "b", "c"}), 2), ["a, c", "B, a."], ["a", "a, a", "a, d", "a, b, c"]),
        (JsonEquals('{"a": 1}'), ['{"a": 1}', '```json\n{"a":1}\n```'], ['{"a": "1"}', '{"a": 1, "b": 2}', "a"]),
        (CallsTool(CALL), [f"<tool_call>\n{CALL}\n</tool_call>"], [CALL, f"Sure: <tool_call>{CALL}</tool_call>"]),
        (
            STORY,
            ["A fox found a lamp. It shone."],
            ["A fox found it. It shone on.", "A fox and a lamp stood there"],
        ),
        (STORY, ["One lamp, one fox, one night."], ["A fox, a lamp. A fox, a lamp. A fox, a lamp."]),
    ],
)
def test_check(check: Check, right: list[str], wrong: list[str]) -> None:
    assert all(check(answer) for answer in right)
    assert not any(check(answer) for answer in wrong)


def test_a_function_is_run() -> None:
    assert DOUBLE("```python\ndef f(x): return 2 * x\n```")
    assert DOUBLE("def f(x):\n    return x + x")
    assert not DOUBLE("```python\ndef f(x): return x ** 2\n```")
    assert not DOUBLE("```python\ndef f(x): return str(2 * x)\n```")
    assert not DOUBLE("I cannot do that.")


def test_a_function_may_be_called_as_it_likes() -> None:
    assert DOUBLE("def result(x): return 2 * x")


def test_a_function_can_neither_hang_nor_write(tmp_path: Path) -> None:
    target = tmp_path / "written"
    assert not DOUBLE("def f(x):\n    while True: pass")
    DOUBLE(f"def f(x):\n    open({str(target)!r}, 'w').write('x' * 9)\n    return 2 * x")
    assert not target.exists() or target.read_text() == ""
