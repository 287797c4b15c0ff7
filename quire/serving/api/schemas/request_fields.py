"""The fields that all generating endpoints share: which model, under which id and priority, streamed or not."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, PrivateAttr, StringConstraints

from quire.errors import RequestError
from quire.serving.api.request_head import ANYBODY, Caller, check_timeout
from quire.serving.api.schemas.known_fields import AS_THEY_ARE, Body, FieldNames, Part
from quire.validation import integer

Metadata = Annotated[
    dict[Annotated[str, StringConstraints(max_length=64)], Annotated[str, StringConstraints(max_length=512)]],
    Field(max_length=16),
]
"""Up to 16 texts of 512 characters, under names of up to 64: OpenAI's bounds."""


MAX_SALT = 1_024
"""Characters."""
MAX_PRIORITY = 2**31 - 1


class StreamOptions(Part):
    """What a stream reports beside the text."""

    include_usage: bool | None = Field(default=None, description="A last chunk with the token counts.")
    continuous_usage_stats: bool | None = Field(
        default=None, description="Token counts of its choice so far in every chunk; with include_usage only."
    )
    include_obfuscation: bool | None = Field(default=None, description="Ignored: nothing is padded here.")


class RequestFields(Body):
    """Fields beside the prompt and the sampling parameters."""

    model: str | None = Field(default=None, description="A name from /v1/models; may be left out.")
    request_id: str | None = Field(default=None, description="Id of the request, unless X-Request-Id is sent.")
    timeout: float | None = Field(
        default=None, description="Seconds after which the answer ends with what there is; X-Request-Timeout, too."
    )
    priority: int | None = Field(default=None, description="Lower goes first, if the server orders by priority.")
    cache_salt: str | None = Field(default=None, description="Cached prefixes are shared within one salt only.")
    stream: bool | None = Field(default=None, description="Server-sent events.")
    stream_options: StreamOptions | None = None
    _caller: Caller = PrivateAttr(default_factory=lambda: ANYBODY)  # a default would be copied for each request
    _names: FieldNames = PrivateAttr(default_factory=lambda: AS_THEY_ARE)

    def sent_by(self, caller: Caller) -> Self:
        """Set who sent this request, and return the request. A timeout counts from the caller's `arrival`."""
        self._caller = caller
        return self

    def named(self, names: FieldNames) -> Self:
        """Set what the client of a dialect calls these fields, and return the request."""
        self._names = names
        return self

    @property
    def field_names(self) -> FieldNames:
        """What the client calls the fields, for errors."""
        return self._names

    @property
    def tenant(self) -> str:
        """The tenant that sent this request."""
        return self._caller.tenant

    def queue_options(self) -> dict[str, Any]:
        """The priority, salt, deadline, tenant, model and collectors, as arguments of `EngineSession.add_request`.

        Raises:
            RequestError: A value is out of its range.
        """
        if self.cache_salt is not None and not 0 < len(self.cache_salt) <= MAX_SALT:
            raise RequestError(f"cache_salt must be a text of 1 to {MAX_SALT} characters.", param="cache_salt")
        timeout = None if self.timeout is None else check_timeout("timeout", self.timeout)
        return {
            "priority": integer("priority", self.priority or 0, -MAX_PRIORITY, MAX_PRIORITY),
            "cache_salt": self.cache_salt or "",
            "deadline": self._caller.deadline_after(timeout),
            "tenant": self.tenant,
            "collectors": self._caller.collectors,
            "model": self.model,
        }

    def check_stream_options(self) -> None:
        """Raises RequestError for stream_options without stream."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream=true.", param="stream_options")

    @property
    def streams_usage(self) -> tuple[bool, bool]:
        """Whether token counts are in a last chunk, and in every chunk."""
        options = self.stream_options or StreamOptions()
        return bool(options.include_usage), bool(options.include_usage and options.continuous_usage_stats)
