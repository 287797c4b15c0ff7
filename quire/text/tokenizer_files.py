"""The files of a tokenizer: which one has it, and what those beside it say of its tokens, read as transformers does.

`tokenizer_config.json` has all settings today. Older directories keep added tokens in `added_tokens.json` and
special ones in `special_tokens_map.json`, which count where tokenizer_config.json has no `added_tokens_decoder`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from tokenizers import AddedToken, decoders, models

from quire.compute.gguf.pre_tokenizers import pre_tokenizer_of
from quire.errors import CheckpointError
from quire.text import spm_model, word_pieces

FULL = "tokenizer.json"
SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
VOCABULARY, MERGES = "vocab.json", "merges.txt"
_SPLITS = {"Qwen2Tokenizer": "qwen2", "GPT2Tokenizer": "gpt-2", "": "gpt-2"}
"""By the class that tokenizer_config.json names: how texts are split for vocab.json and merges.txt."""
WORDPIECE = "vocab.txt"
_WORDPIECE_CLASSES = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "")
_NOT_READ = ("tekken.json", "tiktoken.model", "qwen.tiktoken")
CONFIG = "tokenizer_config.json"
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTED = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")


def load_core(directory: Path, settings: TokenizerSettings) -> tokenizers.Tokenizer:
    """The tokenizer in the first of the files that a directory has. Raises CheckpointError if there is none, or one
    that is broken or not read, which the message names."""
    if (file := directory / FULL).exists():
        try:
            return tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(f"{file} is not a readable tokenizer: {error}.") from error
    for name in SENTENCEPIECE:
        if (file := directory / name).exists():
            stripping = [token.content for token in settings.added.values() if token.rstrip]
            return spm_model.load(file, legacy=settings.flag("legacy") is not False, stripping=stripping)
    if (directory / VOCABULARY).exists() and (directory / MERGES).exists():
        return _from_merges(directory, settings)
    if (directory / WORDPIECE).exists():
        return _from_word_pieces(directory, settings)
    others = [name for name in _NOT_READ if (directory / name).exists()]
    found = f"its {', '.join(others)} is of a kind that Quire does not read" if others else "no other file has one"
    raise CheckpointError(
        f"{directory} has neither tokenizer.json nor tokenizer.model, nor vocab.json with merges.txt, and {found}. "
        "Name a directory that has one with --tokenizer."
    )


def _from_merges(directory: Path, settings: TokenizerSettings) -> tokenizers.Tokenizer:
    """Byte-pair encoding over bytes."""
    name = _class_of(settings)
    if name not in _SPLITS:
        raise CheckpointError(
            f"{directory} has its tokenizer only as vocab.json and merges.txt of a {name}, which Quire does not read: "
            "save it with transformers' save_pretrained, which writes a tokenizer.json, or name one with --tokenizer."
        )
    split = pre_tokenizer_of(_SPLITS[name])
    try:
        vocabulary = msgspec.json.decode((directory / VOCABULARY).read_bytes(), type=dict[str, int])
        lines = (directory / MERGES).read_text(encoding="utf-8").splitlines()
        merges = [(left, right) for line in lines if not line.startswith("#version") for left, right in [line.split()]]
        core = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
        described = msgspec.json.decode(core.to_str())
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{directory}: vocab.json and merges.txt cannot be read ({error}).") from error
    described |= {"normalizer": split.normalizer, "pre_tokenizer": split.steps}
    core = tokenizers.Tokenizer.from_str(msgspec.json.encode(described).decode())
    core.decoder = decoders.ByteLevel()
    return core


def _from_word_pieces(directory: Path, settings: TokenizerSettings) -> tokenizers.Tokenizer:
    name = _class_of(settings)
    if name not in _WORDPIECE_CLASSES:
        raise CheckpointError(
            f"{directory} has its tokenizer only as vocab.txt of a {name}, which Quire does not read: save it with "
            "transformers' save_pretrained, which writes a tokenizer.json, or name one with --tokenizer."
        )
    return word_pieces.load(
        directory / WORDPIECE,
        {name: settings.token(name) or text for name, text in word_pieces.SPECIAL.items()},
        lowercase=settings.flag("do_lower_case", True) is not False,
        strip_accents=settings.flag("strip_accents"),
        splits_chinese=settings.flag("tokenize_chinese_chars", True) is not False,
    )


def _class_of(settings: TokenizerSettings) -> str:
    return str(settings.values.get("tokenizer_class", "")).removesuffix("Fast")


@dataclass(frozen=True)
class TokenizerSettings:
    """Settings of a tokenizer; a null in a file is as if its key were absent. `values` are those of
    tokenizer_config.json and of older files' special tokens, `added` are tokens by id beside those that text is made
    of, and `special` the texts of special tokens."""

    values: Mapping[str, Any]
    added: Mapping[int, AddedToken]
    special: tuple[str, ...]

    def token(self, name: str) -> str:
        """The text of `bos_token` and the like; empty where there is none."""
        return token_text(self.values.get(name)) or ""

    def flag(self, name: str, default: bool | None = None) -> bool | None:
        """A setting that is true or false; `default` where no file says so."""
        value = self.values.get(name)
        return default if value is None else bool(value)


def read_settings(directory: Path) -> TokenizerSettings:
    """The settings in a tokenizer's directory. Raises CheckpointError if a file is broken."""
    values = _without_nulls(read_json(directory / CONFIG))
    try:
        if "added_tokens_decoder" in values:
            added = {int(number): _added(entry) for number, entry in values["added_tokens_decoder"].items()}
        else:
            values |= _without_nulls(read_json(directory / "special_tokens_map.json"))
            special = set(_special(values))
            listed = read_json(directory / "added_tokens.json")
            added = {int(number): _old_added(text, text in special) for text, number in listed.items()}
        return TokenizerSettings(values, dict(sorted(added.items())), tuple(_special(values)))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        file = CONFIG if "added_tokens_decoder" in values else "added_tokens.json"
        which = "added_tokens_decoder" if file == CONFIG else "the list of tokens"
        raise CheckpointError(f"{directory / file}: {which} is malformed.") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, empty without the file. Raises CheckpointError if it is no JSON object."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except (msgspec.DecodeError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as a JSON object: {error}.") from error


def token_text(entry: Any) -> str | None:
    """The text of a special token, which is a string or an object with its content; None for anything else."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def _without_nulls(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _special(values: Mapping[str, Any]) -> Iterator[str]:
    """Texts of all tokens that are named or listed as special ones."""
    for name in (*_NAMED, *_LISTED):
        entry = values.get(name)
        entries = entry if isinstance(entry, list) else entry.values() if name in _LISTED and entry else [entry]
        yield from (text for each in entries if (text := token_text(each)))


def _added(entry: Mapping[str, Any]) -> AddedToken:
    flags = {name: bool(entry.get(name)) for name in _FLAGS}
    return AddedToken(str(entry["content"]), **flags)


def _old_added(text: str, special: bool) -> AddedToken:
    return AddedToken(text, normalized=not special, special=special)
