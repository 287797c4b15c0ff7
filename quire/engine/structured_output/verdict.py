"""What a helper process says about a Constraint."""

from __future__ import annotations

import msgspec

CHECK_SECONDS = 1.6
"""After so long a new constraint is given up, and its request is refused."""


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
