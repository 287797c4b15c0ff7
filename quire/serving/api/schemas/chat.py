"""The body of POST /v1/chat/completions, and its messages as plain data for the chat template.

A user who sends a picture or document to a model that reads text alone gets an error. In what a tool gave, or another
model did, the picture stands in the history for good: there a sentence takes its place, or the conversation could not
go on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from quire.errors import RequestError
from quire.foundation.messages.to_engine import MediumKind
from quire.media.parts import PLACEHOLDERS, kind_of, url_of
from quire.serving.api.schemas.custom_tools import custom_arguments
from quire.serving.api.schemas.known_fields import FieldNames, Part, optional
from quire.serving.api.schemas.sampling import SamplingFields
from quire.serving.api.schemas.tools import ChatTool, ToolChoice

KINDS = {
    "audio_url": "audio",
    "file": "document",
    "image_url": "image",
    "input_audio": "audio",
    "input_file": "document",
    "input_image": "image",
    "video_url": "video",
}
"""Kinds of input by the types of OpenAI's parts, and of vLLM's."""
NOT_SEEN = {
    "image": "[image: this model cannot see images]",
    "document": "[document: this model cannot read documents of this kind]",
    "audio": "[audio: this model cannot hear]",
    "video": "[video: this model cannot see videos]",
}
"""What takes the place of an input that the model cannot read, by kind."""
logger = logging.getLogger(__name__)
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
MessageContent = Literal["text", "parts", "as sent"]
MAX_MESSAGES = 4_096
"""Maximum number of messages of a conversation, and of parts of a message; OpenAI takes half as many."""
NOT_SERVED = {
    "audio": "send its transcript as content",
    "function_call": "send tool_calls",
}
"""Fields of messages that say something and cannot be shown to a model, and what to do instead."""
_TEXT_PARTS = ("text", "input_text", "output_text")
_ONE_CONVERSATION: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stream": (False,),
    "use_beam_search": (False,),
    "tools": ([],),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
}
"""Fields for one conversation alone, with the values (beside null) that ask for nothing."""


def not_served(kind: str) -> str:
    """Why input of this kind cannot be sent, and what to do."""
    return f"{kind} input is not served: this model reads text only. Send text instead."


class MediumPart(NamedTuple):
    """A medium of a conversation: the part's name in the request, its URL, the uuid by which later requests may name
    it, and its kind; without a URL, an earlier one brought it."""

    place: str
    url: str | None
    uuid: str | None = None
    kind: MediumKind = "image"


@dataclass
class SeenMedia:
    """The media of a conversation, for a model that reads some kinds.

    Attributes:
        placeholders: By kind, the text of the token that stands for a medium, where a chat template takes texts alone.
        parts: The media, in order.
    """

    placeholders: dict[MediumKind, str]
    parts: list[MediumPart] = field(default_factory=list)


class ContentPart(Part, extra="allow"):
    """A piece of a message: text, or a medium for models that read its kind."""

    type: str
    text: str | None = None
    refusal: str | None = None


class ChatMessage(Part, extra="allow"):
    """One turn of the conversation. Unknown fields are left out: clients echo messages with some of their own."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Field(max_length=MAX_MESSAGES)] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    refusal: str | None = optional("Text, as content is.")
    reasoning: str | None = None
    reasoning_content: str | None = optional("Older name of reasoning.")


