"""The body of POST /v1/responses, and the items of its conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, ValidationError

from quire.errors import RequestError, UnsupportedField
from quire.serving.api.schemas.chat import KINDS, MAX_MESSAGES, NOT_SEEN
from quire.serving.api.schemas.known_fields import Part, optional
from quire.serving.api.schemas.sampling import Metadata, RequestFields, StreamOptions
from quire.serving.dialects.dialect import hosted_output
from quire.serving.dialects.responses.client_tools import ITEM_TYPES, call_arguments, output_text

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

Summary = Literal["auto", "concise", "detailed"]


class ReasoningConfig(Part):
    """How much the model thinks before it answers."""

    effort: str | None = optional("For chat templates that know of it.")
    summary: Summary | None = optional("A hint: nothing is summarized.")
    generate_summary: Summary | None = optional("Older name of summary.")
    mode: str | None = optional("A hint: a model has one.")
    context: Literal["auto", "current_turn", "all_turns"] | None = optional("A hint: the chat template chooses.")


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
    verbosity: Literal["low", "medium", "high"] | None = optional("A hint: no model knows it.")


class _PassedOn(RequestFields):
    """Fields that mean what they mean in /v1/chat/completions, where they are checked."""

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


_OF_CACHE = ("session_id", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention")
SAMPLING = (*_PassedOn.__annotations__, *_OF_CACHE, "cache_salt", "priority")
"""Names of the fields that are passed on."""


class ResponsesRequest(_PassedOn):
    """Something to answer."""

    input: str | Annotated[list[Any], Field(max_length=MAX_MESSAGES)] = Field(
        description="A text, or messages, function calls, their outputs and reasoning."
    )
    instructions: str | None = optional("Comes first, as a system message.")
    previous_response_id: str | None = optional("Continue this one.")
    store: bool | None = optional("Default true: keep it, to be read and continued.")
    background: bool | None = optional("Answer at once, and work on it then.")
    include: list[Include] | None = optional("message.output_text.logprobs is the one served.")
    max_output_tokens: int | None = Field(default=None, ge=1, description="Default: all that the context leaves.")
    metadata: Metadata | None = None
    parallel_tool_calls: bool | None = optional("Default true.")
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    tools: list[dict[str, Any]] | None = optional("Functions that the model may call.")
    tool_choice: str | dict[str, Any] | None = optional("Default auto.")
    top_logprobs: int | None = Field(default=None, ge=0, le=20, description="Needs include.")
    truncation: Literal["auto", "disabled"] | None = optional(
        "auto: leave out the oldest turns of a conversation that is too long."
    )
    stream_options: StreamOptions | None = None
    safety_identifier: str | None = None
    user: str | None = None
    max_tool_calls: int | None = optional("Of hosted tools, which are not served.")
    prompt: Any = optional("Stored prompts are not served.")
    image: Any = optional("About pictures, which are not served.")
    background_options: Any = optional("Bookkeeping of OpenAI's.")

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


class _Item(Part, extra="ignore"):
    """What a response says beside these fields is sent back unused."""


class TextPart(_Item):
    """A piece of a text, the model's reasons for none, or a piece of its reasoning."""

    type: Literal["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"]
    text: str | None = None
    refusal: str | None = None


class MediaPart(_Item):
    """A picture, for models that see images, or another file, which none reads."""

    type: Literal["input_image", "input_file", "input_audio"]
    image_url: str | None = None
    file_id: str | None = None


class MessageItem(_Item):
    """What somebody said."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[TextPart | MediaPart]


class FunctionCallItem(_Item):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class FunctionCallOutputItem(_Item):
    """What came of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | list[TextPart | MediaPart]


class ClientCallItem(Part, extra="allow"):
    """A call of a custom tool, a patch or a shell that the model made."""

    type: Literal["custom_tool_call", "apply_patch_call", "shell_call", "local_shell_call"]
    call_id: str
    id: str | None = None
    name: str | None = None
    namespace: str | None = None

    @property
    def function_call(self) -> FunctionCallItem:
        """The call of a function that the model wrote."""
        name = self.name or self.type.removesuffix("_call")
        arguments = call_arguments({"type": self.type, **(self.model_extra or {})})
        return FunctionCallItem(
            type="function_call", call_id=self.call_id, name=name, arguments=arguments, namespace=self.namespace
        )


