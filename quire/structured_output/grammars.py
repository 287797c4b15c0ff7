"""From a constraint to the grammar that the compiler reads: llguidance's JSON, or Lark in its dialect.

Called in a helper process only, since constraints are untrusted. Does not compile.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from quire.output_parsers.reasoning_grammar import FORM
from quire.structured_output.constraint import Constraint
from quire.structured_output.ebnf import is_ebnf, lark_from_ebnf
from quire.structured_output.json_schema import json_schema_of
from quire.structured_output.lark_text import SpecialTokens, pattern, quoted
from quire.structured_output.structural_tag import grammar_from_structural_tag


def grammar_of(constraint: Constraint, special: SpecialTokens) -> str:
    """The grammar of a constraint.

    Args:
        constraint: What is asked.
        special: The model's special tokens.

    Raises:
        ValueError: It cannot be honoured; the message says what to do.
    """
    if constraint.kind == "structural_tag":
        grammar = grammar_from_structural_tag(
            constraint.text, lambda schema: json_schema_of(constraint, json.dumps(schema)), _lark, special
        )
    else:
        grammar = _TRANSLATIONS[constraint.kind](constraint)
    return _behind(constraint.behind, grammar) if constraint.behind else grammar


def _behind(front: str, grammar: str) -> str:
    """The grammar that refers to this one as FORM, and this one."""
    written = json.loads(grammar) if grammar.lstrip().startswith("{") else {"grammars": [{"lark_grammar": grammar}]}
    first, *others = written["grammars"]
    return json.dumps({"grammars": [{"lark_grammar": front}, {**first, "name": FORM}, *others]})


def _json(constraint: Constraint) -> str:
    return json.dumps({"grammars": [{"json_schema": json_schema_of(constraint)}]})


def _regex(constraint: Constraint) -> str:
    return f"start: {pattern(constraint.text)}"


def _choice(constraint: Constraint) -> str:
    return "start: CHOICE\nCHOICE: " + " | ".join(quoted(text) for text in json.loads(constraint.text))


def _grammar(constraint: Constraint) -> str:
    return _lark(constraint.text)


def _lark(grammar: str) -> str:
    return lark_from_ebnf(grammar) if is_ebnf(grammar) else grammar


_TRANSLATIONS: dict[str, Callable[[Constraint], str]] = {
    "json": _json,
    "json_object": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
