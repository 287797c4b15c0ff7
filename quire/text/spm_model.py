"""A sentencepiece model file (`tokenizer.model`) as a `tokenizers` tokenizer.

A dozen protobuf fields are read here, so that no sentencepiece library is needed at run time. Knows nothing about
tokenizer_config.json.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from quire.errors import CheckpointError

SPACE = "▁"
_UNIGRAM, _BPE = 1, 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6

Field = int | bytes


@dataclass(frozen=True)
class Piece:
    """One entry of the vocabulary; its index is its id."""

    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class SpmModel:
    """What a sentencepiece model file says.

    Attributes:
        bpe: Whether it is byte-pair encoding; otherwise unigram.
        charsmap: Compiled character normalization; empty for none.
        dummy_prefix: Whether a space is put in front of the text.
        squeeze: Whether runs of spaces become one, and none stays at the ends.
    """

    pieces: tuple[Piece, ...]
    bpe: bool
    charsmap: bytes
    dummy_prefix: bool
    squeeze: bool


def load(path: Path, *, legacy: bool = True, stripping: Collection[str] = ()) -> tokenizers.Tokenizer:
    """Return the tokenizer that a `tokenizer.model` file describes.

    A `legacy` one puts the dummy prefix in front of every stretch between special tokens, as sentencepiece itself and
    most published models do; others in front of the whole text, unless that begins with a space. Special tokens in
    `stripping` take the white space behind them (`rstrip`). Raises CheckpointError if the file is not a sentencepiece
    model of kind BPE or unigram.
    """
    try:
        return convert(parse(path.read_bytes()), legacy=legacy, stripping=stripping)
    except (IndexError, ValueError, struct.error) as error:
        raise CheckpointError(f"{path} is not a readable sentencepiece model: {error}.") from error


def parse(data: bytes) -> SpmModel:
    """Read the serialized ModelProto. Raises ValueError, IndexError or struct.error when it is broken."""
    pieces: list[Piece] = []
    trainer: Mapping[int, Field] = {}
    normalizer: Mapping[int, Field] = {}
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            pieces.append(_piece(dict(_fields(value))))
        elif number == 2 and isinstance(value, bytes):
            trainer = dict(_fields(value))
        elif number == 3 and isinstance(value, bytes):
            normalizer = dict(_fields(value))
    kind = trainer.get(3, _UNIGRAM)
    if not pieces or kind not in (_UNIGRAM, _BPE):
        raise ValueError("only models of kind BPE or unigram are supported")
    charsmap = normalizer.get(2, b"")
    return SpmModel(
        pieces=tuple(pieces),
        bpe=kind == _BPE,
        charsmap=charsmap if isinstance(charsmap, bytes) else b"",
        dummy_prefix=bool(normalizer.get(3, 1)),
        squeeze=bool(normalizer.get(4, 1)),
    )


def convert(model: SpmModel, *, legacy: bool = True, stripping: Collection[str] = ()) -> tokenizers.Tokenizer:
    """A `tokenizers` tokenizer that gives the same ids; arguments as of `load`."""
    tokenizer = tokenizers.Tokenizer(_bpe(model) if model.bpe else _unigram(model))
    steps: list[normalizers.Normalizer] = []
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.squeeze:
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip()]
    if legacy and model.dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    if not legacy:
        scheme = "first" if model.dummy_prefix else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=False)
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if model.dummy_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    tokenizer.add_tokens(
        [
            AddedToken(p.text, normalized=False, rstrip=p.text in stripping, special=p.kind != _USER_DEFINED)
            for p in model.pieces
            if p.kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]
    )
    return tokenizer


def _bpe(model: SpmModel) -> models.BPE:
    return models.BPE(
        vocab={p.text: i for i, p in enumerate(model.pieces)},
        merges=_merges(model),
        unk_token=next((p.text for p in model.pieces if p.kind == _UNKNOWN), None),
        fuse_unk=True,
        byte_fallback=any(p.kind == _BYTE for p in model.pieces),
    )


def _unigram(model: SpmModel) -> models.Unigram:
    unknown = next((i for i, p in enumerate(model.pieces) if p.kind == _UNKNOWN), None)
    return models.Unigram(
        [(p.text, p.score) for p in model.pieces],
        unk_id=unknown,
        byte_fallback=any(p.kind == _BYTE for p in model.pieces),
    )


def _merges(model: SpmModel) -> list[tuple[str, str]]:
    """All merges. Sentencepiece merges whatever gives the piece of the best score, so every way to split a piece is
    a merge, ranked by the piece's score."""
    ids = {p.text: i for i, p in enumerate(model.pieces) if p.kind in (_NORMAL, _USER_DEFINED)}
    ranked: list[tuple[float, int, int, str, str]] = []
    for text, number in ids.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in ids and right in ids:
                ranked.append((-model.pieces[number].score, ids[left], ids[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _piece(fields: Mapping[int, Field]) -> Piece:
    text, score, kind = fields.get(1, b""), fields.get(2, b"\0\0\0\0"), fields.get(3, _NORMAL)
    if not isinstance(text, bytes) or not isinstance(score, bytes) or not isinstance(kind, int):
        raise ValueError("a piece has fields of the wrong type")
    return Piece(text.decode(), struct.unpack("<f", score)[0], kind)


def _fields(data: bytes) -> Iterator[tuple[int, Field]]:
    """Field number and value of a protobuf message: numbers for varints, bytes for all else."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire not in (1, 2, 5):
            raise ValueError(f"unknown protobuf wire type {wire}")
        size = 8 if wire == 1 else 4
        if wire == 2:
            size, at = _varint(data, at)
        if at + size > len(data):
            raise ValueError("the file is cut off")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number is too long")
