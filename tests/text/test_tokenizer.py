"""Tokenizers from both kinds of files, against the libraries that made them."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import pytest
import sentencepiece

from quire import builtin
from quire.errors import CheckpointError, RequestError
from quire.text.tokenizer import Tokenizer, load_tokenizer
from tests.checkpoints import END_OF_TEXT_ID, IM_END_ID, IM_START_ID, write_tokenizer

SAMPLES = [
    "",
    " ",
    "the quick brown fox",
    "  two  spaces and\ttab\nnewline ",
    "naïve café 你好 🙂 123.45",
    "def f(x):\n    return x  # done",
    "<s> not special </s>",
]


def train_spm(directory: Path, kind: str, **options: object) -> sentencepiece.SentencePieceProcessor:
    rng = random.Random(0)
    words = ["".join(rng.choice("abcdefghijklmnop") for _ in range(rng.randint(1, 8))) for _ in range(300)]
    lines = [" ".join(rng.choices(words, k=12)) for _ in range(300)] + SAMPLES[2:6] * 5
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, model_type=kind, vocab_size=500, character_coverage=0.99,
        byte_fallback=True, minloglevel=2, num_threads=1, **options,
    )  # fmt: skip
    (directory / "tokenizer.model").write_bytes(model.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


LLAMA_2 = {
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "split_digits": True,
    "allow_whitespace_only_pieces": True,
}


@pytest.mark.parametrize(("kind", "options"), [("bpe", LLAMA_2), ("bpe", {}), ("unigram", {}), ("unigram", LLAMA_2)])
def test_a_sentencepiece_model_gives_the_ids_that_sentencepiece_gives(
    tmp_path: Path, kind: str, options: dict[str, object]
) -> None:
    reference = train_spm(tmp_path, kind, **options)
    tokenizer = load_tokenizer(tmp_path)
    rng = random.Random(1)
    noise = ["".join(rng.choice("abcdefghijklmnop  éß你") for _ in range(40)) for _ in range(40)]
    for text in SAMPLES[:-1] + noise:
        expected = reference.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == expected, text
        assert tokenizer.decode(expected) == reference.decode(expected)
    assert tokenizer.bos_id == reference.bos_id() == tokenizer.encode("a")[0]
    assert tokenizer.eos_id == reference.eos_id()


def test_a_llama_2_directory_equals_transformers(tmp_path: Path) -> None:
    from transformers import LlamaTokenizer

    train_spm(tmp_path, "bpe", **LLAMA_2)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"legacy": False}))
    ours = load_tokenizer(tmp_path)
    state = json.loads(ours._core.to_str())["model"]  # reading the file itself, transformers 5 would need protobuf
    theirs = LlamaTokenizer(vocab=state["vocab"], merges=[tuple(m) for m in state["merges"]], add_bos_token=True)
    for text in [*SAMPLES[:-1], "<s>[INST] Hello [/INST] there</s><s>again"]:
        assert ours.encode(text) == theirs(text)["input_ids"], text


def test_text_goes_through_and_back(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    for text in SAMPLES:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text


def test_special_tokens_are_known(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.special_ids == {END_OF_TEXT_ID, IM_START_ID, IM_END_ID}
    assert (tokenizer.bos_id, tokenizer.eos_id) == (END_OF_TEXT_ID, IM_END_ID)
    ids = tokenizer.encode("<|im_start|>a<|im_end|>")
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>a<|im_end|>"


def settings(directory: Path, **changes: object) -> Tokenizer:
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return load_tokenizer(directory)


def test_add_bos_token_decides_over_the_tokenizer_file(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    assert settings(tmp_path, add_bos_token=True, bos_token={"content": "<|im_start|>"}).encode("a")[0] == IM_START_ID
    assert settings(tmp_path, add_bos_token=False).encode("a")[0] != IM_START_ID
    both = settings(tmp_path, add_bos_token=True, add_eos_token=True)
    assert [both.encode("a")[0], both.encode("a")[-1]] == [IM_START_ID, IM_END_ID]
    assert both.encode("a", add_special_tokens=False) == both.encode("a")[1:-1]


def test_tokens_that_only_tokenizer_config_lists_are_added(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    size = load_tokenizer(tmp_path).vocab_size
    tokenizer = settings(tmp_path, added_tokens_decoder={str(size): {"content": "<tool>", "special": True}})
    assert tokenizer.encode("<tool>") == [size]
    assert tokenizer.decode([size]) == ""


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"\xff"),
        ("tokenizer.model", b""),
        ("tokenizer.model", b"\x0a\xff\xff\xff\xff\x7f"),
        ("tokenizer.model", b"hello"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        load_tokenizer(tmp_path)


def test_no_tokenizer_is_said_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="--tokenizer"):
        load_tokenizer(tmp_path)


def test_half_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    with pytest.raises(RequestError, match="surrogate"):
        load_tokenizer(tmp_path).encode("\ud83d")


@pytest.mark.parametrize("first", [True, False])
def test_the_tokens_of_a_text_that_is_cut_are_those_of_the_whole(first: bool) -> None:
    tokenizer = load_tokenizer(builtin.path("quill"))
    text = "".join(f"Line {i}: some words, 12,345.67 and so on…\n\n" for i in range(5_000))
    whole = tokenizer.encode(text)
    for count in (1, 7, 500):
        cut = tokenizer.end_of(text, count, first=first)
        tokens = tokenizer.encode(cut)
        assert len(cut) < len(text)
        assert (tokens[:count] == whole[:count]) if first else (tokens[-count:] == whole[-count:])
