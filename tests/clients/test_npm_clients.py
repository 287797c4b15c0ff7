"""SDKs of npm's over the APIs, unmodified, each asking Quill: what they saw, and what went over the wire."""

from __future__ import annotations

import pytest

from tests.clients.conftest import Quill, leave_refused_threads
from tests.clients.environment import run_npm_script

pytestmark = pytest.mark.long("api")
CALL = ["get_weather", {"city": "Oslo"}]


@pytest.mark.parametrize(
    ("api", "path"),
    [
        ("anthropic", "/v1/messages"),
        ("chat", "/v1/chat/completions"),
        ("responses", "/v1/responses"),
    ],
)
def test_the_ai_sdk(quill: Quill, api: str, path: str) -> None:
    seen = run_npm_script("ai_sdk", quill.url, quill.key, api)
    assert seen["errors"] == []
    assert "42" in seen["whole"]
    assert seen["streamed"] == seen["whole"]
    assert seen["usage"]["outputTokens"] > 0
    assert seen["object"] == seen["streamedObject"] == {"name": "Anna", "city": "Oslo"}
    for calls, answer in (("calls", "answer"), ("streamedCalls", "streamedAnswer")):
        assert seen[calls] == [[CALL], []]
        assert "snowy" in seen[answer]
    assert set(quill.paths) == {path}


def test_anthropics_tool_runner(quill: Quill) -> None:
    seen = run_npm_script("anthropic_tool_runner", quill.url, quill.key)
    assert seen["cities"] == ["Oslo", "Oslo"]
    assert "snowy" in seen["whole"]
    assert "snowy" in seen["streamed"]
    leave_refused_threads(quill)
    assert set(quill.paths) == {"/v1/messages"}
