"""What processes of structured output are asked and answer: constraints to be tried, and bitmasks to be filled."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import msgspec

from quire.structured_outputs_params import StructuredOutputsParams


class Prepare(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A sequence is going to be constrained; answered by a Prepared.

    Attributes:
        ignore_eos: The end of sequence is not sampled where the grammar may end, but can go on.
        stop_ids: Tokens that are not sampled among the first `min_tokens` of the output.
    """

    id: int
    grammar: str
    ignore_eos: bool
    stop_ids: list[int]
    min_tokens: int


class Forget(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The sequence is over."""

    id: int


class Row(msgspec.Struct, frozen=True, array_like=True):
    """A sequence whose next token is to be sampled.

    Attributes:
        tokens: Its output tokens since the last time.
        drafts: Tokens that may follow, the bitmasks behind which are wanted too.
    """

    id: int
    tokens: list[int]
    drafts: list[int] = []


class Fill(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Put the bitmasks of each row into the shared memory, in the places of `first_masks`; answered by a Filled."""

    rows: list[Row]


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """Why a sequence cannot begin or go on, for the client, and whether its grammar is to blame."""

    message: str
    refused: bool = False


class Prepared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A sequence may begin, unless its grammar has failed."""

    id: int
    failure: Failure | None = None


class Filled(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The bitmasks of a Fill are in the shared memory.

    Attributes:
        counts: How many bitmasks each row has: one, and those behind drafts that it allows, up to where it is complete;
            0 if it is complete, and no token may follow.
        failures: Failures of rows, by the row's number.
    """

    counts: list[int]
    failures: dict[int, Failure] = {}


def first_masks(rows: Sequence[Row]) -> list[int]:
    """The place of each row's first bitmask among those of all rows; those behind its drafts follow."""
    return [0, *accumulate(1 + len(row.drafts) for row in rows)][:-1]


ToMasks = Prepare | Forget | Fill
FromMasks = Prepared | Filled


class Constraint(msgspec.Struct, frozen=True, array_like=True, tag=True):
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


class FinishedValue(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A finished output and the schema that it must be valid under, both as JSON text."""

    schema: str
    text: str


Task = Constraint | FinishedValue
"""What the checker is asked."""


class LenientSchema(msgspec.Struct, frozen=True, array_like=True):
    """A schema that is not strict, of which a grammar does not enforce everything.

    Attributes:
        left_out: Keywords that are not enforced, and where they stand.
        tool: The function whose arguments it describes, or one of them; empty for the schema of an answer.
        schema: That of an answer as it was sent, as JSON text.
    """

    left_out: list[str]
    tool: str = ""
    schema: str = ""


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """What became of a Constraint, or of a FinishedValue.

    Attributes:
        grammar: For the compiler; empty if the constraint is refused.
        error: Why it is refused, or what is wrong with the value, as part of a sentence.
        lenient: Schemas that the grammar does not enforce in full.
    """

    grammar: str = ""
    error: str = ""
    lenient: list[LenientSchema] = []


def constraint_of(params: StructuredOutputsParams, behind: str = "") -> Constraint:
    """The constraint of these parameters; `behind` is what may come before the constrained output."""
    any_whitespace = not params.disable_any_whitespace
    closed, whitespace = params.disable_additional_properties, params.whitespace_pattern
    return Constraint(params.kind, params.text, closed, any_whitespace, whitespace, behind, params.strict)