class ChatRequest(SamplingFields):
    """A conversation to answer."""

    messages: list[ChatMessage] = Field(max_length=MAX_MESSAGES)
    max_tokens: int | None = optional("Older name of max_completion_tokens.")
    max_completion_tokens: int | None = optional("Default: all that the context leaves.")
    logprobs: bool | None = None
    top_logprobs: int | None = None
    echo: bool | None = optional("Begin with the last message, if the answer has its role.")
    add_generation_prompt: bool | None = optional("Default true.")
    continue_final_message: bool | None = optional("Go on with the last message.")
    add_special_tokens: bool | None = optional("Default false: the template has them.")
    chat_template_kwargs: dict[str, Any] | None = optional("Variables of the model's chat template.")
    chat_template: str | None = optional(
        "The name of one of the model's templates, or, with --trust-request-chat-template, a jinja text."
    )
    documents: list[dict[str, Any]] | None = optional("For templates that show documents.")
    mm_processor_kwargs: dict[str, Any] | None = optional("Settings of the image processor for this request.")
    media_io_kwargs: dict[str, Any] | None = optional("How files of images are read for this request.")
    tools: list[ChatTool] | None = optional("Functions and custom tools that the model may call.")
    tool_choice: ToolChoice | None = optional("Default auto, if there are tools.")
    parallel_tool_calls: bool | None = optional("Default true; false for one call at most.")
    include_reasoning: bool | None = optional("Default true: show the model's reasoning.")
    reasoning_effort: ReasoningEffort | None = optional("For templates that know of it; others ignore it.")
    verbosity: Literal["low", "medium", "high"] | None = optional("Ignored: the models know of none.")

    @property
    def longest(self) -> int | None:
        """Maximum number of tokens of the answer; None for what fits. Raises RequestError if two names differ."""
        older, newer = self.max_tokens, self.max_completion_tokens
        if older is not None and newer is not None and older != newer:
            raise RequestError(
                f"max_tokens ({older}) and max_completion_tokens ({newer}) differ: send one of them.",
                param="max_completion_tokens",
            )
        return older if newer is None else newer

    @property
    def opens_answer(self) -> bool:
        """Whether the prompt ends with the head of a new message; else the last message goes on."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt

    @property
    def continued(self) -> str:
        """The text that the answer continues: the last message's, with continue_final_message."""
        return self._last_text() if self.continue_final_message and self.messages else ""

    def echoed(self, role: str) -> str:
        """The text that begins an answer of this role: with `echo` the last message, if it is the answer's."""
        if not self.echo or (self.opens_answer and self.messages[-1].role != role):
            return ""
        return self._last_text()

    def _last_text(self) -> str:
        (last,) = plain_messages(self.messages[-1:], content="text")
        return str(last.get("content") or "")

    @property
    def field_names(self) -> FieldNames:
        """What the client calls the fields: of two that mean the same, the one that was sent."""
        sent = {} if self.top_logprobs is None else {"logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            sent["max_tokens"] = "max_completion_tokens"
        return FieldNames(sent, self._names)

    @property
    def num_logprobs(self) -> int | None:
        """How many likeliest tokens to report; None for none. Raises RequestError for top_logprobs alone."""
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs=true.", param="top_logprobs")
        if self.logprob_token_ids is not None and not self.top_logprobs:
            return None  # these are reported instead
        return (self.top_logprobs or 0) if self.logprobs else None


def plain_messages(
    messages: Sequence[ChatMessage], *, content: MessageContent, media: SeenMedia | None = None
) -> list[dict[str, Any]]:
    """The messages as plain data, near to how they were sent: a chat template brings them into its form. Parts of
    content are joined, listed, or left as they were sent; `media` gets those that are media. Raises RequestError for
    a message that is empty, or would lose something, such as an image without `media`."""
    if not messages:
        raise RequestError("messages must not be empty.", param="messages")
    if logger.isEnabledFor(logging.DEBUG) and (unknown := _unknown_fields(messages)):
        logger.debug("fields of messages that nobody knows are left out: %s", ", ".join(unknown))
    return [_plain(message, f"messages[{i}]", content, media) for i, message in enumerate(messages)]


def _unknown_fields(messages: Iterable[ChatMessage]) -> list[str]:
    """The names of fields that nobody knows, each once."""
    names: set[str] = set()
    for message in messages:
        names.update(message.model_extra or ())
        for part in message.content if isinstance(message.content, list) else ():
            names.update(f"content.{name}" for name in part.model_extra or ())
    return sorted(name[:64] for name in names - NOT_SERVED.keys())


def _plain(message: ChatMessage, place: str, form: MessageContent, media: SeenMedia | None) -> dict[str, Any]:
    for name, advice in NOT_SERVED.items():
        if (message.model_extra or {}).get(name) is not None:
            raise RequestError(f"{place}.{name} is not supported: {advice}.", param=f"{place}.{name}")
    content: Any = message.refusal if message.content is None else message.content
    if isinstance(content, list):
        given = message.role == "tool"
        parts = [_part(part, f"{place}.content[{i}]", media, of_tool=given) for i, part in enumerate(content)]
        content = parts
        if form == "text":
            shown = {} if media is None else media.placeholders
            content = "\n".join(part["text"] if part["type"] == "text" else shown[part["type"]] for part in parts)
    elif content is not None and form == "parts":
        content = [{"type": "text", "text": content}]
    if content is None and message.role not in ("assistant", "tool"):
        raise RequestError(f"{place}.content must be a text.", param=f"{place}.content")
    plain: dict[str, Any] = {"role": message.role}
    if content is not None or "content" in message.model_fields_set:
        plain["content"] = content
    if message.tool_calls:
        plain["tool_calls"] = [_tool_call(call, f"{place}.tool_calls") for call in message.tool_calls]
    reasoning = message.reasoning_content if message.reasoning is None else message.reasoning
    fields = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning": reasoning,  # a template of the operator's may read this name
        "reasoning_content": reasoning,
    }
    return plain | {name: value for name, value in fields.items() if value is not None}


