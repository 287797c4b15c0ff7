"""The models that ship with Quire as package data: Quill, and the draft model that guesses for it.

Knows where they lie and nothing else; they are made by ``recipes/quill`` and loaded like any other checkpoint.
"""

from __future__ import annotations

from pathlib import Path

MODELS: tuple[str, ...] = ("quill", "quill_draft")


def path(name: str) -> Path:
    """The directory of a built-in model, in the Hugging Face layout.

    Raises ValueError for a name that is not in ``MODELS``.
    """
    if name not in MODELS:
        raise ValueError(f"There is no built-in model {name!r}. The built-in models are: {', '.join(MODELS)}.")
    return Path(__file__).parent / name
