"""The line between what is trained on and what is only asked in the examination.

A sample's key is hashed into buckets and a fixed slice of them is held out. Training drops every sample of that slice
and the examination takes samples from nowhere else, so the two cannot meet whatever the seeds. The few questions a
stranger types first are always trained on, and so never examined.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Literal

Split = Literal["train", "held_out"]

BUCKETS = 20
HELD_OUT_BUCKETS = frozenset({7})

_FIRST_QUESTIONS = Path(__file__).parent / "texts" / "first_questions.txt"
ALWAYS_TRAINED = frozenset(_FIRST_QUESTIONS.read_text(encoding="utf-8").splitlines())


def normalize(text: str) -> str:
    """Case, spacing and the punctuation that ends a word do not make a new question."""
    return " ".join(re.sub(r"[?!.,;:'\"]+(?=\s|$)", "", text.casefold()).split())


def split_of(key: str) -> Split:
    """``key`` is ``task|question``; the task does not count, as two tasks may put the same question."""
    question = normalize(key.split("|", 1)[-1])
    if question in ALWAYS_TRAINED:
        return "train"
    digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
    return "held_out" if int.from_bytes(digest) % BUCKETS in HELD_OUT_BUCKETS else "train"