def _part(part: ContentPart, place: str, media: SeenMedia | None, *, of_tool: bool) -> dict[str, Any]:
    """Return a part of content as a chat template goes through it."""
    fields = {"type": part.type, **(part.model_extra or {})}
    kind = kind_of(fields)
    if media is not None and kind is not None and kind in media.placeholders:
        media.parts.append(MediumPart(place, *url_of(fields, place), kind))
        return PLACEHOLDERS[kind]
    return {"type": "text", "text": _text(part, place, of_tool=of_tool)}


def _text(part: ContentPart, place: str, *, of_tool: bool) -> str:
    if part.type == "refusal" and part.refusal is not None:
        return part.refusal
    if of_tool and part.type in KINDS:
        return NOT_SEEN[KINDS[part.type]]
    if part.type not in _TEXT_PARTS:
        raise RequestError(f"{place}: parts of type '{part.type[:64]}' are not supported yet: send text.", param=place)
    if part.text is None:
        raise RequestError(f"{place}.text must be a text.", param=place)
    return part.text


def _tool_call(call: dict[str, Any], place: str) -> dict[str, Any]:
    """The part of a call that a model sees: templates may print all of it, and clients add fields of their own."""
    function = call.get("function")
    if call.get("type") == "custom":
        custom = call.get("custom")
        if not isinstance(custom, dict) or not isinstance(custom.get("input"), str):
            raise RequestError(f"{place}: each custom call needs 'custom' with a name and an input.", param=place)
        call = {**call, "type": "function"}
        function = {"name": custom.get("name"), "arguments": custom_arguments(custom["input"])}
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{place}: each needs a function with a name.", param=place)
    shown = {name: call[name] for name in ("id", "type") if call.get(name) is not None}
    return {**shown, "function": {"name": function["name"], "arguments": function.get("arguments")}}


class ChatBatchRequest(ChatRequest):
    """Several conversations to answer, each with one choice; all other fields are for all of them."""

    messages: list[list[ChatMessage]] = Field(  # type: ignore[assignment]
        description="Conversations.", max_length=MAX_MESSAGES
    )

    def conversations(self) -> list[ChatRequest]:
        """A request for each conversation; raises RequestError if there are none, or a field is not for several."""
        if not self.messages:
            raise RequestError("messages must not be empty.", param="messages")
        for name, neutral in _ONE_CONVERSATION.items():
            if (value := getattr(self, name)) is not None and value not in neutral:
                raise RequestError(f"{name} cannot be combined with several conversations: leave it out.", param=name)
        return [self.model_copy(update={"messages": messages}) for messages in self.messages]
