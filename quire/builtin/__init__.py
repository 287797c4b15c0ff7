"""The models that ship with Quire as package data: Quill, the draft model that guesses for it, and its EAGLE-3 head.

Knows where they lie and nothing else; they are made by ``recipes/quill`` and loaded like any other checkpoint.
"""

from __future__ import annotations

from pathlib import Path

MODELS: tuple[str, ...] = ("quill", "quill_draft")
HEADS: tuple[str, ...] = ("quill_eagle3",)
"""They propose tokens for Quill, and are no models of their own."""


def path(name: str) -> Path:
    """The directory of a built-in model or head, in the Hugging Face layout.

    Raises ValueError for a name that is not in ``MODELS`` or ``HEADS``.
    """
    if name not in (*MODELS, *HEADS):
        raise ValueError(f"There is no built-in model {name!r}. The built-in models are: {', '.join(MODELS)}.")
    return Path(__file__).parent / name
