"""What clients attach to a response or a batch for themselves."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

Metadata = Annotated[
    dict[Annotated[str, StringConstraints(max_length=64)], Annotated[str, StringConstraints(max_length=512)]],
    Field(max_length=16),
]
"""Up to 16 texts of 512 characters, under names of up to 64: OpenAI's bounds."""
