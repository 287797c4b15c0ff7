"""Reasoning in front of an answer, as a grammar.

Owns what may come before an answer that has a form: reasoning that the prompt has opened, or that the model may open
itself. Knows nothing about the form.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.text.output_parsers.formats import ReasoningFormat, Turn
from quire.text.output_parsers.lark_rules import LarkRules
from quire.text.output_parsers.registry import reasoning_format

FORM = "form"
"""What the grammar calls that of the answer's form."""


def reasoning_in_front(reasoning_parser: str | None, turn: Turn, special_ids: Mapping[str, int]) -> str:
    """The grammar, in Lark, of an answer with a form behind its reasoning; empty where no reasoning can come.

    Args:
        special_ids: The vocabulary's special tokens, which text cannot write.
    """
    if reasoning_parser is None:
        return ""
    found = reasoning_format(reasoning_parser)
    rules = LarkRules(special_ids)
    front = _messages(rules, found) if found.answer_start else reasoning(rules, found, turn)
    return rules.text(f"{front} @{FORM}") if front else ""


def reasoning(rules: LarkRules, found: ReasoningFormat, turn: Turn) -> str:
    """Items that match an answer's reasoning; empty if there is none."""
    opened = found.opened(turn)
    if opened is False:
        return ""
    start = " ".join(rules.literal(found.start))
    thought = f"{rules.text_up_to(found.end)} {rules.terminal(_SPACE)}"
    if opened is None:
        return f"({start} {thought})?"
    # A model that always reasons may write the tag that the prompt has not. Where it is text, it is a part of the rest.
    return f"({start})? {thought}" if rules.is_special(found.start) else thought


def _messages(rules: LarkRules, found: ReasoningFormat) -> str:
    each = " ".join([*rules.literal(found.start), rules.text_up_to(found.end)])
    return " ".join([f"({each})*", *rules.literal(found.answer_start)])


_SPACE = r"/[\r\n]{0,4}/"
