"""Tokenizers in GGUF files give the ids of the tokenizers that they were made from."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import Tokenizer

from quire import builtin
from quire.compute.gguf.pre_tokenizers import PRE_TOKENIZERS
from quire.compute.gguf.tokenizer_files import end_ids, tokenizer_files
from quire.errors import CheckpointError
from quire.text.template_files import load_chat_template
from quire.text.tokenizer import load_tokenizer
from tests.checkpoints import write_tokenizer
from tests.gguf import made
from tests.text.test_tokenizer import LLAMA_2, SAMPLES, train_spm

TEXTS = [
    *SAMPLES,
    "I'll WE'VE 12345 x_1 ... \r\n\n  é\u0301 ñ 日本語です 'tis #!/bin\t\t",
    "<|im_start|>user\nhi<|im_end|>",
]


def written(metadata: dict[str, Any], directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    for name, content in tokenizer_files(metadata).items():
        (directory / name).write_bytes(content)
    return directory


def noise(letters: str) -> list[str]:
    generator = random.Random(5)
    return ["".join(generator.choice(letters) for _ in range(60)) for _ in range(30)]


@pytest.mark.parametrize("source", ["gpt-2", "qwen2"])
def test_byte_pair_encodings(source: str, tmp_path: Path) -> None:
    home = tmp_path / "source"
    home.mkdir()
    if source == "gpt-2":
        write_tokenizer(home)
    else:
        home = builtin.path("quill")
    metadata = made._vocabulary(home) | {"tokenizer.ggml.pre": source}
    ours = load_tokenizer(written(metadata, tmp_path / "made"))
    theirs = Tokenizer.from_file(str(home / "tokenizer.json"))
    for text in TEXTS + noise("abc déñ 123 \n\t'.,!<|>日本"):
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(theirs.encode(text).ids, skip_special_tokens=False) == text
    assert ours.special_tokens == load_tokenizer(home).special_tokens
    assert ours.eos_id == load_tokenizer(home).eos_id


def test_words_that_are_tokens_are_not_merged_by_llama_3(tmp_path: Path) -> None:
    """Its vocabulary has words that its merges do not make."""
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": ["a", "b", "c", "ab", "abc", "<|begin_of_text|>", "1", "2", "12"],
        "tokenizer.ggml.token_type": [1, 1, 1, 1, 1, 3, 1, 1, 1],
        "tokenizer.ggml.merges": ["a b", "1 2"],
        "tokenizer.ggml.bos_token_id": 5,
    }
    tokenizer = load_tokenizer(written(metadata, tmp_path))
    assert tokenizer.encode("abc") == [5, 4]
    assert tokenizer.encode("1212", add_special_tokens=False) == [8, 6, 7]  # three digits a word
    plain = load_tokenizer(written(metadata | {"tokenizer.ggml.pre": "gpt-2"}, tmp_path / "plain"))
    assert plain.encode("abc") == [3, 2]


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_known_pre_tokenizer_loads_and_loses_nothing(name: str, tmp_path: Path) -> None:
    metadata = made._vocabulary(builtin.path("quill")) | {"tokenizer.ggml.pre": name}
    tokenizer = load_tokenizer(written(metadata, tmp_path))
    for text in TEXTS[:-1]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False).count("e") == text.count("e")


def test_sentencepiece_models(tmp_path: Path) -> None:
    reference = train_spm(tmp_path, "bpe", **LLAMA_2)
    metadata = spm_metadata(reference)
    ours = load_tokenizer(written(metadata, tmp_path / "made"))
    for text in SAMPLES[:-1] + noise("abcdefghijklmnop  éß你"):
        assert ours.encode(text, add_special_tokens=False) == reference.encode(text), text
    assert ours.encode("a")[0] == reference.bos_id() == ours.bos_id
    unprefixed = metadata | {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    assert load_tokenizer(written(unprefixed, tmp_path / "gemma")).encode("abc") != ours.encode("abc")[1:]


def test_special_tokens_of_phi_3_take_the_white_space_behind_them(tmp_path: Path) -> None:
    """As in the model's own tokenizer; llama.cpp, too, knows it by the name only."""
    metadata = spm_metadata(train_spm(tmp_path, "bpe", **LLAMA_2))
    for added in ("<|user|>", "<|endoftext|>"):
        metadata["tokenizer.ggml.tokens"].append(added)
        metadata["tokenizer.ggml.scores"].append(-1000.0)
        metadata["tokenizer.ggml.token_type"].append(3)
    plain = load_tokenizer(written(metadata, tmp_path / "plain"))
    ours = load_tokenizer(written(metadata | {"general.name": "Phi 3 Mini Phi-3"}, tmp_path / "phi"))
    user, end = len(metadata["tokenizer.ggml.tokens"]) - 2, len(metadata["tokenizer.ggml.tokens"]) - 1
    word = plain.encode("a", add_special_tokens=False)
    assert plain.encode("<|user|>\n a", add_special_tokens=False) != [user, *word]
    assert ours.encode("<|user|>\n a</s> <|endoftext|>", add_special_tokens=False) == [user, *word, 2, end]
    assert ours.encode("<|endoftext|> a") == plain.encode("<|endoftext|> a")


def test_digits_and_endings_are_cut_as_gpt_4o_does(tmp_path: Path) -> None:
    metadata = made._vocabulary(builtin.path("quill")) | {"tokenizer.ggml.pre": "gpt-4o"}
    pieces = Tokenizer.from_file(str(written(metadata, tmp_path) / "tokenizer.json")).pre_tokenizer
    cut = [piece for piece, _ in pieces.pre_tokenize_str("camelCase's HELLO'LL 1234/\n/ Ünï")]
    assert cut == ["camel", "Case's", "ĠHELLO'LL", "Ġ", "123", "4", "/Ċ/", "ĠÃľnÃ¯"]


