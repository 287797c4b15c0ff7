"""What may come before an answer with a form, as the compiler understands it and the parsers read it."""

from __future__ import annotations

import json

import pytest

from quire.text.output_parsers.call_grammar import FORM, reasoning_in_front
from quire.text.output_parsers.events import ContentDelta, OutputEvent, ReasoningDelta, merge_events
from quire.text.output_parsers.formats import Turn
from quire.text.output_parsers.registry import REASONING_PARSERS, create_parser, reasoning_format

llguidance = pytest.importorskip("llguidance")

BYTES = llguidance.LLTokenizer("byte")
ALWAYS = [name for name in REASONING_PARSERS if reasoning_format(name).opened(Turn())]


def accepted(front: str, text: str) -> bool:
    """Whether an output may be this text, where the form is one of two words."""
    form = {"name": FORM, "lark_grammar": 'start: "left" | "right"'}
    matcher = llguidance.LLMatcher(BYTES, json.dumps({"grammars": [{"lark_grammar": front}, form]}))
    assert not matcher.get_error(), matcher.get_error()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def parsed(name: str, text: str, turn: Turn) -> list[OutputEvent]:
    parser = create_parser(None, name, turn=turn)
    return merge_events([*parser.feed(text), *parser.finish()])


@pytest.mark.parametrize("name", REASONING_PARSERS)
def test_reasoning_that_the_output_begins_may_come_first(name: str) -> None:
    found, turn = reasoning_format(name), Turn()
    front = reasoning_in_front(name, turn, {})
    thought = f"{found.start}Hm.\nSo left.{found.end}{found.answer_start}"
    assert accepted(front, f"{thought}left")
    assert not accepted(front, f"{thought}middle")
    assert not accepted(front, thought)
    reasoning, content = parsed(name, f"{thought}left", turn)
    assert isinstance(reasoning, ReasoningDelta)
    assert isinstance(content, ContentDelta)
    assert (reasoning.text.strip(), content.text.strip()) == ("Hm.\nSo left.", "left")


@pytest.mark.parametrize("name", sorted(set(REASONING_PARSERS) - set(ALWAYS)))
def test_an_answer_without_reasoning_has_the_form_at_once(name: str) -> None:
    front = reasoning_in_front(name, Turn(), {})
    assert accepted(front, f"{reasoning_format(name).answer_start}right")
    assert not accepted(front, "Well, right")


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1", "deepseek_v3", "glm45", "seed_oss"])
def test_the_prompt_decides_where_it_says_so(name: str) -> None:
    found = reasoning_format(name)
    opened = reasoning_in_front(name, Turn(f"assistant\n{found.start}\n"), {})
    assert accepted(opened, f"Hm.{found.end}\n\nleft")
    assert not accepted(opened, "left")
    closed = Turn(f"assistant\n{found.start}\n\n{found.end}\n\n")
    assert reasoning_in_front(name, closed, {}) == ""
    assert reasoning_in_front(None, Turn(), {}) == ""


def test_tags_that_are_special_tokens_are_tokens() -> None:
    front = reasoning_in_front("deepseek_r1", Turn("<think>"), {"<think>": 300, "</think>": 301})
    assert "</think>" not in front
    assert "<[301]>" in front
    assert "(<[300]>)?" in front, "a model that always reasons may write the tag itself"


def test_gpt_oss_may_think_in_several_messages() -> None:
    found = reasoning_format("openai_gptoss")
    front = reasoning_in_front("openai_gptoss", Turn(), {})
    assert accepted(front, 2 * f"{found.start}Hm.{found.end}" + f"{found.answer_start}left")
    assert not accepted(front, "left"), "an answer is a message"
