"""Requests that are longer than the context, in the words by which each API's clients know what to do."""

from __future__ import annotations

import bisect
import re
from typing import Any

import anthropic
import openai
import pytest

from tests.api.server import Server
from tests.api.speaker import Speaker

LONGEST = 2048
LONG = "word " * 4_000
HUGE = "x" * 2_000_000
QUESTION: list[Any] = [{"role": "user", "content": "Hello."}]


@pytest.fixture
def server(conversations: tuple[Server, Speaker]) -> Server:
    return conversations[0]


def refused(server: Server, path: str, **fields: Any) -> dict[str, Any]:
    answer = server.post(path, fields)
    assert answer.status_code == 400, answer.text
    body: dict[str, Any] = answer.json()
    return body


@pytest.fixture
def client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def test_anthropics_clients_are_told_how_much_they_may_ask_for(client: anthropic.Anthropic) -> None:
    asked = 20_000
    with pytest.raises(anthropic.BadRequestError) as refusal:
        client.messages.create(model="tiny", max_tokens=asked, messages=QUESTION)
    message = refusal.value.body["error"]["message"]  # type: ignore[index]
    found = re.fullmatch(
        r"input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+), "
        r"decrease input length or `max_tokens` and try again",
        message,
    )
    assert found, message
    prompt, asked_for, longest = map(int, found.groups())
    assert (asked_for, longest) == (asked, LONGEST)
    assert prompt == client.messages.count_tokens(model="tiny", messages=QUESTION).input_tokens
    client.messages.create(model="tiny", max_tokens=longest - prompt, messages=QUESTION)


@pytest.mark.parametrize("text", [LONG, HUGE])
def test_anthropics_clients_are_told_to_compact(client: anthropic.Anthropic, text: str) -> None:
    messages: Any = [{"role": "user", "content": text}]
    with pytest.raises(anthropic.BadRequestError) as refusal:
        client.messages.create(model="tiny", max_tokens=1, messages=messages)
    error = refusal.value.body["error"]  # type: ignore[index]
    found = re.fullmatch(r"prompt is too long: (\d+) tokens > (\d+) maximum", error["message"])
    assert found, error
    assert int(found[1]) > int(found[2]) == LONGEST
    assert error["type"] == "invalid_request_error"


def test_a_prompt_that_fills_the_context_is_too_long_as_well(server: Server) -> None:
    def ask(size: int) -> str:
        answer = server.post("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": "a" * size}]})
        return "" if answer.status_code == 200 else str(answer.json()["error"]["message"])

    # binary search for the shortest that is refused: the tokens of a text are not known here
    size = bisect.bisect_left(range(8 * LONGEST), 1, key=lambda size: int(bool(ask(size))))
    assert ask(size) == f"prompt is too long: {LONGEST} tokens > {LONGEST - 1} maximum"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 9_999}, "max_tokens"),
        ("/v1/chat/completions", {"messages": QUESTION, "max_completion_tokens": 9_999}, "max_completion_tokens"),
        ("/v1/responses", {"input": "Hello.", "max_output_tokens": 9_999}, "max_output_tokens"),
        ("/v1/completions", {"prompt": "Hello.", "max_tokens": 9_999}, "max_tokens"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "prompt"),
        ("/v1/responses", {"input": LONG}, "input"),
    ],
)
def test_openais_clients_get_its_code_and_the_length(server: Server, path: str, fields: Any, param: str) -> None:
    error = refused(server, path, **fields)["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert f"maximum context length is {LONGEST} tokens" in error["message"]
    if param.startswith("max"):
        assert f"{param} is 9999; " in error["message"]
        assert re.search(rf"lower {param} to \d+\.$", error["message"])


def test_ollamas_clients_are_told_by_its_names(server: Server) -> None:
    options = {"num_predict": 9_999}
    error = refused(server, "/api/chat", model="tiny", messages=QUESTION, options=options)["error"]
    assert "num_predict is 9999; " in error
    assert "max_tokens" not in error
    error = refused(server, "/api/chat", model="tiny", messages=QUESTION, options={"repeat_penalty": -1.0})["error"]
    assert error.startswith("repeat_penalty must")


def test_an_error_about_what_a_user_wrote_is_not_reworded(server: Server) -> None:
    """A tool that is called as a field of the API keeps its name in an error about it."""
    tool = {"name": "prompt", "input_schema": {"type": "object"}}
    body = {"max_tokens": 9, "messages": QUESTION, "tools": [tool, tool]}
    message = refused(server, "/v1/messages", **body)["error"]["message"]
    assert "'prompt' is there twice" in message
    answer = server.post("/v1/messages", {"max_tokens": 9, "messages": QUESTION, "stop_sequences": ["stop"] * 99})
    assert answer.json()["error"]["message"].startswith("stop_sequences takes at most")


def test_the_official_client_of_openai_sees_the_code(server: Server) -> None:
    with (
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.BadRequestError) as refusal,
    ):
        client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=9_999)
    assert refusal.value.code == "context_length_exceeded"
