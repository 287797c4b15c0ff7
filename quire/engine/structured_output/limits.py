"""How much work a grammar may cause: while it is compiled, and for each token."""

from __future__ import annotations

from llguidance import LLParserLimits

CHECK_ADDRESS_SPACE = 1536 * 2**20
"""Bytes that the process which tries a constraint may map, its stack of 256 MiB included."""


LIGHT_COMPILE_MS = 20.0
LIGHT_FILL_MS = 2.0
LIGHT_GRAMMAR_BYTES = 64 * 2**10
"""A grammar of at most this size that needs no more processor time to compile and for its first mask is light: the
engine may follow it in its own process."""


def light_limits() -> LLParserLimits:
    """Of a grammar in the engine's process: a token costs milliseconds at most. One that needs more is followed by the
    matcher process."""
    return LLParserLimits(
        max_items_in_row=2_000,
        step_max_items=10_000,
        step_lexer_fuel=50_000,
        max_lexer_states=10_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


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
