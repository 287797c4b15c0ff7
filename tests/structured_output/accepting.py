"""Asks the compiler whether a grammar accepts a text, token by token of the built-in model."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from llguidance import LLTokenizer

import quire.builtin
from quire.engine.structured_output.grammar_compiler import GrammarCompiler
from quire.engine.structured_output.grammars import compile_grammar

QUILL = Path(quire.builtin.__file__).parent / "quill"


@cache
def tokenizer() -> LLTokenizer:
    return GrammarCompiler(QUILL, QUILL, 4096).tokenizer


def accepts(grammar: str, text: str) -> bool:
    """Whether the whole text is of the grammar."""
    return accepts_tokens(grammar, tokenizer().tokenize_str(text))


def accepts_tokens(grammar: str, tokens: list[int]) -> bool:
    """The same for token ids."""
    matcher = compile_grammar(tokenizer(), grammar)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
