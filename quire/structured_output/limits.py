"""How much work a grammar may cause: while it is compiled, and for each token."""

from __future__ import annotations

from llguidance import LLParserLimits

CHECK_ADDRESS_SPACE = 1536 * 2**20
"""Bytes that the process which tries a constraint may map, its stack of 256 MiB included."""


def parser_limits() -> LLParserLimits:
    """Of a compiled grammar. Large regular expressions are not tried on the whole vocabulary beforehand: that takes
    seconds for large vocabularies, and masks are quick without it. Error messages leave out the grammar."""
    return LLParserLimits(
        max_items_in_row=20_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )
