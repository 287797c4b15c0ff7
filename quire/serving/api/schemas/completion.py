"""The body of POST /v1/completions."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import msgspec
from pydantic import Field

from quire.errors import RequestError
from quire.serving.api.schemas.sampling import SamplingFields

Prompt = str | list[int]


class CompletionRequest(SamplingFields):
    """Text to go on with."""

    prompt: Any = Field(
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
    suffix: str | None = Field(default=None, description="Text behind the gap, for models that can fill one in.")
    max_tokens: int | None = Field(default=None, description="Default 16.")
    logprobs: int | None = Field(default=None, description="Log probabilities of this many likeliest tokens.")
    echo: bool | None = Field(default=None, description="Put the prompt before the answer.")
    add_special_tokens: bool | None = Field(default=None, description="Default true.")

    @property
    def only_echo(self) -> bool:
        """Whether nothing but the prompt is wanted back."""
        return bool(self.echo) and self.max_tokens == 0

    @cached_property
    def prompts(self) -> list[Prompt]:
        """The prompts, each a text or token ids.

        Raises:
            RequestError: `prompt` is none of the four forms.
        """
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt == []:
            raise RequestError("prompt is an empty list: send a text or token ids.", param="prompt")
        if isinstance(prompt, list):
            if _are_tokens(prompt):
                return [prompt]
            if all(isinstance(p, str) for p in prompt) or all(isinstance(p, list) and _are_tokens(p) for p in prompt):
                return prompt
        raise RequestError(
            "prompt must be a text, a list of texts, a list of token ids, or a list of lists of token ids.",
            param="prompt",
        )


def _are_tokens(values: list[Any]) -> bool:
    try:
        msgspec.convert(values, list[int])  # ten times as fast as a look at each
    except msgspec.ValidationError:
        return False
    return True
