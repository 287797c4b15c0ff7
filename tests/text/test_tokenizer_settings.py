"""What stands beside a tokenizer, as transformers reads the same directory."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from quire.errors import CheckpointError
from quire.text.tokenizer import load_tokenizer

TEXTS = ("hi", "a<bos> b<eos>", "one <tool>two</tool>  three", "x<end> y", "naïve 42")
BOS, EOS, TOOL = "<bos>", "<eos>", "<tool>"


def byte_level(bos: bool = True) -> Tokenizer:
    """One token a byte (ids 0 to 255), then `<bos>` and `<eos>`."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, normalized=False) for text in (BOS, EOS)])
    if bos:
        made.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 256)])
    return made


def write(directory: Path, settings: dict[str, Any], *, bos: bool = True, **files: Any) -> Path:
    byte_level(bos).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **settings})
    )
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def assert_equals_transformers(directory: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = load_tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text
        ids = ours.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
    assert (ours.bos_token, ours.eos_token) == (theirs.bos_token or "", theirs.eos_token or "")
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)


NAMES = {"bos_token": BOS, "eos_token": EOS}
LISTED: dict[str, Any] = {"content": TOOL, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
SILENT: dict[str, dict[str, Any]] = {
    "nothing": {},
    "null about bos": {"add_bos_token": None},
    "nulls": {"add_bos_token": None, "add_eos_token": None},
    "eos alone": {"add_eos_token": False},
    "eos, null about bos": {"add_eos_token": False, "add_bos_token": None},
    "what the file does": {"add_bos_token": True},
    "no tokens by name": {"bos_token": None, "eos_token": None},
    "a pad token that is null": {"pad_token": None, "unk_token": None, "additional_special_tokens": None},
    "tokens as objects": {"bos_token": {"__type": "AddedToken", **LISTED, "content": BOS}},
}


@pytest.mark.parametrize("settings", SILENT)
def test_what_is_not_said_changes_nothing(settings: str, tmp_path: Path) -> None:
    assert_equals_transformers(write(tmp_path, NAMES | SILENT[settings]))


def test_each_setting_is_about_its_own_side(tmp_path: Path) -> None:
    def ids(bos: bool = True, **settings: Any) -> list[int]:
        return load_tokenizer(write(tmp_path, NAMES | settings, bos=bos)).encode("!")

    a = ids()[1]
    assert ids(add_eos_token=True) == [256, a, 257]
    assert ids(add_bos_token=False) == [a]
    assert ids(add_bos_token=False, add_eos_token=True) == [a, 257]
    assert ids(bos=False, add_eos_token=True) == [a, 257]
    assert ids(bos=False, add_bos_token=True) == [256, a]
    assert ids(bos=False, add_bos_token=True, add_eos_token=None) == [256, a]


OLDER: dict[str, dict[str, Any]] = {
    "special tokens": {"special_tokens_map": {"bos_token": BOS, "eos_token": {**LISTED, "content": EOS}}},
    "added tokens": {"added_tokens": {TOOL: 258, "<end>": 259}, "special_tokens_map": {"eos_token": "<end>"}},
    "special ones among added": {
        "added_tokens": {"<end>": 259, TOOL: 258}, "special_tokens_map": {"extra_special_tokens": [TOOL]},
    },
    "null": {"special_tokens_map": {"pad_token": None}},
}  # fmt: skip


@pytest.mark.parametrize("files", OLDER)
def test_older_files_are_read(files: str, tmp_path: Path) -> None:
    assert_equals_transformers(write(tmp_path, {}, **OLDER[files]))


@pytest.mark.parametrize(
    "settings",
    [
        {"added_tokens_decoder": {"258": {**LISTED, "special": True}}},
        {"added_tokens_decoder": {"258": {**LISTED, "special": False, "rstrip": True}}},
        {"added_tokens_decoder": {"257": {**LISTED, "content": EOS, "special": True, "rstrip": True, "lstrip": True}}},
        {"added_tokens_decoder": {"68": {**LISTED, "content": "e", "special": True}}},
        {"additional_special_tokens": ["e"]},
        {"extra_special_tokens": {"image_token": "e"}},
    ],
)
def test_tokens_of_tokenizer_config_equal_transformers(settings: dict[str, Any], tmp_path: Path) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    if "68" in settings.get("added_tokens_decoder", {}):
        settings["added_tokens_decoder"] = {str(letters.index("e")): settings["added_tokens_decoder"]["68"]}
    assert_equals_transformers(write(tmp_path, NAMES | settings))


def test_old_files_do_not_count_beside_a_full_list(tmp_path: Path) -> None:
    full = {"added_tokens_decoder": {"258": {**LISTED, "special": True}}}
    assert_equals_transformers(write(tmp_path, NAMES | full, special_tokens_map={"eos_token": TOOL}))


def test_added_tokens_have_the_ids_that_they_are_listed_with(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def listed(number: int, content: str) -> dict[str, Any]:
        return {"added_tokens_decoder": {str(number): {**LISTED, "content": content, "special": True}}}

    tokenizer = load_tokenizer(write(tmp_path, listed(261, TOOL)))
    assert (tokenizer.token_id(TOOL), tokenizer.encode(TOOL, add_special_tokens=False)) == (261, [261])
    with caplog.at_level(logging.WARNING):
        assert load_tokenizer(write(tmp_path, listed(7, TOOL))).token_id(TOOL) is None
        assert "'<tool>' cannot be token 7" in caplog.text
        assert load_tokenizer(write(tmp_path, listed(300, EOS))).token_id(EOS) == 257
        assert "'<eos>' is token 300 in the tokenizer and" not in caplog.text
        assert "'<eos>' is token 257 in the tokenizer and 300 in its settings" in caplog.text
    assert load_tokenizer(write(tmp_path, listed(10**9, TOOL))).token_id(TOOL) is None


@pytest.mark.parametrize("name", ["Qwen2Tokenizer", "GPT2Tokenizer"])
def test_a_vocabulary_with_merges_equals_transformers(name: str, tmp_path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("h", "i"), ("o", "n"), ("on", "e"), ("Ġ", "t"), ("Ġt", "w"), ("Ġtw", "o")]
    tokens = [*alphabet, *("".join(pair) for pair in pairs), "<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in pairs), encoding="utf-8")
    settings = {"tokenizer_class": name, "eos_token": "<|endoftext|>", "bos_token": None, "unk_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_end|>": len(tokens)}))
    from transformers import GPT2Tokenizer, Qwen2Tokenizer

    theirs = {"Qwen2Tokenizer": Qwen2Tokenizer, "GPT2Tokenizer": GPT2Tokenizer}[name].from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    for text in (*TEXTS, "one two  1234\n\nhi<|im_end|>", "e\u0301"):
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)


def test_what_is_not_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"its tekken\.json is of a kind that Quire does not read.*--tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tekken.json").unlink()
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "merges.txt").write_text("")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "CodeGenTokenizerFast"}')
    with pytest.raises(CheckpointError, match=r"merges\.txt of a CodeGenTokenizer, which Quire does not read"):
        load_tokenizer(tmp_path)
