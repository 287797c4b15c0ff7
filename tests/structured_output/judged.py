"""Schemas as the product prepares and compiles them, and what their grammars let through."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from quire.engine.structured_output.grammars import PARSER_LIMITS, grammar_of
from quire.engine.structured_output.messages import Constraint, LenientSchema

_USUAL = set(b'{}[]",:.-+0123456789abcdxyztruefalsn ')


@cache
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")


class Compiled:
    """The grammar of a schema, over single bytes.

    Attributes:
        error: The compiler's; empty if there is none.
        left_out: Keywords that are not enforced, and where they stand.
    """

    def __init__(self, schema: Any, *, strict: bool = True) -> None:
        lenient: list[LenientSchema] = []
        constraint = Constraint("json", json.dumps(schema), any_whitespace=False, strict=strict)
        self._matcher = LLMatcher(_bytes(), grammar_of(constraint, {}, lenient), limits=PARSER_LIMITS, log_level=0)
        self.left_out = [each for found in lenient for each in found.left_out]
        self.error = self._matcher.get_error()

    def accepts(self, value: Any) -> bool:
        """Whether a value, with its properties in their order, is let through."""
        matcher, text = (
            self._matcher.deep_copy(),
            list(json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()),
        )
        return matcher.try_consume_tokens(text) == len(text) and matcher.is_accepting()

    def walk(self, chance: random.Random, longest: int = 200) -> Any:
        """A value that is let through, or None: a random walk stands for a model that knows nothing."""
        matcher, text = self._matcher.deep_copy(), bytearray()
        while len(text) < longest and not matcher.is_stopped():
            if matcher.is_accepting() and chance.random() < 0.5:
                break
            bits = matcher.compute_bitmask()
            allowed = [8 * at + bit for at, byte in enumerate(bits[:32]) for bit in range(8) if byte >> bit & 1]
            if not allowed:
                break
            token = chance.choice([token for token in allowed if token in _USUAL] or allowed)
            assert matcher.consume_token(token)
            text.append(token)
        return json.loads(text) if matcher.is_accepting() else None
