"""The bodies of /v1/embeddings, /pooling and /classify."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from quire.errors import RequestError
from quire.pooling_params import PoolingParams, PoolingTask
from quire.serving.api.schemas.chat import MAX_MESSAGES, ChatMessage, ChatRequest
from quire.serving.api.schemas.completion import Prompt, each_prompt
from quire.serving.api.schemas.known_fields import OPENAI_FIELDS, FieldLists, optional
from quire.serving.api.schemas.queue_fields import QueueFields

MAX_INPUTS = 2_048
"""Maximum number of texts of one request: OpenAI's."""
POOLING_FIELDS = FieldLists(
    OPENAI_FIELDS.ignored,
    {
        **OPENAI_FIELDS.unsupported,
        "data": (),
        "padding": ("do_not_pad",),
        "stream": (False,),
        "stream_options": ({},),
    },
)
"""Fields that no schema of these endpoints has."""
EncodingFormat = Literal["float", "base64", "bytes", "bytes_only"]
EmbedDType = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "big", "little"]
Conversation = list[ChatMessage]


class PooledFields(QueueFields):
    """Fields that all of these endpoints share."""

    truncate_prompt_tokens: int | None = optional(
        "Cut texts to this many tokens; -1: to what the model takes. Without it, a text that is too long is refused."
    )
    truncation_side: Literal["left", "right"] | None = optional(
        "Which end truncate_prompt_tokens cuts off. Default: the tokenizer's, usually right."
    )
    use_activation: bool | None = optional(
        "Whether embeddings get length 1 and labels become probabilities. Default: as the model says."
    )
    normalize: bool | None = optional("Older name of use_activation.")
    softmax: bool | None = optional("Older name of use_activation.")
    activation: bool | None = optional("Older name of use_activation.")

    def params(self, task: PoolingTask | None, dimensions: int | None = None) -> PoolingParams:
        """Checked parameters; raises a RequestError that names a wrong field."""
        return PoolingParams(
            task=task,
            dimensions=dimensions,
            use_activation=self.use_activation,
            normalize=self.normalize,
            softmax=self.softmax,
            activation=self.activation,
        )


class InputFields(PooledFields):
    """The texts of a request: `input` or `messages`."""

    input: Any = Field(
        default=None,
        description="A text, a list of texts, a list of token ids, or a list of such lists.",
        json_schema_extra={
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                {"type": "array", "items": {"type": "integer"}, "minItems": 1},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}, "minItems": 1},
            ]
        },
    )
    messages: list[ChatMessage] | list[Conversation] | None = Field(
        default=None,
        max_length=MAX_MESSAGES,
        description="In place of input: a conversation, or a list of conversations, for the chat template.",
    )
    prompt_name: str | None = optional("Which of the model's prompts goes before each text: /v1/models lists them.")
    add_special_tokens: bool | None = optional("Default true for input, false for messages.")
    add_generation_prompt: bool | None = optional("Of messages. Default false.")
    continue_final_message: bool | None = optional("Of messages: leave the last one open.")
    chat_template: str | None = optional("Of messages, as in /v1/chat/completions.")
    chat_template_kwargs: dict[str, Any] | None = optional("Of messages: variables of the chat template.")

    def texts(self) -> list[Prompt]:
        """What `input` has; raises RequestError if it is none of its four forms, or too much."""
        found = each_prompt("input", self.input)
        check_num_inputs("input", len(found))
        return found

    def chats(self) -> list[ChatRequest]:
        """Each conversation of `messages`, as the chat template is given it; raises RequestError for too many."""
        messages: list[Any] = self.messages or []
        conversations = messages if messages and isinstance(messages[0], list) else [messages]
        check_num_inputs("messages", len(conversations))
        if not all(conversations):
            raise RequestError("messages must not be empty.", param="messages")
        opens = False if self.add_generation_prompt is None else self.add_generation_prompt
        return [
            ChatRequest(
                messages=each,
                add_generation_prompt=opens,
                continue_final_message=self.continue_final_message,
                chat_template=self.chat_template,
                chat_template_kwargs=self.chat_template_kwargs,
            )
            for each in conversations
        ]

    def check_input(self) -> None:
        """Raises RequestError unless there is either `input` or `messages`."""
        if (self.input is None) == (self.messages is None):
            raise RequestError("Send either input or messages.", param="input")
        if self.messages is not None and self.prompt_name is not None:
            raise RequestError("prompt_name goes with input: messages have a system message.", param="prompt_name")


class EncodingFields(InputFields):
    """How vectors are written."""

    encoding_format: EncodingFormat | None = optional(
        "float (default): numbers. base64: their bytes in base64. bytes: the body is nothing but the bytes, and the "
        "header metadata tells where each vector is. bytes_only: without that header."
    )
    embed_dtype: EmbedDType | None = optional("Type of the numbers in base64 and bytes. Default float32.")
    endianness: Endianness | None = optional("Order of the bytes in base64 and bytes. Default native: the server's.")
    dimensions: int | None = optional("Length of the vectors, where the model was trained for several (Matryoshka).")


class EmbeddingRequest(EncodingFields):
    """Texts to embed."""


class PoolingRequest(EncodingFields):
    """Texts of which the model makes what it makes of texts."""

    task: PoolingTask | None = optional("Default: the model's first one.")


class ClassifyRequest(InputFields):
    """Texts to classify."""


def check_num_inputs(name: str, number: int) -> None:
    """Raises a RequestError about the field `name` for more texts than one request may have."""
    if number > MAX_INPUTS:
        raise RequestError(
            f"{name} has {number} entries, and a request may have {MAX_INPUTS}: send several requests.", param=name
        )
