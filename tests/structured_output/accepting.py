"""Asks the compiler whether a grammar accepts a text, token by token of the built-in model."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from llguidance import LLTokenizer

import quire.builtin
from quire.structured_output.compiled_grammars import CompiledGrammars, load_grammar_tokenizer

QUILL = Path(quire.builtin.__file__).parent / "quill"


@cache
def grammars() -> tuple[LLTokenizer, CompiledGrammars]:
    tokenizer, _ = load_grammar_tokenizer(QUILL, QUILL, 4096)
    return tokenizer, CompiledGrammars(tokenizer)


def accepts(grammar: str, text: str) -> bool:
    """Whether the whole text is of the grammar."""
    return accepts_tokens(grammar, grammars()[0].tokenize_str(text))


def accepts_tokens(grammar: str, tokens: list[int]) -> bool:
    """The same for token ids."""
    matcher = grammars()[1].matcher(grammar).deep_copy()
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