class ClientOutputItem(Part, extra="allow"):
    """What came of a patch or shell. Outputs of `local_shell` name their call by `id`."""

    type: Literal["apply_patch_call_output", "shell_call_output", "local_shell_call_output"]
    call_id: str | None = None
    id: str | None = None

    @property
    def text(self) -> str:
        """What a model reads."""
        return output_text({"type": self.type, **(self.model_extra or {})})


class ReasoningItem(_Item):
    """What the model thought."""

    type: Literal["reasoning"]
    summary: list[TextPart] = Field(default_factory=list)
    content: list[TextPart] | None = None


HOSTED_ITEMS = frozenset({
    "code_interpreter_call",
    "computer_call",
    "computer_call_output",
    "file_search_call",
    "image_generation_call",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_call",
    "mcp_list_tools",
    "program",
    "program_output",
    "web_search_call",
})  # fmt: skip
"""Items about tools that OpenAI runs."""


class HostedItem(Part, extra="allow"):
    """What a tool that OpenAI runs did in an earlier turn."""

    type: str

    @property
    def text(self) -> str:
        """What the tool gave, as far as a model can read it; empty if nothing can be read."""
        fields = self.model_extra or {}
        match self.type:
            case "mcp_call":
                found = [fields.get("output")]
            case "program_output":
                found = [fields.get("result")]
            case "code_interpreter_call":
                found = _each(fields.get("outputs"), "logs")
            case "file_search_call":
                found = _each(fields.get("results"), "text")
            case _:
                found = []
        texts = [text for text in found if isinstance(text, str) and text]
        name = str(fields.get("name", self.type.removesuffix("_call").removesuffix("_output")))
        return hosted_output(name, texts)


def _each(values: Any, name: str) -> list[Any]:
    return [value.get(name) for value in values if isinstance(value, dict)] if isinstance(values, list) else []


InputItem: TypeAlias = (
    MessageItem
    | FunctionCallItem
    | FunctionCallOutputItem
    | ClientCallItem
    | ClientOutputItem
    | ReasoningItem
    | HostedItem
)
_KINDS: dict[str, type[InputItem]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
    "custom_tool_call_output": FunctionCallOutputItem,
    **dict.fromkeys(ITEM_TYPES.values(), ClientCallItem),
    **{f"{kind}_output": ClientOutputItem for kind in ITEM_TYPES.values() if kind != "custom_tool_call"},
    "reasoning": ReasoningItem,
    **dict.fromkeys(HOSTED_ITEMS, HostedItem),
}


def parse_items(items: Sequence[Any], place: str = "input", *, sees: bool = False) -> list[InputItem]:
    """The items of a list as it came, for a model that `sees` images or does not; raises a RequestError that names an
    item which is wrong or not served."""
    return [_parse(item, f"{place}[{at}]", sees=sees) for at, item in enumerate(items)]


def part_text(part: TextPart | MediaPart) -> str:
    """What a part says."""
    if isinstance(part, MediaPart):
        return NOT_SEEN[KINDS[part.type]]
    return part.text if part.text is not None else part.refusal or ""


def has_images(content: str | Sequence[TextPart | MediaPart]) -> bool:
    """Whether some of the parts are pictures."""
    return not isinstance(content, str) and any(part.type == "input_image" for part in content)


def joined(content: str | Sequence[TextPart | MediaPart]) -> str:
    """A text of several parts in one."""
    return content if isinstance(content, str) else "\n".join(map(part_text, content))


def _parse(item: Any, place: str, *, sees: bool) -> InputItem:
    if not isinstance(item, dict):
        raise RequestError(f"{place} must be an object.", param=place)
    kind = item.get("type") or "message"
    if not isinstance(kind, str) or kind not in _KINDS:
        raise UnsupportedField(f"{place}.type", f"items of type '{str(kind)[:64]}' cannot be read")
    parts = item.get("content")
    for at, part in enumerate(parts if isinstance(parts, list) else ()):
        if isinstance(part, dict) and (kind_of_part := str(part.get("type"))) in KINDS:
            if sees and kind_of_part == "input_image" and item.get("role") != "assistant":
                continue
            raise UnsupportedField(
                f"{place}.content[{at}].type", f"this model reads text only; send text in place of '{part['type']}'"
            )
    try:
        return _KINDS[kind].model_validate(item)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False)[0]
        inside = [str(part) for part in wrong["loc"] if not str(part).startswith(("str", "list"))]
        where = ".".join([place, *inside])
        raise RequestError(f"{where}: {wrong['msg'][:200]}.", param=where) from None
