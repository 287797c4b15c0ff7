"""The fields that completions and chat share, and how they become SamplingParams."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from quire.errors import RequestError
from quire.sampling import SamplingParams
from quire.text.generation_config import DefaultSampling


class StreamOptions(BaseModel):
    """What a stream says beside the text."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = Field(default=None, description="A last chunk with the token counts.")
    continuous_usage_stats: bool | None = Field(default=None, description="Token counts so far in every chunk.")
    include_obfuscation: bool | None = Field(default=None, description="Ignored: nothing is padded here.")


class SamplingFields(BaseModel):
    """How tokens are drawn; what is left open comes from the model's defaults."""

    model_config = ConfigDict(strict=True, protected_namespaces=())

    model: str | None = Field(default=None, description="A name from /v1/models; may be left out.")
    n: int | None = Field(default=None, description="Answers to draw.")
    temperature: float | None = Field(default=None, description="0 is greedy.")
    top_p: float | None = None
    top_k: int | None = Field(default=None, description="0 or -1 for all tokens.")
    min_p: float | None = None
    seed: int | None = Field(default=None, description="Same seed, same draws.")
    stop: str | list[str] | None = Field(default=None, description="Strings that end the answer.")
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = Field(default=None, description="Server-sent events.")
    stream_options: StreamOptions | None = None

    def sampling(self, defaults: DefaultSampling, *, text: bool, **more: Any) -> SamplingParams:
        """Checked parameters.

        Args:
            defaults: The model's.
            text: Whether there is a tokenizer.
            more: What this endpoint sets on its own, None included.

        Raises:
            RequestError: A value is out of its range.
        """
        names = SamplingParams.__struct_fields__
        given = {name: getattr(self, name) for name in names if name in type(self).model_fields and name not in more}
        return SamplingParams(**defaults.fill(given), **more, detokenize=text)

    def check_stream_options(self) -> None:
        """Raises RequestError for stream_options without stream."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream=true.", param="stream_options")

    @property
    def streams_usage(self) -> tuple[bool, bool]:
        """Whether token counts stand in a last chunk, and in every chunk."""
        options = self.stream_options or StreamOptions()
        return bool(options.include_usage), bool(options.include_usage and options.continuous_usage_stats)
