"""What a format is: the two kinds of entries of the registry.

Owns the descriptions. Knows none of the formats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from quire.output_parsers.events import Tool
from quire.output_parsers.scanner import Steps, TextScanner

ReadAnswer: TypeAlias = Callable[[TextScanner, Sequence[Tool]], Steps[None]]
"""Reads content and tool calls to the end of the text."""


@dataclass(frozen=True)
class Turn:
    """How the model's turn begins in the prompt, since the output goes on from there.

    Attributes:
        prompt: The rendered prompt, or its end (some hundred characters do).
        continued: Text of the assistant's message that the output continues (`continue_final_message`).
    """

    prompt: str = ""
    continued: str = ""


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes tool calls.

    Attributes:
        read: Reads an answer.
        special_tokens: Tokens that the text must show, whatever `skip_special_tokens` says.
    """

    read: ReadAnswer
    special_tokens: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReasoningFormat:
    """How a family of models writes what it thinks.

    Attributes:
        read: Reads reasoning, and stops where the answer begins.
        special_tokens: Like a ToolFormat's.
        end: Text that ends the reasoning.
        answer: How the answer is read where no tool parser is chosen; None for text as it is.
    """

    read: Callable[[TextScanner, Turn], Steps[None]]
    end: str
    special_tokens: tuple[str, ...] = ()
    answer: ReadAnswer | None = None
