"""The body of POST /v1/completions."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

import msgspec
from pydantic import Field

from quire.errors import RequestError
from quire.sampling_params import SamplingParams
from quire.serving.api.schemas.known_fields import FieldNames, optional
from quire.serving.api.schemas.sampling import RequestFields, SamplingFields

Prompt = str | list[int]
_PLACE = re.compile(r"^(.*?)(?: - at (?:`key` in )?`\$\.(.*)`)?$")
_UNKNOWN = re.compile(r"unknown field `(.*)`")
_NAMES = FieldNames(
    {"prompt": "token_ids"} | {name: f"sampling_params.{name}" for name in SamplingParams.__struct_fields__}
)


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
    suffix: str | None = optional("Text behind the gap, for models that can fill one in.")
    max_tokens: int | None = optional("Default 16.")
    logprobs: int | None = optional("Log probabilities of this many likeliest tokens.")
    echo: bool | None = optional("Put the prompt before the answer.")
    add_special_tokens: bool | None = optional("Default true.")

    @property
    def only_echo(self) -> bool:
        """Whether nothing but the prompt is wanted back."""
        return bool(self.echo) and self.max_tokens == 0

    @cached_property
    def prompts(self) -> list[Prompt]:
        """The prompts, each a text or token ids; raises RequestError if `prompt` is none of the four forms."""
        return each_prompt("prompt", self.prompt)


def each_prompt(name: str, value: Any) -> list[Prompt]:
    """The prompts in a field: a text, a list of texts, token ids, or a list of such lists. Raises a RequestError that
    names the field if it is none of these."""
    if isinstance(value, str):
        return [value]
    if value == []:
        raise RequestError(f"{name} is an empty list: send a text or token ids.", param=name)
    if isinstance(value, list):
        if _are_tokens(value):
            return [value]
        if all(isinstance(p, str) for p in value) or all(isinstance(p, list) and _are_tokens(p) for p in value):
            return value
    raise RequestError(
        f"{name} must be a text, a list of texts, a list of token ids, or a list of lists of token ids.", param=name
    )


def _are_tokens(values: list[Any]) -> bool:
    try:
        msgspec.convert(values, list[int])  # ten times as fast as a look at each
    except msgspec.ValidationError:
        return False
    return True


class GenerateRequest(RequestFields):
    """Token ids to go on with."""

    token_ids: list[int] = Field(description="The prompt.")
    sampling_params: dict[str, Any] = Field(
        description="Fields of SamplingParams; without max_tokens all that the context leaves. The model's own "
        "defaults are not filled in."
    )

    def sampling(self) -> SamplingParams:
        """Checked parameters; raises RequestError if a field is unknown, has a wrong value, or needs text."""
        given = {name: value for name, value in self.sampling_params.items() if value is not None}
        given.pop("output_kind", None)  # `stream` decides
        if given.get("stop"):
            raise RequestError("stop strings need text, and none is made here: send stop_token_ids.", param="stop")
        fields = {"max_tokens": None, **given, "detokenize": False}
        try:
            return msgspec.convert(fields, SamplingParams, str_keys=True)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, RequestError):  # from SamplingParams itself
                raise error.__cause__ from None
            raise _wrong_field(str(error)) from None

    @property
    def field_names(self) -> FieldNames:
        """The places of fields in this body."""
        return _NAMES


def _wrong_field(message: str) -> RequestError:
    """The error for msgspec's words, such as "Expected `int`, got `str` - at `$.n`"."""
    if unknown := _UNKNOWN.search(message):
        name = f"sampling_params.{unknown[1][:64]}"
        return RequestError(f"'{name}' is not a known field.", param=name)
    match = _PLACE.match(message)
    reason, place = (match[1], match[2]) if match else (message, None)
    name = f"sampling_params.{place}" if place else "sampling_params"
    return RequestError(f"{name}: {reason.replace('`', '')}.", param=name)
