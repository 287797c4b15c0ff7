"""Prompts with a gap, as the models' own cards write them."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken

from quire.text.fill_in_middle import fill_in_middle
from quire.text.tokenizer import Tokenizer
from tests.checkpoints import write_tokenizer

FORMATS = {
    # the order of the marks, from: technical report of Qwen2.5-Coder; model card of StarCoder; README of
    # DeepSeek-Coder; Code Llama's paper, section 2.3; mistral-common's encode_fim
    "qwen": (["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"], "<|fim_prefix|>ab<|fim_suffix|>cd<|fim_middle|>"),
    "starcoder": (["<fim_prefix>", "<fim_suffix>", "<fim_middle>"], "<fim_prefix>ab<fim_suffix>cd<fim_middle>"),
    "deepseek": (
        ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
        "<｜fim▁begin｜>ab<｜fim▁hole｜>cd<｜fim▁end｜>",
    ),
    "code llama": (["▁<PRE>", "▁<SUF>", "▁<MID>"], "▁<PRE>ab▁<SUF>cd▁<MID>"),
    "codestral": (["[PREFIX]", "[SUFFIX]"], "[SUFFIX]cd[PREFIX]ab"),
}


def with_tokens(directory: Path, marks: list[str]) -> Tokenizer:
    write_tokenizer(directory)
    core = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    core.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    return Tokenizer(core)


@pytest.mark.parametrize("name", FORMATS)
def test_the_marks_stand_where_the_model_learned_them(tmp_path: Path, name: str) -> None:
    marks, prompt = FORMATS[name]
    tokenizer = with_tokens(tmp_path, marks)
    form = fill_in_middle(tokenizer)
    assert form is not None
    assert tokenizer.decode(form.prompt(tokenizer, "ab", "cd"), skip_special_tokens=False) == prompt


def test_both_texts_may_be_empty(tmp_path: Path) -> None:
    tokenizer = with_tokens(tmp_path, FORMATS["qwen"][0])
    form = fill_in_middle(tokenizer)
    assert form is not None
    assert form.prompt(tokenizer, "", "") == [form.prefix, form.suffix, form.middle]


def test_what_ends_the_gap_is_the_formats_own(tmp_path: Path) -> None:
    tokenizer = with_tokens(tmp_path, [*FORMATS["deepseek"][0], "<|EOT|>"])
    form = fill_in_middle(tokenizer)
    assert form is not None
    assert form.end == (tokenizer.token_id("<|EOT|>"),)


def test_most_vocabularies_have_no_marks(tmp_path: Path) -> None:
    assert fill_in_middle(with_tokens(tmp_path, ["<|fim_prefix|>"])) is None
