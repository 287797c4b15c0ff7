"""A request's constraint as it travels to the process that tries it, and as a key of caches; and the answer."""

from __future__ import annotations

import msgspec

from quire.structured_outputs_params import StructuredOutputsParams


class Constraint(msgspec.Struct, frozen=True, array_like=True):
    """What StructuredOutputsParams ask of an output, without the name of the field that they came from.

    Attributes:
        text: `StructuredOutputsParams.text`: what is given, as JSON unless it is a text by itself.
        closed: `disable_additional_properties`.
        any_whitespace: Not `disable_any_whitespace`.
        whitespace: `whitespace_pattern`.
        behind: What stands in front of the constrained output, see `reasoning_in_front`; empty for nothing.
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
        left_out: What the grammar does not enforce of a schema that is not strict: keywords, and where they stand.
    """

    grammar: str = ""
    error: str = ""
    left_out: list[str] = []


def constraint_of(params: StructuredOutputsParams, behind: str = "") -> Constraint:
    """The constraint of these parameters; `behind` is what may come before the constrained output."""
    return Constraint(
        params.kind,
        params.text,
        params.disable_additional_properties,
        not params.disable_any_whitespace,
        params.whitespace_pattern,
        behind,
        params.strict,
    )
