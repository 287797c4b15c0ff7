"""Pieces of Lark, as llguidance reads it."""

from __future__ import annotations

import json


def quoted(text: str) -> str:
    """A literal."""
    return json.dumps(text, ensure_ascii=False)
