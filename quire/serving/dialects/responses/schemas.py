"""The body of POST /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from quire.errors import RequestError, UnsupportedField
from quire.serving.api.schemas.chat import MAX_MESSAGES
from quire.serving.api.schemas.known_fields import Part
from quire.serving.api.schemas.sampling import Metadata, RequestFields, StreamOptions

Include = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""What a client may ask for. What belongs to tools and inputs that are not served never occurs, and reasoning is not
encrypted: it is in the open, and can be sent back."""

SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "bad_words", "allowed_token_ids", "min_tokens", "ignore_eos",
    "skip_special_tokens", "include_stop_str_in_output", "structured_outputs", "vllm_xargs", "chat_template_kwargs",
    "cache_salt", "priority",
)  # fmt: skip
"""Fields that mean what they mean in /v1/chat/completions, and are passed on."""


Summary = Literal["auto", "concise", "detailed"]


class ReasoningConfig(Part):
    """How much the model thinks before it answers."""

    effort: str | None = Field(default=None, description="For chat templates that know of it.")
    summary: Summary | None = Field(default=None, description="A hint: nothing is summarized.")
    generate_summary: Summary | None = Field(default=None, description="Older name of summary.")
    mode: str | None = Field(default=None, description="A hint: a model has one.")
    context: Literal["auto", "current_turn", "all_turns"] | None = Field(
        default=None, description="A hint: the chat template chooses."
    )


class TextFormat(Part, populate_by_name=True):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextConfig(Part):
    """What the answer is like."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(default=None, description="A hint: no model knows it.")


class ResponsesRequest(RequestFields):
    """Something to answer."""

    input: str | Annotated[list[Any], Field(max_length=MAX_MESSAGES)] = Field(
        description="A text, or messages, function calls, their outputs and reasoning."
    )
    instructions: str | None = Field(default=None, description="Comes first, as a system message.")
    previous_response_id: str | None = Field(default=None, description="Continue this one.")
    store: bool | None = Field(default=None, description="Default true: keep it, to be read and continued.")
    background: bool | None = Field(default=None, description="Answer at once, and work on it then.")
    include: list[Include] | None = Field(default=None, description="message.output_text.logprobs is the one served.")
    max_output_tokens: int | None = Field(default=None, ge=1, description="Default: all that the context leaves.")
    metadata: Metadata | None = None
    parallel_tool_calls: bool | None = Field(default=None, description="Default true.")
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    tools: list[dict[str, Any]] | None = Field(default=None, description="Functions that the model may call.")
    tool_choice: str | dict[str, Any] | None = Field(default=None, description="Default auto.")
    top_logprobs: int | None = Field(default=None, ge=0, le=20, description="Needs include.")
    truncation: Literal["auto", "disabled"] | None = Field(
        default=None, description="auto: leave out the oldest turns of a conversation that is too long."
    )
    stream_options: StreamOptions | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    max_tool_calls: int | None = Field(default=None, description="Of hosted tools, which are not served.")
    prompt: Any = Field(default=None, description="Stored prompts are not served.")
    image: Any = Field(default=None, description="About pictures, which are not served.")
    background_options: Any = Field(default=None, description="Bookkeeping of OpenAI's.")
    # what sampling takes beside these, see SAMPLING
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    min_p: Any = None
    seed: Any = None
    stop: Any = None
    stop_token_ids: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    logit_bias: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    min_tokens: Any = None
    ignore_eos: Any = None
    skip_special_tokens: Any = None
    include_stop_str_in_output: Any = None
    structured_outputs: Any = None
    vllm_xargs: Any = None
    chat_template_kwargs: Any = None

    def check(self) -> None:
        """Raises RequestError for fields that do not fit each other, or are not served."""
        if self.prompt is not None:
            raise UnsupportedField("prompt", "send instructions and input")
        if self.background and self.store is False:
            raise RequestError("background needs store: the answer would be lost.", param="background")
        if self.top_logprobs and not self.wants_logprobs:
            raise RequestError("top_logprobs needs include=['message.output_text.logprobs'].", param="top_logprobs")
        self.check_stream_options()

    @property
    def wants_logprobs(self) -> bool:
        """Whether texts come with log probabilities."""
        return "message.output_text.logprobs" in (self.include or ())
