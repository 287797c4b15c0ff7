"""The bodies of Ollama's API: POST /api/chat, /api/generate, /api/embed, /api/embeddings and /api/show."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from quire.serving.api.schemas.chat import MAX_MESSAGES
from quire.serving.api.schemas.known_fields import Body, FieldLists, Part, optional

OLLAMA_FIELDS = FieldLists(
    ignored=frozenset({"keep_alive"}),
    unsupported={
        "context": ([],),
        "images": ([],),
        "logprobs": (False,),
        "top_logprobs": (0,),
        "template": ("",),
        "truncate": (True, False),
        "shift": (True, False),
        "width": (0,),
        "height": (0,),
        "steps": (0,),
    },
)
OPTION_FIELDS = FieldLists(
    ignored=frozenset({
        # how Ollama loads a model: here it is loaded
        "num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "numa", "low_vram", "f16_kv",
        "logits_all", "vocab_only", "use_mmap", "use_mlock", "embedding_only", "draft_num_predict",
    }),
    unsupported={
        "mirostat": (0,),
        "mirostat_tau": (5.0, 0.0),
        "mirostat_eta": (0.1, 0.0),
        "tfs_z": (1.0,),
        "typical_p": (1.0,),
        "penalize_newline": (True, False),
        "repeat_last_n": (-1, 0, 64),
    },
)  # fmt: skip


class Options(Part):
    """How tokens are sampled; what is left open comes from the model's defaults."""

    num_predict: int | None = optional("Most tokens of the answer; negative: what fits.")
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class OllamaFunction(Part):
    """A call's function."""

    name: str
    arguments: dict[str, Any]
    index: int | None = None
    description: str | None = None


class OllamaToolCall(Part):
    """A call of an earlier turn."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: OllamaFunction


class OllamaMessage(Part):
    """One turn of the conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = optional("Files in base64, for models that see images.")
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


Think = bool | Literal["low", "medium", "high", "max"]


class _OllamaRequest(Body):
    model: str
    format: Literal["", "json"] | dict[str, Any] | None = optional("json, or the JSON schema of the answer.")
    options: dict[str, Any] | None = optional("Sampling parameters by Ollama's names.")
    stream: bool | None = optional("Default true: a line of JSON for each part.")
    think: Think | None = optional("Whether the model thinks first, where it can choose.")
    keep_alive: Any = optional("The model stays loaded.")


class OllamaChatRequest(_OllamaRequest):
    """A conversation to answer."""

    kind: ClassVar[Literal["chat"]] = "chat"

    messages: list[OllamaMessage] | None = Field(default=None, max_length=MAX_MESSAGES)
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateRequest(_OllamaRequest):
    """A prompt to answer."""

    kind: ClassVar[Literal["generate"]] = "generate"

    prompt: str | None = None
    images: list[str] | None = optional("Files in base64, for models that see images.")
    suffix: str | None = optional("Text behind the gap, for models that can fill one in.")
    system: str | None = None
    raw: bool | None = optional("No chat template: the text goes on.")


class OllamaEmbedRequest(Body):
    """Texts to embed."""

    model: str
    input: str | list[str] | None = optional("A text, or a list of texts. None or an empty one loads the model.")
    truncate: bool | None = optional("Default true: cut texts to what the model takes; false: refuse longer ones.")
    dimensions: int | None = optional("Length of the vectors, where the model was trained for several.")
    options: dict[str, Any] | None = optional("They are checked, and change no embedding.")
    keep_alive: Any = optional("The model stays loaded.")


class OllamaEmbeddingsRequest(Body):
    """One text to embed, as older clients send it."""

    model: str
    prompt: str | None = None
    options: dict[str, Any] | None = optional("They are checked, and change no embedding.")
    keep_alive: Any = optional("The model stays loaded.")


class OllamaShowRequest(Body):
    """A model that is described."""

    model: str | None = None
    name: str | None = optional("Older name of model.")
    verbose: bool | None = None
