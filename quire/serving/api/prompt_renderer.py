"""Texts and conversations to token ids, without blocking the event loop.

Short texts are encoded in the event loop, longer ones in a few threads, large ones in processes of low priority.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeVar

from quire.errors import CheckpointError, ConfigError, ContextLengthError, RequestError
from quire.foundation.config.server import ContentFormat
from quire.serving.api.large_requests.readers import (
    HUGE,
    Decode,
    Encode,
    LargeRequestReaders,
    Render,
    TruncationSide,
    pack,
    unpack,
)
from quire.serving.api.schemas.chat import ChatMessage, ContentPart, MessageContent, SeenMedia, plain_messages
from quire.text.chat_template import ChatTemplate
from quire.text.fill_in_middle import FillInMiddle, fill_in_middle
from quire.text.hints import NOT_READ, THINKING_SWITCHES
from quire.text.model_text import ModelText
from quire.text.tokenizer import Tokenizer, bad_word_tokens

T = TypeVar("T")

THREAD_THRESHOLD = 4_000
"""Texts of more characters are encoded in a thread; shorter ones take less time than handing them over would."""
THREADS = 4
LARGE = 2**16
"""Texts of more characters go to another process: they would hold cores that the model needs for milliseconds."""
WORD_CHARACTERS = 100
"""What a bad word costs beside its own characters, in characters."""
VALUE_CHARACTERS = 10
"""What a value of a conversation costs beside its text, in characters; a message has five values."""
MAX_TEMPLATE = 131_072
"""Maximum number of characters of a request's own chat template."""


@dataclass(frozen=True)
class Conversation:
    """What a chat template is given.

    Attributes:
        add_generation_prompt: Whether to end with the head of an answer; None for yes, unless the last message is
            continued.
        continue_final_message: Whether to end inside the last message.
        template: Text of another template than the model's; None for the model's.
    """

    messages: list[ChatMessage]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    reasoning_effort: str | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    documents: Sequence[Mapping[str, Any]] = ()
    template: str | None = None


_NO_TOKENIZER = (
    "This server has no tokenizer (--skip-tokenizer-init): send token ids to /v1/completions or /inference/v1/generate."
)


