"""A user's prompts and conversations, in any form that `LLM` takes, as token ids."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NotRequired, TypedDict

import msgspec

from quire.errors import ConfigError, RequestError
from quire.foundation.messages.to_engine import MediaSpan, Medium, MediumKind
from quire.offline.media import LocalMedia, without_media
from quire.text.model_text import ModelText
from quire.text.output_parsers.formats import Turn
from quire.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`; the last two may have a `cache_salt`, and
`multi_modal_data` for models that see or hear: `{"image": picture or list of pictures}`, each a PIL.Image, an array
[height, width, 3] uint8 or a URL; and for models that hear: `{"audio": (samples, rate)}`."""

Message = Mapping[str, Any]
"""A message of a conversation."""
_LONGEST_SHOWN = 80


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]


class TokensPrompt(TypedDict):
    """A prompt as token ids. `prompt` is its text, if known."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]


class ParsedPrompt(NamedTuple):
    """One prompt. `text` is None if only token ids were given, and `turn` if it is no conversation. `media` are its
    images and sounds, and `source` the sound that an encoder reads."""

    text: str | None
    tokens: list[int]
    cache_salt: str = ""
    turn: Turn | None = None
    media: Sequence[MediaSpan] = ()
    source: Medium | None = None


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list. A list of integers is one prompt. Raises RequestError for anything else."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | bytearray | memoryview):
        raise _no_prompt(prompts)
    several: list[Any] = list(prompts)
    if several and (_are_ints(several) or all(isinstance(item, int) for item in several)):
        return [several]
    return several


_OF_MEDIA = ("multi_modal_data", "mm_processor_kwargs")


def parse_prompt(prompt: Prompt, tokenizer: Callable[[], Tokenizer], media: LocalMedia | None = None) -> ParsedPrompt:
    """A prompt with its token ids. `tokenizer` returns the model's tokenizer; it is only called for text. `media`
    reads `multi_modal_data`; None: there may be none. Raises RequestError if the value is no prompt, or has a field
    that is not supported."""
    if isinstance(prompt, Mapping) and media is not None and "multi_modal_data" in prompt:
        rest = {name: value for name, value in prompt.items() if name not in _OF_MEDIA}
        parsed = parse_prompt(rest, tokenizer)
        if (source := media.heard(prompt["multi_modal_data"])) is not None:
            return parsed._replace(source=source)
        tokens, spans = media.placed(parsed.tokens, *(prompt.get(name) or {} for name in _OF_MEDIA))
        return parsed._replace(tokens=tokens, media=spans)
    salt = ""
    if isinstance(prompt, Mapping):
        if unknown := prompt.keys() - {"prompt", "prompt_token_ids", "cache_salt"}:
            raise RequestError(f"A prompt with '{min(unknown)}' is not supported: leave it out.", param=min(unknown))
        salt = str(prompt.get("cache_salt") or "")
        if "prompt_token_ids" in prompt:
            return ParsedPrompt(prompt.get("prompt"), _token_ids(prompt["prompt_token_ids"]), salt)
        if not isinstance(prompt.get("prompt"), str):
            raise _no_prompt(prompt)
        prompt = prompt["prompt"]
    if isinstance(prompt, str):
        return ParsedPrompt(prompt, tokenizer().encode(prompt), salt)
    return ParsedPrompt(None, _token_ids(prompt), salt)


def _token_ids(prompt: Any) -> list[int]:
    if not isinstance(prompt, Iterable) or isinstance(prompt, bytes | bytearray | memoryview | str | Mapping):
        raise _no_prompt(prompt)
    with suppress(msgspec.ValidationError):
        return msgspec.convert(prompt, list[int])  # a quarter of the time of `_are_ints`, which long prompts feel
    tokens = list(prompt)
    with suppress(TypeError):
        if not any(isinstance(token, bool) for token in tokens):
            return [operator.index(token) for token in tokens]  # takes numbers of numpy and torch too
    raise _no_prompt(prompt)


def _no_prompt(value: Any) -> RequestError:
    kinds = 'A prompt is a string, a list of token ids, {"prompt": ...} or {"prompt_token_ids": ...}'
    return RequestError(f"{kinds}; got {shown(value)}.", param="prompt")


def shown(value: Any) -> str:
    """A value and its type, for an error message; a long value is cut."""
    text = repr(value)
    text = text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"
    return f"{text} ({type(value).__name__})"


def _are_ints(items: Sequence[Any]) -> bool:
    """Whether all items are of type int, and not of a subclass or numpy's; fast for long prompts."""
    return set(map(type, items)) == {int}


def as_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """One conversation or several, as a list. Raises RequestError if the value is neither."""
    if isinstance(messages, list | tuple) and messages and not isinstance(messages[0], Mapping):
        return list(messages)
    return [messages]  # type: ignore[list-item]  # `prompt` says what is wrong


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list | tuple):
        raise _no_conversation(messages)
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise _no_conversation(message)


def _no_conversation(value: Any) -> RequestError:
    form = 'A conversation is a list of messages, [{"role": "user", "content": "Hello"}]'
    return RequestError(f"{form}; got {shown(value)}.", param="messages")


class ConversationRenderer:
    """Renders conversations that differ only in their messages; see `LLM.chat` for the arguments and errors.

    Hints about reasoning in `chat_template_kwargs` are dropped if the template reads none.
    """

    def __init__(
        self,
        text: ModelText,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        media: LocalMedia | None = None,
    ) -> None:
        template = text.chat_template
        if text.tokenizer is None or (template is None and chat_template is None):
            raise ConfigError("This model has no chat template: pass chat_template=... to LLM, or use generate().")
        if chat_template is not None:
            template = text.other_chat_template(chat_template)
        assert template is not None
        self._tokenizer = text.tokenizer
        self._media = media
        self._template = template.with_tools() if tools else template
        variables = text.hints.used(chat_template_kwargs or {}, self._template.variables)
        self._options: dict[str, Any] = {
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "variables": variables,
        }
        of_parts = self._template.reads_parts
        self._placeholders = None if of_parts or media is None else media.placeholders(text.tokenizer)

    def prompt(self, messages: Sequence[Message]) -> ParsedPrompt:
        """One conversation, as plain data. Raises RequestError if it has no messages, or the template refuses them."""
        _check_messages(messages)
        values = list[tuple[MediumKind, Any]]()
        if self._media is not None:
            messages, values = without_media(messages, self._placeholders)
        text = self._template.render(messages, **self._options)
        continued = messages[-1].get("content") if messages and self._options["continue_final_message"] else ""
        turn = Turn.behind(text, continued if isinstance(continued, str) else "")
        tokens, spans = self._tokenizer.encode(text, add_special_tokens=False), list[MediaSpan]()
        if values and self._media is not None:
            tokens, spans = self._media.of_conversation(tokens, values)
        return ParsedPrompt(text, tokens, turn=turn, media=spans)
