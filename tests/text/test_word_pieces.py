"""vocab.txt of older BERT checkpoints, against transformers' tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.errors import CheckpointError
from quire.text.tokenizer import load_tokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnoprstuvwyz0123456789", "Ä", "ä", "你", ",", "."]
PIECES = [f"##{letter}" for letter in "abcdefghijklmnoprstuvwyz0123456789"] + ["the", "fox", "##es", "sleep", "The"]
TEXTS = ["The foxes sleep, the fox.", "naïve Ärger 你好 [MASK] 42q", " a\tb\u200b c ", "", "[SEP]"]


def written(directory: Path, settings: dict[str, Any]) -> Path:
    (directory / "vocab.txt").write_text("\n".join([*WORDS, *PIECES]) + "\n")
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer", **settings}))
    return directory


@pytest.mark.parametrize("settings", [{}, {"do_lower_case": False}, {"strip_accents": False}], ids=str)
def test_texts_and_pairs_are_transformers(settings: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    directory = written(tmp_path, settings)
    ours, theirs = load_tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=True)
    assert ours.special_ids == set(theirs.all_special_ids)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("vocab.txt", b"a\n[UNK]\n", r"lacks the tokens \[CLS\], \[SEP\]"),
        ("vocab.txt", b"\xff\xfe", "cannot be read"),
        ("tokenizer_config.json", b'{"tokenizer_class": "MPNetTokenizer"}', "of a MPNetTokenizer"),
    ],
)
def test_what_is_not_read_is_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (written(tmp_path, {}) / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(tmp_path)
