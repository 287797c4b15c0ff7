"""A request's constraint as it travels to the process that tries it, and as a key of caches."""

from __future__ import annotations

import msgspec

from quire.structured_outputs_params import StructuredOutputsParams


class Constraint(msgspec.Struct, frozen=True, array_like=True):
    """See StructuredOutputsParams.

    Attributes:
        kind: One of its KINDS.
        text: What is given, as text; JSON unless it is a text by itself.
        closed: `disable_additional_properties`.
        any_whitespace: Not `disable_any_whitespace`.
        whitespace: `whitespace_pattern`.
        behind: What stands in front of it, see `reasoning_in_front`; empty for nothing.
        strict: See there.
    """

    kind: str
    text: str
    closed: bool = False
    any_whitespace: bool = True
    whitespace: str | None = None
    behind: str = ""
    strict: bool = True


def constraint_of(params: StructuredOutputsParams, behind: str = "") -> Constraint:
    """The same, without what names it; behind what may come first."""
    return Constraint(
        params.kind,
        params.text,
        params.disable_additional_properties,
        not params.disable_any_whitespace,
        params.whitespace_pattern,
        behind,
        params.strict,
    )