class PromptRenderer:
    """Renders chat templates and encodes prompts for one model.

    `variables` are for conversations that do not set them; raises ConfigError if the template has no such variable.
    """

    def __init__(
        self,
        text: ModelText,
        readers: LargeRequestReaders,
        content_format: ContentFormat = "auto",
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self._text = text
        self._readers = readers
        self._content_format = content_format
        self._variables = variables or {}
        known = text.chat_template.variables if text.chat_template else frozenset[str]()
        if wrong := self._variables.keys() - known:
            raise ConfigError(
                f"--default-chat-template-kwargs: '{min(wrong)}' is no variable of this model's chat template (it has: "
                f"{', '.join(sorted(known)) or 'none'}).",
                param="default_chat_template_kwargs",
            )
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenize")

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; raises RequestError if the server works on token ids only."""
        if self._text.tokenizer is None:
            raise RequestError(_NO_TOKENIZER, param="prompt")
        return self._text.tokenizer

    @cached_property
    def fill_in_middle(self) -> FillInMiddle | None:
        """The marks of prompts with a gap; None where the model has none."""
        return fill_in_middle(self.tokenizer)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def encode(
        self, text: str, add_special_tokens: bool, longest: int, kept: tuple[int, TruncationSide] | None = None
    ) -> list[int]:
        """Token ids of a text. Raises RequestError if it is no valid Unicode, and ContextLengthError if it cannot fit
        into `longest` tokens. With `kept` only so many tokens are wanted from one end; there may be more."""
        tokenizer = self.tokenizer
        if kept is None:
            check_length(tokenizer.fewest_tokens(text), longest)
        else:
            text = tokenizer.end_of(text, kept[0], first=kept[1] == "right")
        if len(text) > LARGE:
            return unpack((await self._readers.ask(Encode(text, add_special_tokens, kept))).tokens)
        return await self._run(len(text), lambda: tokenizer.encode(text, add_special_tokens))

    async def encode_each(
        self, texts: Sequence[str], add_special_tokens: bool, longest: int, kept: tuple[int, TruncationSide] | None
    ) -> list[list[int]]:
        """Token ids of each of several texts, many in one piece of work; see `encode`. An error that a text cannot fit
        has its place as `param`."""
        tokenizer, tokens = self.tokenizer, list[list[int]]()
        for some in _batches([self._kept(text, longest, kept, place) for place, text in enumerate(texts)]):
            if len(some[0]) > LARGE:
                tokens.append(unpack((await self._readers.ask(Encode(some[0], add_special_tokens))).tokens))
            else:
                work = partial(tokenizer.encode_each, some, add_special_tokens)
                tokens += await self._run(sum(map(len, some)), work)
        return tokens

    def _kept(self, text: str, longest: int, kept: tuple[int, TruncationSide] | None, place: int) -> str:
        """The part of a text that `kept` may leave."""
        if kept is not None:
            return self.tokenizer.end_of(text, kept[0], first=kept[1] == "right")
        if (fewest := self.tokenizer.fewest_tokens(text)) > longest:
            raise ContextLengthError(fewest, longest, param=str(place), at_least=True)
        return text

    async def encode_gap(
        self, marks: FillInMiddle, before: str, behind: str, longest: int, kept: tuple[int, TruncationSide] | None
    ) -> list[int]:
        """Token ids of a prompt that asks for what stands between two texts; see `encode`."""
        tokenizer = self.tokenizer
        if kept is None:
            check_length(tokenizer.fewest_tokens(before) + tokenizer.fewest_tokens(behind), longest)
        size = len(before) + len(behind)
        if size > LARGE:
            return unpack((await self._readers.ask(Encode(before, behind=behind))).tokens)
        return await self._run(size, lambda: marks.prompt(tokenizer, before, behind))

    async def bad_words(self, words: Sequence[str] | None) -> list[list[int]]:
        """`bad_words` as tokens; raises what `bad_word_tokens` does."""
        size = sum(WORD_CHARACTERS + len(word) for word in words or ())
        return await self._run(size, lambda: bad_word_tokens(self._text.tokenizer, words))

    async def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        tokenizer = self.tokenizer
        if len(tokens) > LARGE:
            return (await self._readers.ask(Decode(pack(tokens)))).text
        return await self._run(len(tokens), lambda: tokenizer.decode(tokens, skip_special_tokens=False))

    async def render(self, conversation: Conversation, media: SeenMedia | None = None) -> str:
        """The text of a conversation, whose media `media` gets; None: the model reads text alone. Raises RequestError
        if there is no chat template, or it refuses."""
        template = await self._template(conversation)
        size = _size(conversation)
        content = self._content(template)
        plain = await self._run(size, lambda: plain_messages(conversation.messages, content=content, media=media))
        continues = bool(conversation.continue_final_message)
        opens = conversation.add_generation_prompt
        variables = {name: value for name, value in self._variables.items() if name in template.variables}
        asked = self._text.hints.used(conversation.variables, template.variables)
        options: dict[str, Any] = {
            "tools": [*map(dict, conversation.tools)],
            "documents": [*map(dict, conversation.documents)],
            "add_generation_prompt": not continues if opens is None else opens,
            "continue_final_message": continues,
            "variables": {**variables, **self._effort(conversation, template), **asked},
        }
        if size > LARGE:
            return (await self._readers.ask(Render(plain, size=size, template=conversation.template, **options))).text
        return await self._run(size, lambda: template.render(plain, **options))

    def _effort(self, conversation: Conversation, template: ChatTemplate) -> dict[str, Any]:
        effort = conversation.reasoning_effort
        if effort is None:
            return {}
        switches = dict.fromkeys(THINKING_SWITCHES, effort != "none")
        known = {
            name: value
            for name, value in {**switches, "reasoning_effort": effort}.items()
            if name in template.variables
        }
        if not known and effort != "none":
            self._text.hints.drop("reasoning_effort", NOT_READ)
        return known

    async def _template(self, conversation: Conversation) -> ChatTemplate:
        template = self._text.chat_template
        if self._text.tokenizer is None:
            raise RequestError(_NO_TOKENIZER, param="messages")
        if template is None:
            raise RequestError(
                "This model has no chat template: use /v1/completions, or start the server with --chat-template.",
                param="messages",
            )
        if conversation.template is not None:
            replaced = partial(_replaced, template, conversation.template)
            template = await self._run(len(conversation.template), replaced)
        elif conversation.tools:
            template = template.with_tools()
        for name, shown in (("tools", template.shows_tools), ("documents", template.shows_documents)):
            if getattr(conversation, name) and not shown:
                raise RequestError(f"{name}: this model's chat template shows none: leave them out.", param=name)
        return template

    def _content(self, template: ChatTemplate) -> MessageContent:
        if self._content_format == "string" or (self._content_format == "auto" and not template.reads_parts):
            return "text"
        reads_text = self._content_format == "auto" and " is string" in template.source
        return "as sent" if reads_text else "parts"

    async def _run(self, size: int, work: Callable[[], T]) -> T:
        if size <= THREAD_THRESHOLD:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _size(conversation: Conversation) -> int:
    """About how many characters a conversation has; of a huge one, only a part is counted."""
    size, left = 0, deque[Any](conversation.messages)
    left += (*conversation.tools, *conversation.documents)
    while left and size <= HUGE:
        value = left.popleft()
        size += VALUE_CHARACTERS
        match value:
            case str():
                size += len(value)
            case ChatMessage():
                left += (value.content, value.reasoning, value.reasoning_content, value.tool_calls)
            case ContentPart():
                left.append(value.text)
            case dict():
                left += value.values()
            case list():
                left += value
    return size


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    """The texts in order: some that have at most LARGE characters together, or one that has more alone."""
    some, size = list[str](), 0
    for text in texts:
        if some and size + len(text) > LARGE:
            yield some
            some, size = [], 0
        some.append(text)
        size += len(text)
    if some:
        yield some


def check_length(fewest: int, longest: int) -> None:
    """Raises ContextLengthError if a prompt of at least `fewest` tokens cannot fit into `longest`."""
    if fewest > longest:
        raise ContextLengthError(fewest, longest, at_least=True)


def _replaced(template: ChatTemplate, source: str) -> ChatTemplate:
    """A request's own template, with the special tokens of the model's."""
    if len(source) > MAX_TEMPLATE:
        raise RequestError(f"chat_template may have at most {MAX_TEMPLATE} characters.", param="chat_template")
    try:
        return template.replaced(source)
    except CheckpointError as error:
        raise RequestError(f"chat_template: {error.message}", param="chat_template") from None
