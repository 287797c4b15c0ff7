"""The tokenizer in a GGUF file's metadata as the files that it has in Hugging Face layout. Imports no tokenizer
library.

Byte-pair encodings over bytes (`gpt2`) become a tokenizer.json. Sentencepiece's (`llama`) become a tokenizer.model,
whose protobuf fields text/spm_model.py reads. BERT's word pieces (`bert`) become a vocab.txt.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.compute.gguf.pre_tokenizers import PreTokenizer, pre_tokenizer_of
from quire.errors import CheckpointError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = range(1, 5)
"""Types of tokens, with the numbers of sentencepiece; 5 is UNUSED and 6 is BYTE."""
_PREFIX = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_ADVICE = "give --tokenizer the directory or hub id of the model's own tokenizer"
_NOT_STRIPPING = ("<unk>", "<s>", "<|endoftext|>")
"""Control tokens of Phi-3 that do not strip the white space after them."""
_MARKS = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_BERT_MARKS = {
    "unknown": "unk_token",
    "cls": "cls_token",
    "seperator": "sep_token",  # as the format spells it
    "padding": "pad_token",
    "mask": "mask_token",
}
_BEGIN = "\u2581"
_VARINT, _BYTES, _FLOAT = 0, 2, 5
"""Protobuf's wire types."""
# Tokens that are known by their text to control a model, whatever their type in the file: converters often wrote tokens
# that a fine-tune added as ordinary text. Source: llama.cpp's llama-vocab.cpp, which knows them by their text, too.
_ENDS = frozenset({
    "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>",  # Llama 3, Granite
    "<|im_end|>", "<|endoftext|>",  # ChatML, Qwen, GPT-2
    "<|end|>", "<|return|>", "<|call|>",  # Phi-3, Harmony
    "<|calls|>", "<|flush|>",  # Solar
    "<end_of_turn>", "<eos>", "<turn|>", "<|tool_response>",  # Gemma
    "</s>", "<EOT>", "_<EOT>",  # Llama 2, CodeLlama
    "[EOT]", "[EOS]",  # Kimi
    "<end_of_utterance>",  # SmolVLM
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]",  # what follows a middle that is filled in
    "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
})  # fmt: skip
FILL_IN_MIDDLE = frozenset({
    "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<PRE>", "<|code_prefix|>", "<|prefix|>",
    "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<SUF>", "<|code_suffix|>", "<|suffix|>",
    "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<MID>", "<|code_middle|>", "<|middle|>",
})  # fmt: skip
"""Tokens around the parts of a text whose middle is to be filled in."""
_WITHIN_TURNS: dict[str, tuple[frozenset[str], ...]] = {
    "<|end|>": (frozenset({"<|return|>", "<|call|>"}), frozenset({"<|flush|>", "<|calls|>"})),
}
"""Tokens that end only a part of a turn if the vocabulary has all tokens of one of these sets."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Vocabulary:
    """A file's tokens; a token's index is its id. Types are NORMAL and others; scores belong to a sentencepiece
    vocabulary, and merges to a byte-pair encoding: both are empty for other vocabularies."""

    tokens: list[str]
    types: list[int]
    scores: list[float]
    merges: list[str]


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the contents of the tokenizer's files, by name. Raises CheckpointError if the file has no tokenizer, a
    broken one, or one of a kind that is not served."""
    kind = metadata.get(f"{_PREFIX}model")
    vocabulary = _corrected(_vocabulary(metadata))
    settings: dict[str, Any] = {}
    if kind == "gpt2":
        split = pre_tokenizer_of(metadata.get(f"{_PREFIX}pre"))
        files = {"tokenizer.json": _dumped(_byte_level(vocabulary, split))}
        adds_bos = split.adds_bos
    elif kind == "llama":
        files = {"tokenizer.model": b"".join(_sentencepiece(vocabulary, metadata))}
        adds_bos = True
        settings = _stripping(metadata, vocabulary)
    elif kind == "bert":
        return _word_pieces(vocabulary, metadata)
    else:
        raise _refused(f"is {kind!r}, which is not supported: served are gpt2, llama and bert", "model")
    settings |= _settings(metadata, vocabulary, adds_bos)
    return files | {"tokenizer_config.json": _dumped(settings)}


