"""The two kinds of entries of the registry. Knows no format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from quire.text.output_parsers.events import Tool
from quire.text.output_parsers.scanner import Steps, TextScanner
from quire.text.output_parsers.tool_calls import Answer

ReadAnswer: TypeAlias = Callable[[TextScanner, Answer, Sequence[Tool]], Steps[None]]
"""Reads content and calls of these tools to the end of the text, and writes them to the Answer."""

TURN_CHARACTERS = 256
"""Characters at a prompt's end that are looked at: they may have opened the answer's reasoning."""


@dataclass(frozen=True)
class Turn:
    """How the model's turn begins in the prompt, which the output continues.

    Attributes:
        prompt: The rendered prompt, or its end of some hundred characters.
        continued: Text of the assistant's message that the output continues (`continue_final_message`).
    """

    prompt: str = ""
    continued: str = ""

    @classmethod
    def behind(cls, prompt: str, continued: str = "") -> Turn:
        """The turn behind a prompt, however long it is."""
        return cls(prompt[-TURN_CHARACTERS:], continued)


@dataclass(frozen=True)
class KeyedArguments:
    """How arguments are written one by one, instead of as a JSON object.

    Attributes:
        text_end: What ends a string; empty where strings are written as in JSON.
        never_in_text: Texts that no string may have, because they would end it.
    """

    before_key: str
    after_key: str
    after_value: str
    separator: str = ""
    text_end: str = ""
    never_in_text: tuple[str, ...] = ()


@dataclass(frozen=True)
class CallSyntax:
    """How calls are written, for a grammar that allows nothing else.

    Attributes:
        before_name, after_name, after_arguments: The texts of one call, in which NUMBER stands for digits.
        trigger: What announces a call in text, so that what follows can be enforced; empty where nothing does.
        begin, separator, end: Around several calls, and also around a single one.
        keyed: How arguments are written where they are no JSON object.
        only_with: A special token; the syntax is for vocabularies that have it.
        messages: Where an answer has messages: what stands around the text of those that may come before a call; the
            first kind is reasoning.
        last_message: What stands in front of the text of a message that ends the answer.
        arguments_key: Where a call is nothing but a JSON object: the key of its arguments.
    """

    before_name: str
    after_name: str
    after_arguments: str
    trigger: str = ""
    begin: str = ""
    separator: str = ""
    end: str = ""
    keyed: KeyedArguments | None = None
    only_with: str = ""
    messages: tuple[tuple[str, str], ...] = ()
    last_message: str = ""
    arguments_key: str = ""


NUMBER = "\0"


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes tool calls.

    Attributes:
        special_tokens: Tokens that the text must show, whatever `skip_special_tokens` says.
        syntaxes: How calls can be enforced; the first that fits the vocabulary counts.
        read_calls_or_form: Reads an answer that a grammar makes either calls by the book or a form, where `read` might
            take the form for a call; else None.
        new_id: Makes an id for a call that has none in the text, if such a call needs one.
    """

    read: ReadAnswer
    special_tokens: tuple[str, ...]
    syntaxes: tuple[CallSyntax, ...]
    read_calls_or_form: ReadAnswer | None = None
    new_id: Callable[[], str] | None = None

    @property
    def has_messages(self) -> bool:
        """Whether an answer is messages, which tell by themselves what is a call."""
        return any(syntax.messages for syntax in self.syntaxes)


@dataclass(frozen=True)
class ReasoningFormat:
    """How a family of models writes what it thinks.

    Attributes:
        read: Reads reasoning, and stops where the answer begins.
        opened: Whether the reasoning has begun (True) or ended (False) before the output; None if the output tells.
        answer: How the answer is read where no tool parser is chosen; None for text as it is.
        interrupts: Other texts that end the reasoning, and belong to the answer.
        answer_start: Where an answer is messages, and reasoning any number of them: what stands in front of the text of
            the last message.
    """

    read: Callable[[TextScanner, Turn], Steps[None]]
    opened: Callable[[Turn], bool | None]
    start: str
    end: str
    special_tokens: tuple[str, ...]
    answer: ReadAnswer | None = None
    interrupts: tuple[str, ...] = ()
    answer_start: str = ""
