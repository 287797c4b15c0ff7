"""How the errors of others are said."""

from __future__ import annotations

import json

import httpx
import pytest

from quire.errors import reason


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
