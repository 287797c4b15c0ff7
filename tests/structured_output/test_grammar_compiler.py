"""Grammars compiled for the built-in model's tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import quire.builtin
from quire.engine.structured_output.grammar_compiler import GrammarCompiler
from quire.engine.structured_output.grammars import compile_grammar
from quire.text.tokenizer import Tokenizer

QUILL = Path(quire.builtin.__file__).parent / "quill"
TEXT = '{"the name of a property": '


def test_forced_text_becomes_tokens_once_for_all_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    encode = Tokenizer.encode
    monkeypatch.setattr(
        Tokenizer, "encode", lambda self, text, **more: (texts.append(text), encode(self, text, **more))[1]
    )
    tokenizer = GrammarCompiler(QUILL, QUILL, 4096).tokenizer
    pristine = compile_grammar(tokenizer, f"start: {TEXT!r}".replace("'", "/").replace("{", r"\{"))
    texts.clear()
    asked = []
    for _ in range(2):
        matcher, output = pristine.deep_copy(), b""
        while not matcher.is_stopped():
            mask = matcher.compute_bitmask()
            token = next(t for t in range(4096) if mask[t // 8] >> t % 8 & 1)
            output += tokenizer.decode_bytes([token])
            assert matcher.consume_token(token)
        assert output.decode() == TEXT
        asked.append(len(texts))
    assert asked[0] > 0
    assert asked[1] == asked[0]


@pytest.mark.parametrize("wider", [1, 32, 300])
def test_masks_are_as_wide_as_logits_whose_vocabulary_is_padded(wider: int) -> None:
    """What stands behind the tokenizer's tokens is never allowed."""
    masks = []
    for width in (4096, 4096 + wider):
        tokenizer = GrammarCompiler(QUILL, QUILL, width).tokenizer
        mask = np.zeros(4 * -(-width // 32), dtype=np.uint8)
        matcher = compile_grammar(tokenizer, "start: /[a-z ]+/").deep_copy()
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, len(mask))
        masks.append(mask)
    assert masks[0].any()
    assert bytes(masks[1]) == bytes(masks[0]).ljust(len(masks[1]), b"\0")
