"""Which output parsers a server's conversations go through, and what a choice's text says by these."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from quire.errors import ConfigError, RequestError
from quire.foundation.config import ServerConfig
from quire.foundation.messages.to_engine import ThinkingBudget
from quire.sampling_params import SamplingParams
from quire.serving.api.schemas.custom_tools import custom_input
from quire.serving.api.schemas.tools import StrictLevel, ToolUse
from quire.structured_outputs_params import StructuredOutputsParams
from quire.text.deltas import ChoiceDelta
from quire.text.hints import HintLog
from quire.text.model_text import ModelText
from quire.text.output_parsers.call_grammar import call_grammar, reasoning_in_front
from quire.text.output_parsers.detection import Detection, detect_reasoning_parser, detect_tool_parser
from quire.text.output_parsers.events import OutputEvent, ReasoningDelta, Tool, ToolCallDelta, ToolCallStart
from quire.text.output_parsers.formats import Turn
from quire.text.output_parsers.registry import create_parser, special_tokens, tool_format
from quire.text.output_parsers.scanner import OutputParser
from quire.text.thinking_budget import reasoning_tokens, thinking_budget
from quire.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OutputParsing:
    """How the choices of a request are parsed. `shown_tokens` are special tokens that the parser reads, whatever
    `skip_special_tokens` says; with `one_call` a choice ends behind its first call. `custom` are names of tools whose
    input is text."""

    make_parser: Callable[[], OutputParser]
    shown_tokens: frozenset[int] = frozenset()
    one_call: bool = False
    custom: frozenset[str] = frozenset()


class ChoiceParser:
    """Parses one choice while it is generated. `reasoning_tokens` are how many of its tokens were reasoning."""

    def __init__(self, parsing: OutputParsing) -> None:
        self._parsing = parsing
        self._parser = parsing.make_parser()
        self._called = False
        self._custom: tuple[int, list[str]] | None = None  # the open call of a custom tool, and its arguments so far
        self._reasons = False  # up to the last event
        self.reasoning_tokens = 0

    def parse(self, gained: ChoiceDelta) -> None:
        """Set the events of what was gained, and `tool_calls` for a choice that stopped behind a call."""
        events = self._parser.feed(gained.text) if gained.text else []
        if gained.finish_reason is not None:
            events += self._parser.finish(whole=gained.finish_reason == "stop")
        gained.events = []
        for event in events:
            if self._parsing.one_call and isinstance(event, ToolCallStart | ToolCallDelta) and event.index > 0:
                gained.finish_reason, gained.stop_reason = "stop", None
                break
            gained.events += self._with_input(self._identified(event))
        if gained.finish_reason is not None:
            gained.events += self._input()
        self._count_reasoning(gained)
        if gained.finish_reason == "stop" and self._called:
            gained.finish_reason = "tool_calls"

    def _count_reasoning(self, gained: ChoiceDelta) -> None:
        """Count the new tokens by their events: those without an event, a tag for one, belong to what was there before;
        of those that bring reasoning and what follows it, as many as the text has parts."""
        if not gained.events:
            self.reasoning_tokens += len(gained.tokens) * self._reasons
            return
        thought = sum(len(event.text) for event in gained.events if isinstance(event, ReasoningDelta))
        self._reasons = isinstance(gained.events[-1], ReasoningDelta)
        if thought:
            whole = thought if self._reasons else max(len(gained.text), thought)
            self.reasoning_tokens += round(len(gained.tokens) * thought / whole)

    def _identified(self, event: OutputEvent) -> OutputEvent:
        if not isinstance(event, ToolCallStart):
            return event
        self._called = True
        custom = event.name in self._parsing.custom
        return replace(event, id=event.id or f"call_{uuid.uuid4().hex[:24]}", custom=custom)

    def _with_input(self, event: OutputEvent) -> list[OutputEvent]:
        """An event, and before it the input of the custom call that it ends; the arguments of an open one wait."""
        if self._custom is not None and isinstance(event, ToolCallDelta) and event.index == self._custom[0]:
            self._custom[1].append(event.arguments)
            return []
        before = self._input()
        if isinstance(event, ToolCallStart) and event.custom:
            self._custom = (event.index, [])
        return [*before, event]

    def _input(self) -> list[OutputEvent]:
        """The input of the open custom call, which ends."""
        if self._custom is None:
            return []
        (index, written), self._custom = self._custom, None
        return [ToolCallDelta(index, custom_input("".join(written)), custom=True)]


@dataclass(frozen=True)
class ChatParsers:
    """The parsers of one server, by vLLM's names. With `auto_tool_choice` the model may choose to call tools."""

    tool_parser: str | None = None
    reasoning_parser: str | None = None
    auto_tool_choice: bool = True
    tokenizer: Tokenizer | None = None

    def parsing(self, tools: ToolUse | None, turn: Turn, *, formed: bool = False) -> OutputParsing | None:
        """How an answer is parsed; None if its text is all content. Raises RequestError for tools without a parser for
        calls.

        An answer that is `formed` has the form that `constraint` was given, if it does not call.
        """
        if tools is not None:
            self._check(tools)
        tool_parser = self.tool_parser if tools is not None else None
        if tool_parser is None and self.reasoning_parser is None:
            return None
        known = tools.tools if tools is not None else ()
        make = partial(create_parser, tool_parser, self.reasoning_parser, tools=known, turn=turn, calls_or_form=formed)
        one_call = tools is not None and not tools.parallel
        custom = tools.custom if tools is not None else frozenset()
        return OutputParsing(make, self._shown(tool_parser), one_call, custom)

    def constraint(
        self, tools: ToolUse, turn: Turn, form: Mapping[str, Any] | None = None
    ) -> StructuredOutputsParams | None:
        """The grammar that makes an answer call tools as it must; None if it is free to. Raises RequestError if the
        schema of a tool cannot be enforced in full, or this model's calls cannot.

        `form` is the schema of an answer that does not call, as the compiler takes it; None for any text.
        """
        if self.tool_parser is None or not (tools.constrained or form is not None):
            return None
        grammar = call_grammar(
            self.tool_parser,
            tools.tools,
            must_call=tools.must_call,
            every_schema=tools.level == "parameter",
            parallel=tools.parallel,
            form=form,
            reasoning_parser=self.reasoning_parser,
            turn=turn,
            special_ids=self._special_ids,
        )
        return StructuredOutputsParams(grammar=grammar, name="tools")

    def held(self, tools: ToolUse, hints: HintLog) -> ToolUse:
        """The tools, without grammars of their input where calls in this model's format can be held to none."""
        grammars = any(tool.input_grammar for tool in tools.tools)
        if not grammars or self.tool_parser is None or tool_format(self.tool_parser).syntaxes:
            return tools
        hints.drop("a tool's grammar of syntax lark", "calls in this model's format are not held to grammars")
        free = (replace(tool, strict=False, input_grammar="") if tool.input_grammar else tool for tool in tools.tools)
        return replace(tools, tools=tuple(free))

    def before_form(self, turn: Turn) -> str:
        """The reasoning that may come before an answer with a form, see `reasoning_in_front`."""
        return reasoning_in_front(self.reasoning_parser, turn, self._special_ids)

    def budget(self, params: SamplingParams, turn: Turn | None = None, *, hints: HintLog) -> ThinkingBudget | None:
        """The limit on an answer's reasoning; None for none, also where reasoning cannot be limited."""
        parser, tokenizer = self.reasoning_parser, self.tokenizer
        told_apart = parser is not None and tokenizer is not None and reasoning_tokens(parser, tokenizer) is not None
        if params.thinking_token_budget not in (None, -1) and not told_apart:
            hints.drop("thinking_token_budget", "this model's reasoning is not told apart by tokens of its own")
            return None
        return thinking_budget(params.thinking_token_budget, parser, tokenizer, turn)

    @property
    def _special_ids(self) -> Mapping[str, int]:
        return self.tokenizer.special_tokens if self.tokenizer else {}

    def _check(self, tools: ToolUse) -> None:
        if self.tool_parser is None:
            raise RequestError(
                "tools: this model's chat template does not tell how it calls tools. Start the server with "
                "--tool-call-parser.",
                param="tools",
            )
        if not self.auto_tool_choice and not tools.must_call:
            raise RequestError(
                "tool_choice 'auto' needs a server without --no-enable-auto-tool-choice.", param="tool_choice"
            )

    def _shown(self, tool_parser: str | None) -> frozenset[int]:
        if self.tokenizer is None:
            return frozenset()
        ids = map(self.tokenizer.token_id, special_tokens(tool_parser, self.reasoning_parser))
        return frozenset(token for token in ids if token is not None)


