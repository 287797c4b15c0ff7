"""Errors about a field that the client calls otherwise."""

from __future__ import annotations

import pytest

from quire.errors import ContextLengthError, RequestError, UnsupportedField
from quire.serving.api.schemas.known_fields import fields_named


@pytest.mark.parametrize(
    ("error", "message", "param"),
    [
        (RequestError("stop strings must not stop.", param="stop"),
         "stop_sequences strings must not stop.", "stop_sequences"),
        (RequestError("The stop is at stop 2.", param="stop"), "The stop is at stop 2.", "stop_sequences"),
        (RequestError("stops are many.", param="stop"), "stops are many.", "stop_sequences"),
        (RequestError("tools[2].name: 'stop' is wrong.", param="tools[2].name"),
         "functions[2].name: 'stop' is wrong.", "functions[2].name"),
        (UnsupportedField("tools[2].x"), "'functions[2].x' is not supported yet: leave it out.", "functions[2].x"),
        (RequestError("n must be 1.", param="n"), "n must be 1.", "n"),
        (RequestError("stop making sense."), "stop making sense.", None),
        (ContextLengthError(90, 100, asked=11, param="stop"),
         "The prompt has 90 tokens and stop_sequences is 11; the maximum context length is 100 tokens. Shorten the "
         "prompt or lower stop_sequences to 10.", "stop_sequences"),
    ],
)  # fmt: skip
def test_only_the_name_of_the_field_changes(error: RequestError, message: str, param: str | None) -> None:
    with pytest.raises(RequestError) as renamed, fields_named({"stop": "stop_sequences", "tools": "functions"}):
        raise error
    assert renamed.value is error
    assert (str(error), error.message, error.param) == (message, message, param)
