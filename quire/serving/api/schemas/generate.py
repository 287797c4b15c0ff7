"""The body of POST /inference/v1/generate: token ids in, token ids out."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from pydantic import Field

from quire.errors import RequestError
from quire.sampling_params import SamplingParams
from quire.serving.api.schemas.known_fields import FieldNames
from quire.serving.api.schemas.request_fields import RequestFields

_PLACE = re.compile(r"^(.*?)(?: - at (?:`key` in )?`\$\.(.*)`)?$")
_UNKNOWN = re.compile(r"unknown field `(.*)`")
_NAMES = FieldNames(
    {"prompt": "token_ids"} | {name: f"sampling_params.{name}" for name in SamplingParams.__struct_fields__}
)


class GenerateRequest(RequestFields):
    """Token ids to go on with."""

    token_ids: list[int] = Field(description="The prompt.")
    sampling_params: dict[str, Any] = Field(
        description="Fields of SamplingParams; without max_tokens all that the context leaves. The model's own "
        "defaults are not filled in."
    )

    def sampling(self) -> SamplingParams:
        """Checked parameters.

        Raises:
            RequestError: A field is unknown or has a wrong value, or needs text.
        """
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
    """From msgspec's words, as "Expected `int`, got `str` - at `$.n`"."""
    if unknown := _UNKNOWN.search(message):
        name = f"sampling_params.{unknown[1][:64]}"
        return RequestError(f"'{name}' is not a known field.", param=name)
    match = _PLACE.match(message)
    reason, place = (match[1], match[2]) if match else (message, None)
    name = f"sampling_params.{place}" if place else "sampling_params"
    return RequestError(f"{name}: {reason.replace('`', '')}.", param=name)
