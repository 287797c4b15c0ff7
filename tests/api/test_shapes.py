"""How tokens are named in log probabilities."""

from __future__ import annotations

from pathlib import Path

from quire.api.prompt_report import PromptReport
from quire.api.shapes import CompletionShape
from quire.messages import TokenLogprobs
from quire.text.choice import Piece
from quire.text.tokenizer import load_tokenizer
from tests.checkpoints import write_tokenizer


def test_parts_of_a_character_are_told_apart(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    tokens = tokenizer.encode("é🦄é")
    piece = Piece("é🦄é", tokens, [TokenLogprobs(-0.5, 1, [], []) for _ in tokens], "length")
    shown = CompletionShape(tokenizer, True, PromptReport([], tokenizer, False)).gain(0, piece)["logprobs"]
    partial = [token for token in shown["tokens"] if token.startswith("bytes:")]
    assert partial[0] == "bytes:\\xf0"
    assert len(set(partial)) == len(partial) == 4
    assert shown["text_offset"][-1] == 2
