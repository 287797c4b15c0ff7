"""The limits of a step that is padded to be recorded. Imports no torch, since whoever plans asks for them as well."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PaddedLimits:
    """What a padded step has at most. Its metadata's arrays are always equally long, so that it can be replayed from a
    graph. The last of its rows has no token.

    Attributes:
        tokens, rows: Of the step.
        decode_rows: Its rows of one token.
    """

    tokens: int
    rows: int
    decode_rows: int
