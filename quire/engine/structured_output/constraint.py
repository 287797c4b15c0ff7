"""A request's constraint as it travels to the process that tries it, and as a key of caches; and the answer."""

from __future__ import annotations

import msgspec

from quire.structured_outputs_params import StructuredOutputsParams


class Constraint(msgspec.Struct, frozen=True, array_like=True):
    """What StructuredOutputsParams ask of an output, without the name of the field that they came from.

    Attributes:
        text: What is given, as JSON unless it is a text by itself.
        closed: `disable_additional_properties`.
        any_whitespace: Not `disable_any_whitespace`.
        whitespace: `whitespace_pattern`.
        behind: Grammar of what stands in front of the constrained output, see `reasoning_in_front`; empty for nothing.
    """

    kind: str
    text: str
    closed: bool = False
    any_whitespace: bool = True
    whitespace: str | None = None
    behind: str = ""
    strict: bool = True


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """What became of a Constraint.

    Attributes:
        grammar: For the compiler; empty if the constraint is refused.
        error: Why it is refused, as part of a sentence.
        left_out: Keywords of a schema that is not strict which the grammar does not enforce, and where they stand.
    """

    grammar: str = ""
    error: str = ""
    left_out: list[str] = []


def constraint_of(params: StructuredOutputsParams, behind: str = "") -> Constraint:
    """The constraint of these parameters; `behind` is what may come before the constrained output."""
    any_whitespace = not params.disable_any_whitespace
    closed, whitespace = params.disable_additional_properties, params.whitespace_pattern
    return Constraint(params.kind, params.text, closed, any_whitespace, whitespace, behind, params.strict)