def choose_parsers(server: ServerConfig, text: ModelText) -> ChatParsers:
    """The parsers that flags name, or else the chat template tells. Raises ConfigError if a flag names none."""
    if text.chat_template is None:
        return ChatParsers(auto_tool_choice=server.enable_auto_tool_choice)
    tool_parser = Detection(server.tool_call_parser, "--tool-call-parser")
    if tool_parser.name is None:
        tool_parser = detect_tool_parser(text.chat_template.with_tools().source)
    reasoning_parser = Detection(server.reasoning_parser, "--reasoning-parser")
    if reasoning_parser.name is None:
        reasoning_parser = detect_reasoning_parser(text.chat_template.source)
    special_tokens(tool_parser.name, reasoning_parser.name)  # both exist
    for what, parser in (("Tool calls", tool_parser), ("Reasoning", reasoning_parser)):
        logger.info("%s: %s (%s)", what, parser.name or "not read", parser.reason)
    parsers = ChatParsers(tool_parser.name, reasoning_parser.name, server.enable_auto_tool_choice, text.tokenizer)
    if server.tool_strict_level != "auto":
        _check_enforced(parsers, server.tool_strict_level)
    return parsers


def _check_enforced(parsers: ChatParsers, level: StrictLevel) -> None:
    try:
        parsers.constraint(ToolUse((Tool("any"),), level=level), Turn())
    except RequestError as error:
        raise ConfigError(
            f"--tool-strict-level {level}: calls in the format '{parsers.tool_parser}' cannot be enforced yet: leave "
            "it out.",
            param="tool_strict_level",
        ) from error
