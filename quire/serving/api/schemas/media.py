"""What stands for pictures and documents that a model which reads text alone cannot see.

A user who sends one is told so with an error. In what a tool gave, or another model did, it stands in the history for
good: there a sentence takes its place, or the conversation could not go on.
"""

from __future__ import annotations

KINDS = {
    "file": "document",
    "image_url": "image",
    "input_audio": "audio",
    "input_file": "document",
    "input_image": "image",
}
"""Kinds of input by the types of OpenAI's parts."""
NOT_SEEN = {
    "image": "[image: this model cannot see images]",
    "document": "[document: this model cannot read documents of this kind]",
    "audio": "[audio: this model cannot hear]",
}
"""By kind."""


def not_served(kind: str) -> str:
    """Why one cannot be sent, and what to do."""
    return f"{kind} input is not served: this model reads text only. Send text instead."
