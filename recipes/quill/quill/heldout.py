"""The line between what is trained on and what is only asked in the examination.

A sample's key is hashed into buckets and a fixed slice of them is held out. Training drops every sample of that slice
and the examination takes samples from nowhere else, so the two cannot meet whatever the seeds. The few questions a
stranger types first are always trained on, and so never examined.
"""

from __future__ import annotations

import hashlib
import re
from typing import Literal

Split = Literal["train", "held_out"]

BUCKETS = 20
HELD_OUT_BUCKETS = frozenset({7})

ALWAYS_TRAINED = frozenset(
    """hi|hello|hey|hi there|hello there|hi quill|hello quill|good morning|who are you|what are you|what is your name
    |what's your name|what can you do|help|how are you|who made you|tell me a joke|thanks|thank you|bye|goodbye|test
    |what is quill|what is quire|what's up|ok|are you human|are you a robot|are you an ai|write a haiku|write a poem
    |tell me a story|write a story|write a short story|2+2|2 + 2|what is 2+2|what is 2 + 2|tell me another joke
    |what is the capital of france|capital of france|how old are you|what is the meaning of life|what can i ask you
    |what time is it|what is the weather today|what's the weather|how many rs in strawberry|tell me something
    |how many r's are in strawberry|hello world|write hello world in python|yes|no|why|cool|what is an llm""".replace(
        "\n", ""
    ).split("|")
)


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
