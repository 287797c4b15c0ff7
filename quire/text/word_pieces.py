"""BERT's tokenizers of older checkpoints: word pieces, one a line of vocab.txt (Devlin et al. 2019, section 3)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from quire.errors import CheckpointError

SPECIAL = {
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "mask_token": "[MASK]",
}
"""Special tokens by their names in settings, as they are unless those say otherwise."""
_NEEDED = ("unk_token", "cls_token", "sep_token")


def load(
    file: Path, special: Mapping[str, str], *, lowercase: bool, strip_accents: bool | None, splits_chinese: bool
) -> tokenizers.Tokenizer:
    """Return the tokenizer in vocab.txt, which puts a text between [CLS] and [SEP]; the second of a pair is of type 1.

    Args:
        file: The vocabulary.
        special: The special tokens by the names of SPECIAL.
        lowercase: Whether texts are lower-cased.
        strip_accents: Whether accents are taken off; None: if texts are lower-cased.
        splits_chinese: Whether each Chinese character is a word.

    Raises:
        CheckpointError: The file cannot be read, or lacks a special token.
    """
    vocabulary = _read(file)
    missing = [special[name] for name in _NEEDED if special[name] not in vocabulary]
    if missing:
        raise CheckpointError(f"{file} lacks the tokens {', '.join(missing)}: download it again.")
    first, behind = special["cls_token"], special["sep_token"]
    core = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token=special["unk_token"]))
    core.normalizer = normalizers.BertNormalizer(True, splits_chinese, strip_accents, lowercase)
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    core.post_processor = processors.TemplateProcessing(
        single=[first, "$A", behind],
        pair=[first, "$A", behind, "$B:1", f"{behind}:1"],
        special_tokens=[(token, vocabulary[token]) for token in (first, behind)],
    )
    known = [token for token in special.values() if token in vocabulary]
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in known])
    return core


def _read(file: Path) -> dict[str, int]:
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}): download it again.") from error
    if not lines[-1]:
        lines.pop()
    return {line.rstrip("\r"): number for number, line in enumerate(lines)}