def spm_metadata(model: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    """As llama.cpp's converter reads a tokenizer.model."""
    count = range(model.vocab_size())

    def kind(number: int) -> int:
        checks = ((model.is_unknown, 2), (model.is_control, 3), (model.is_unused, 5), (model.is_byte, 6))
        return next((value for check, value in checks if check(number)), 1)

    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [model.id_to_piece(number) for number in count],
        "tokenizer.ggml.scores": [model.get_score(number) for number in count],
        "tokenizer.ggml.token_type": [kind(number) for number in count],
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
    }


SOUND: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": ["a", "b", "ab"],
    "tokenizer.ggml.token_type": [1, 1, 1],
    "tokenizer.ggml.merges": ["a b"],
}
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "unknown pre-tokenizer": ({"pre": "brand-new"}, "tokenizer.ggml.pre' is 'brand-new'.*--tokenizer"),
    "no pre-tokenizer": ({"pre": None}, "tokenizer.ggml.pre' is None.*--tokenizer"),
    "unknown model": ({"model": "rwkv"}, "tokenizer.ggml.model' is 'rwkv'.*--tokenizer"),
    "no tokens": ({"tokens": []}, "tokens"),
    "tokens that are numbers": ({"tokens": [1, 2, 3]}, "no list of str"),
    "tokens that are no list": ({"tokens": "abc"}, "no list of str"),
    "types of another length": ({"token_type": [1]}, "1 entries for 3"),
    "a merge of one": ({"merges": ["ab"]}, "does not merge"),
    "a merge of unknown tokens": ({"merges": ["a x"]}, "does not merge"),
    "a merge into no token": ({"merges": ["b a"]}, "does not merge"),
    "no scores": ({"model": "llama", "scores": [0.5]}, "scores"),
    "negative types": ({"model": "llama", "scores": [0.0] * 3, "token_type": [-1, 1, 1]}, "token_type"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_not_served_is_refused_by_name(case: str) -> None:
    changed, message = BROKEN[case]
    with pytest.raises(CheckpointError, match=message):
        tokenizer_files(SOUND | {f"tokenizer.ggml.{key}": value for key, value in changed.items()})


@pytest.mark.parametrize("kind", [1, 3, 4, 5])
@pytest.mark.parametrize(
    "end", ["<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|end|>", "</s>", "<EOT>", "<|fim_pad|>"]
)
def test_tokens_that_end_turns_are_known_by_their_text(end: str, kind: int, tmp_path: Path) -> None:
    metadata = SOUND | {
        "tokenizer.ggml.tokens": ["a", "b", "ab", "<s>", end, "<tool>"],
        "tokenizer.ggml.token_type": [1, 1, 1, 3, kind, 4],
        "tokenizer.ggml.eos_token_id": 3,
    }
    assert end_ids(metadata) == [3, 4]
    tokenizer = load_tokenizer(written(metadata, tmp_path))
    assert tokenizer.special_tokens == {"<s>": 3, end: 4}
    assert tokenizer.encode(f"ab{end}<tool>") == [2, 4, 5]
    assert tokenizer.decode([2, 4, 5]) == "ab<tool>"


def test_sentencepiece_tokens_that_end_turns_are_known_by_their_text(tmp_path: Path) -> None:
    metadata = spm_metadata(train_spm(tmp_path, "bpe", **LLAMA_2))
    for key, value in (("tokens", "<|im_end|>"), ("scores", -1000.0), ("token_type", 4)):
        metadata[f"tokenizer.ggml.{key}"].append(value)
    number = len(metadata["tokenizer.ggml.tokens"]) - 1
    assert number in end_ids(metadata)
    assert number in load_tokenizer(written(metadata, tmp_path / "made")).special_ids


def test_what_ends_a_part_of_a_turn_ends_no_turn() -> None:
    def ends(*tokens: str) -> list[int]:
        types = {"tokenizer.ggml.token_type": [3] * len(tokens)}
        return end_ids(SOUND | {"tokenizer.ggml.tokens": list(tokens)} | types)

    assert ends("<|end|>", "<|return|>") == [0, 1]
    assert ends("<|end|>", "<|return|>", "<|call|>") == [1, 2]
    assert ends("<|start|>", "<|channel|>", "<|user|>") == []


def test_ids_beyond_the_vocabulary_end_nothing() -> None:
    assert end_ids(SOUND | {"tokenizer.ggml.eos_token_id": 3, "tokenizer.ggml.eot_token_id": 1}) == [1]


def test_chat_templates_and_special_tokens(tmp_path: Path) -> None:
    metadata = SOUND | {
        "tokenizer.ggml.tokens": ["a", "b", "ab", "<s>", "<|eot_id|>", "<tool>"],
        "tokenizer.ggml.token_type": [1, 1, 1, 3, 3, 4],
        "tokenizer.ggml.bos_token_id": 3,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "tools",
    }
    directory = written(metadata, tmp_path)
    tokenizer = load_tokenizer(directory)
    assert tokenizer.encode("ab<tool>ab<|eot_id|>") == [3, 2, 5, 2, 4]
    assert tokenizer.special_tokens == {"<s>": 3, "<|eot_id|>": 4, "ab": 2}
    assert end_ids(metadata) == [2, 4]
    assert load_chat_template(directory) is not None
    assert len(json.loads((directory / "tokenizer_config.json").read_text())["chat_template"]) == 2
