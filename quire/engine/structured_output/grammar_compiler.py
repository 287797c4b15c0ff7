"""Grammars compiled for one model's tokens, kept by their text."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from quire.engine.structured_output.grammars import compile_grammar
from quire.text.generation_config import eos_ids
from quire.text.tokenizer import Tokenizer, load_tokenizer

MAX_KEPT = 256
MAX_KEPT_BYTES = 16 * 2**20
"""Maximum size of the texts of grammars that are kept."""
MAX_REMEMBERED = 4_096
MAX_REMEMBERED_BYTES = 1_024
"""Longest text whose tokens are remembered."""


class GrammarCompiler:
    """Compiles for one model's tokens, and remembers a matcher at the beginning of each grammar that was used lately.

    Args:
        directory: The tokenizer's.
        vocab_size: The model's: bits in a mask.

    Attributes:
        eos_ids: End-of-sequence tokens, which may come where a grammar may end.
        guessed_eos_ids: Other tokens that the compiler takes for such.
    """

    def __init__(self, model: Path, directory: Path, vocab_size: int) -> None:
        tokenizer = load_tokenizer(directory)
        ends = [token for token in eos_ids(model, tokenizer.eos_id) if token < vocab_size]
        vocabulary = TokenizerWrapper(_Vocabulary(tokenizer, ends, vocab_size))
        self.tokenizer = LLTokenizer(vocabulary, vocab_size, ends or None)
        self.eos_ids = set(ends)
        self.guessed_eos_ids = set(self.tokenizer.eos_tokens) - self.eos_ids
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._bytes = 0

    def known(self, grammar: str) -> LLMatcher | None:
        """The matcher of a grammar that is kept, not to be changed."""
        matcher = self._kept.get(grammar)
        if matcher is not None:
            self._kept.move_to_end(grammar)
        return matcher

    def compiled(self, grammar: str) -> LLMatcher:
        """The matcher of a grammar, not to be changed; any thread may ask. Raises ValueError if it does not compile."""
        return self._kept.get(grammar) or compile_grammar(self.tokenizer, grammar)

    def keep(self, grammar: str, matcher: LLMatcher) -> None:
        """Keep a matcher, and drop those that were not used for the longest time."""
        if grammar not in self._kept:
            self._bytes += len(grammar)
        self._kept[grammar] = matcher
        while len(self._kept) > MAX_KEPT or (self._bytes > MAX_KEPT_BYTES and len(self._kept) > 1):
            oldest, _ = self._kept.popitem(last=False)
            self._bytes -= len(oldest)


class _Vocabulary:
    """The bytes of each token, as the detokenizer has them; special tokens never stand for text.

    The compiler asks for the tokens of texts that a grammar forces, such as the name of a property, at each token of it
    and for each sequence anew, which is a third of the time that masks take. So these tokens are remembered.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, eos_ids: Sequence[int], vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self.tokens = [tokenizer.token_bytes(token) for token in range(min(tokenizer.max_id + 1, vocab_size))]
        special = tokenizer.special_ids.union(eos_ids)
        self.special_token_ids = sorted(token for token in special if token < len(self.tokens))
        self.eos_token_id = eos_ids[0] if eos_ids else len(self.tokens) - 1
        self.tokens += [b""] * (vocab_size - len(self.tokens))  # padding of logits, which is never allowed
        self._remembered = functools.lru_cache(MAX_REMEMBERED)(self._encode)

    def __call__(self, text: str | bytes) -> list[int]:
        return (self._remembered if len(text) <= MAX_REMEMBERED_BYTES else self._encode)(text)

    def _encode(self, text: str | bytes) -> list[int]:
        text = text if isinstance(text, str) else text.decode()
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        if max(tokens, default=0) < self._vocab_size:
            return tokens
        # A token that the model does not have: it writes such a text by its characters.
        return [token for each in self._tokenizer.encode_each(list(text), add_special_tokens=False) for token in each]