def _word_pieces(vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """Return vocab.txt: converters give a word's first piece a mark of its own, and take the mark of the others off."""
    pieces = [
        token if kind == CONTROL else token[1:] if token.startswith(_BEGIN) else f"##{token}"
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
    ]
    settings: dict[str, Any] = {"tokenizer_class": "BertTokenizer"}
    for theirs, ours in _BERT_MARKS.items():
        number = metadata.get(f"{_PREFIX}{theirs}_token_id")
        if isinstance(number, int) and 0 <= number < len(pieces):
            settings[ours] = pieces[number]
    text = "".join(f"{piece}\n" for piece in pieces)
    return {
        "vocab.txt": text.encode("utf-8", errors="replace"),
        "tokenizer_config.json": _dumped(settings),
    }


def end_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Return the ids of the tokens that end a sequence, because the file names them or by their text."""
    tokens = metadata.get(f"{_PREFIX}tokens")
    if not isinstance(tokens, list):  # `_list` refuses it
        tokens = []
    named = [metadata.get(f"{_PREFIX}{name}_token_id") for name in ("eos", "eot", "eom")]
    ends = end_texts(tokens)
    known = [number for number, token in enumerate(tokens) if isinstance(token, str) and token in ends]
    size = len(tokens) or None
    ids = (i for i in (*named, *known) if isinstance(i, int) and not isinstance(i, bool))
    return list(dict.fromkeys(i for i in ids if size is None or 0 <= i < size))


def _corrected(vocabulary: Vocabulary) -> Vocabulary:
    """Return the vocabulary with control tokens that converters gave other types."""
    special = end_texts(vocabulary.tokens) | FILL_IN_MIDDLE
    wrong = [n for n, text in enumerate(vocabulary.tokens) if text in special and vocabulary.types[n] != CONTROL]
    if not wrong:
        return vocabulary
    shown = ", ".join(repr(vocabulary.tokens[number]) for number in wrong)
    _log.warning("tokenizer   the GGUF file says that %s are no control tokens: they are taken for such", shown)
    types = list(vocabulary.types)
    for number in wrong:
        types[number] = CONTROL
    return replace(vocabulary, types=types)


def _vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    tokens = _list(metadata, "tokens", str)
    types = _list(metadata, "token_type", int) or [NORMAL] * len(tokens)
    scores = [float(score) for score in _list(metadata, "scores", float)]
    merges = _list(metadata, "merges", str)
    if not tokens:
        raise _refused("is missing", "tokens")
    if len(types) != len(tokens):
        raise _refused(f"has {len(types)} entries for {len(tokens)} tokens", "token_type")
    return Vocabulary(tokens, types, scores, merges)


def _list(metadata: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    values = metadata.get(_PREFIX + name, [])
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        raise _refused(f"is no list of {kind.__name__}", name)
    return values


def _byte_level(vocabulary: Vocabulary, split: PreTokenizer) -> dict[str, Any]:
    ids: dict[str, int] = {}
    for number, token in enumerate(vocabulary.tokens):
        ids.setdefault(token, number)
    merges = [merge.split(" ") for merge in vocabulary.merges]
    for merge in merges:
        if len(merge) != 2 or merge[0] not in ids or merge[1] not in ids or merge[0] + merge[1] not in ids:
            raise _refused(f"has {' '.join(merge)!r}, which does not merge two tokens into a third", "merges")
    added = [
        _added(number, token, vocabulary.types[number] in (UNKNOWN, CONTROL))
        for number, token in enumerate(vocabulary.tokens)
        if vocabulary.types[number] in (UNKNOWN, CONTROL, USER_DEFINED) and token
    ]
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": split.whole_words,
        "vocab": ids,
        "merges": merges,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": split.normalizer,
        "pre_tokenizer": split.steps,
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": model,
    }


def _added(number: int, token: str, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": token, **flags, "special": special}


def _sentencepiece(vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield a serialized ModelProto: pieces, the trainer's kind (BPE) and how texts are normalized."""
    if len(vocabulary.scores) != len(vocabulary.tokens):
        raise _refused(f"has {len(vocabulary.scores)} entries for {len(vocabulary.tokens)} tokens", "scores")
    for token, score, kind in zip(vocabulary.tokens, vocabulary.scores, vocabulary.types, strict=True):
        text = token.encode("utf-8", errors="replace")
        piece = _field(1, _BYTES, text) + _field(2, _FLOAT, struct.pack("<f", score)) + _field(3, _VARINT, kind)
        yield _field(1, _BYTES, piece)
    yield _field(2, _BYTES, _field(3, _VARINT, 2))
    prefix = int(metadata.get(f"{_PREFIX}add_space_prefix", True) is not False)
    squeeze = int(metadata.get(f"{_PREFIX}remove_extra_whitespaces", False) is True)
    yield _field(3, _BYTES, _field(3, _VARINT, prefix) + _field(4, _VARINT, squeeze))


def _field(number: int, wire: int, value: int | bytes) -> bytes:
    key = _varint(number << 3 | wire)
    if isinstance(value, int):
        return key + _varint(value)
    return key + (_varint(len(value)) if wire == _BYTES else b"") + value


def _varint(value: int) -> bytes:
    if value < 0:
        raise _refused(f"has {value}", "token_type")
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _stripping(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> dict[str, Any]:
    """Return settings that let Phi-3's special tokens strip the white space after them; empty for other models.

    No key of the file says so, and llama.cpp goes by the model's name as well.
    """
    name = str(metadata.get("general.name", "")).lower()
    if "phi-3" not in name and "phi3" not in name:
        return {}
    listed = {
        str(number): _added(number, token, special=True) | {"rstrip": True}
        for number, token in enumerate(vocabulary.tokens)
        if token == "</s>" or (vocabulary.types[number] == CONTROL and token not in _NOT_STRIPPING)
    }
    return {"added_tokens_decoder": listed}


def _settings(metadata: Mapping[str, Any], vocabulary: Vocabulary, adds_bos: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for theirs, ours in _MARKS.items():
        number = metadata.get(f"{_PREFIX}{theirs}_token_id")
        if isinstance(number, int) and 0 <= number < len(vocabulary.tokens):
            settings[ours] = vocabulary.tokens[number]
    settings["add_bos_token"] = bool(metadata.get(f"{_PREFIX}add_bos_token", adds_bos)) and "bos_token" in settings
    settings["add_eos_token"] = bool(metadata.get(f"{_PREFIX}add_eos_token", False)) and "eos_token" in settings
    template = metadata.get(_TEMPLATE)
    names = metadata.get("tokenizer.chat_templates")
    named = {str(name): metadata.get(f"{_TEMPLATE}.{name}") for name in names} if isinstance(names, list) else {}
    if isinstance(template, str):
        others = [{"name": name, "template": text} for name, text in named.items() if isinstance(text, str)]
        settings["chat_template"] = [{"name": "default", "template": template}, *others] if others else template
    return settings


def _dumped(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", errors="replace")


def _refused(text: str, name: str) -> CheckpointError:
    return CheckpointError(f"The GGUF file's '{_PREFIX}{name}' {text}: {_ADVICE}.", param="tokenizer")


def end_texts(tokens: Collection[object]) -> frozenset[str]:
    """Return the texts that end a turn or a sequence in a vocabulary of these tokens."""
    found = _ENDS.intersection(token for token in tokens if isinstance(token, str))
    parts = {text for text, sets in _WITHIN_TURNS.items() if any(others <= found for others in sets)}
    return found - parts
