"""How the errors of others are said."""

from __future__ import annotations

import copy
import json
import pickle

import httpx
import pytest

from quire.errors import ConfigError, ContextLengthError, QuireError, UnsupportedField, reason


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileNotFoundError(2, "No such file or directory", "/secret/place"), "no such file or directory"),
        (httpx.ConnectError("[Errno 111] Connection refused"), "connection refused"),
        (httpx.ConnectTimeout(""), "connect timeout"),
        (ValueError("HTTP is not spoken.\nFor more, see elsewhere"), "HTTP is not spoken"),
        (TimeoutError(), "timeout error"),
        (json.JSONDecodeError("Expecting value", "x", 0), "expecting value: line 1 column 1 (char 0)"),
    ],
)
def test_a_reason_is_one_line_without_numbers_of_the_system(error: Exception, said: str) -> None:
    assert reason(error) == said


@pytest.mark.parametrize(
    "error",
    [
        ContextLengthError(5, 4),
        ContextLengthError(5, 8, asked=4, param="max_tokens"),
        UnsupportedField("best_of"),
        ConfigError("dtype: no.", param="dtype"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_reach_other_processes_as_they_are(error: QuireError) -> None:
    for made in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(made) is type(error)
        assert (str(made), made.message, made.param) == (str(error), error.message, error.param)
        assert vars(made) == vars(error)
