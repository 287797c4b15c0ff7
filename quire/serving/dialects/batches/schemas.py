"""The body of POST /v1/batches."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field

from quire.errors import RequestError
from quire.serving.api.schemas.known_fields import Body, Part
from quire.serving.api.schemas.sampling import Metadata
from quire.serving.dialects.batches.lines import ENDPOINTS

_WINDOW = re.compile(r"([1-9][0-9]{0,5})([mhd])")
_SECONDS = {"m": 60, "h": 3_600, "d": 86_400}


class OutputExpiresAfter(Part):
    """When the output files are deleted."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3_600, le=2_592_000)


class BatchRequest(Body):
    """Requests to answer when there is time."""

    input_file_id: str = Field(description="A file of purpose 'batch', with a request a line.")
    endpoint: str = Field(
        description=f"Where all of its requests go: {', '.join(ENDPOINTS)}.", json_schema_extra={"enum": [*ENDPOINTS]}
    )
    completion_window: str = Field(
        description="Time for it, as '24h', '30m' or '7d'; what is left then has expired.",
        json_schema_extra={"pattern": f"^{_WINDOW.pattern}$"},
    )
    metadata: Metadata | None = None
    output_expires_after: OutputExpiresAfter | None = None

    def check_endpoint(self) -> None:
        """Raises RequestError for one to which no batch may go."""
        if self.endpoint not in ENDPOINTS:
            raise RequestError(f"endpoint must be one of {', '.join(ENDPOINTS)}.", param="endpoint")

    @property
    def seconds(self) -> int:
        """Of the completion window.

        Raises:
            RequestError: It is none.
        """
        match = _WINDOW.fullmatch(self.completion_window)
        if match is None:
            raise RequestError("completion_window must be a time such as '24h'.", param="completion_window")
        return int(match[1]) * _SECONDS[match[2]]
