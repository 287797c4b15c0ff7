"""Which file of a directory the tokenizer is in, read as a `tokenizers` tokenizer."""

from __future__ import annotations

from pathlib import Path

import msgspec
import tokenizers
from tokenizers import decoders, models

from quire.compute.gguf.pre_tokenizers import pre_tokenizer_of
from quire.errors import CheckpointError
from quire.text import spm_model
from quire.text.tokenizer_settings import TokenizerSettings

FULL = "tokenizer.json"
SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
VOCABULARY, MERGES = "vocab.json", "merges.txt"
_SPLITS = {"Qwen2Tokenizer": "qwen2", "GPT2Tokenizer": "gpt-2", "": "gpt-2"}
"""By the class that tokenizer_config.json names: how texts are split for vocab.json and merges.txt."""
_NOT_READ = ("tekken.json", "vocab.txt", "tiktoken.model", "qwen.tiktoken")


def load_core(directory: Path, settings: TokenizerSettings) -> tokenizers.Tokenizer:
    """The tokenizer of the first of the files that a directory has.

    Raises:
        CheckpointError: It has none, or one that is broken or not read, which the message names.
    """
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
    others = [name for name in _NOT_READ if (directory / name).exists()]
    found = f"its {', '.join(others)} is of a kind that Quire does not read" if others else "no other file has one"
    raise CheckpointError(
        f"{directory} has neither tokenizer.json nor tokenizer.model, nor vocab.json with merges.txt, and {found}. "
        "Name a directory that has one with --tokenizer."
    )


def _from_merges(directory: Path, settings: TokenizerSettings) -> tokenizers.Tokenizer:
    """Byte-pair encoding over bytes."""
    name = str(settings.values.get("tokenizer_class", "")).removesuffix("Fast")
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
