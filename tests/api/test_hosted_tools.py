"""Tools that OpenAI and Anthropic run themselves: they are left out, and a header and the log say so."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest

from tests.api.server import Server
from tests.api.speaker import Speaker

HEADER = "x-quire-dropped-tools"
SCHEMA: Any = {"type": "object", "properties": {}}
FUNCTION: Any = {"type": "function", "name": "f", "parameters": SCHEMA}
CUSTOM: Any = {"name": "f", "input_schema": SCHEMA}
WEB_SEARCH: Any = {"type": "web_search", "external_web_access": True}
ANTHROPICS: Any = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
QUESTION: Any = [{"role": "user", "content": "Go."}]


@pytest.fixture
def server(conversations: tuple[Server, Speaker], model: Speaker) -> Server:
    model.text = "Done."
    return conversations[0]


def logged(caplog: pytest.LogCaptureFixture, tool: str) -> int:
    return sum(record.getMessage().startswith(f"The tool {tool} is ignored") for record in caplog.records)


@pytest.mark.parametrize("stream", [False, True])
def test_openais_tools_are_left_out(server: Server, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    server.text.hints._named.clear()  # by other tests
    body = {"input": "Go.", "tools": [FUNCTION, WEB_SEARCH], "stream": stream}
    for _ in range(2):
        answer = server.post("/v1/responses", body)
        assert answer.status_code == 200, answer.text
        assert answer.headers[HEADER] == "web_search"
    if not stream:
        assert answer.json()["tools"] == [{"description": None, "strict": None, **FUNCTION}]
    assert logged(caplog, "web_search") == 1
    counted = server.post("/v1/responses/input_tokens", {"input": "Go.", "tools": [FUNCTION, WEB_SEARCH]})
    assert counted.headers[HEADER] == "web_search"
    without = server.post("/v1/responses/input_tokens", {"input": "Go.", "tools": [FUNCTION]})
    assert HEADER not in without.headers
    assert counted.json() == without.json()


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_tools_are_left_out(server: Server, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    server.text.hints._named.clear()  # by other tests
    body = {"max_tokens": 99, "messages": QUESTION, "tools": [CUSTOM, ANTHROPICS], "stream": stream}
    for _ in range(2):
        answer = server.post("/v1/messages", body)
        assert answer.status_code == 200, answer.text
        assert answer.headers[HEADER] == "web_search_20250305"
    assert logged(caplog, "web_search") == 1
    counted = [
        server.post("/v1/messages/count_tokens", {"messages": QUESTION, "tools": tools})
        for tools in ([CUSTOM, ANTHROPICS], [CUSTOM])
    ]
    assert counted[0].json() == counted[1].json()
    assert [HEADER in answer.headers for answer in counted] == [True, False]


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "web_search_preview_2025_03_11"},
        {"type": "file_search", "vector_store_ids": ["x"]},
        {"type": "code_interpreter", "container": {"type": "auto"}},
        {"type": "image_generation"},
        {"type": "computer_use_preview", "display_width": 1, "display_height": 1, "environment": "browser"},
        {"type": "mcp", "server_label": "x", "server_url": "https://x.example"},
        {"type": "tool_search"},
        {"type": "shell", "environment": {"type": "container_auto"}},
    ],
)
def test_every_kind_that_openai_hosts(server: Server, tool: dict[str, Any]) -> None:
    answer = server.post("/v1/responses", {"input": "Go.", "tools": [tool]})
    assert answer.status_code == 200, answer.text
    assert answer.headers[HEADER] == tool["type"]
    assert answer.json()["tools"] == []


@pytest.mark.parametrize(
    "fields",
    [
        *(
            {"tools": [{"type": kind, "name": "x"}]}
            for kind in (
                "web_fetch_20250910",
                "code_execution_20250825",
                "tool_search_tool_bm25_20251119",
                "mcp_toolset",
            )
        ),
        {"mcp_servers": [{"type": "url", "name": "x", "url": "https://x.example"}]},
    ],
)
def test_every_kind_that_anthropic_hosts(server: Server, fields: dict[str, Any]) -> None:
    answer = server.post("/v1/messages", {"max_tokens": 9, "messages": QUESTION, **fields})
    assert answer.status_code == 200, answer.text
    assert answer.headers[HEADER] == (fields["tools"][0]["type"] if "tools" in fields else "mcp_servers")


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "web_search_preview"},
        "required",
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]},
    ],
)
def test_a_choice_of_what_openai_hosts_is_refused(server: Server, choice: Any) -> None:
    answer = server.post("/v1/responses", {"input": "Go.", "tools": [WEB_SEARCH], "tool_choice": choice})
    assert answer.status_code == 400
    assert "is a tool that OpenAI hosts; choose among functions." in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"].startswith("tool_choice")


@pytest.mark.parametrize("choice", [{"type": "tool", "name": "web_search"}, {"type": "any"}])
def test_a_choice_of_what_anthropic_runs_is_refused(server: Server, choice: Any) -> None:
    body = {"max_tokens": 9, "messages": QUESTION, "tools": [ANTHROPICS], "tool_choice": choice}
    answer = server.post("/v1/messages", body)
    assert answer.status_code == 400
    assert "'web_search' is a tool that Anthropic runs" in answer.json()["error"]["message"]


def test_a_choice_among_others_is_served(server: Server) -> None:
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}, {"name": "f"}]}
    for choice in ("auto", "none", allowed):
        answer = server.post("/v1/responses", {"input": "Go.", "tools": [WEB_SEARCH, FUNCTION], "tool_choice": choice})
        assert answer.status_code == 200, answer.text
    for kind in ("auto", "none"):
        body = {"max_tokens": 9, "messages": QUESTION, "tools": [ANTHROPICS], "tool_choice": {"type": kind}}
        assert server.post("/v1/messages", body).status_code == 200


def test_the_official_clients_send_them(server: Server) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        raw = client.responses.with_raw_response.create(model="tiny", input="Go.", tools=[{"type": "web_search"}])
        assert raw.headers[HEADER] == "web_search"
        assert raw.parse().output_text == "Done."
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as claude:
        message = claude.messages.create(model="tiny", max_tokens=9, messages=QUESTION, tools=[ANTHROPICS])
        assert [block.type for block in message.content] == ["text"]


def test_what_they_did_in_earlier_turns_is_history(server: Server) -> None:
    items = [
        {"role": "user", "content": "Search."},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "Zx9"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "a"}},
        {
            "type": "mcp_call",
            "id": "mcp_1",
            "server_label": "s",
            "name": "look",
            "arguments": "{}",
            "output": "found it",
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Here."}]},
        {"role": "user", "content": "Go on."},
    ]
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        first = client.responses.create(model="tiny", input=items)  # type: ignore[arg-type]
        next_one = client.responses.create(model="tiny", input="And?", previous_response_id=first.id)
        listed = client.responses.input_items.list(next_one.id, order="asc").data
    assert [item.type for item in listed][2:4] == ["web_search_call", "mcp_call"]
    chat = [
        {"role": "user", "content": "Search."},
        {"role": "assistant", "content": "[look gave:\nfound it\n]\nHere."},
        {"role": "user", "content": "Go on."},
    ]
    tokens = server.post("/tokenize", {"messages": chat}).json()["count"]
    assert first.usage is not None
    assert first.usage.input_tokens == tokens


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/responses", {"input": "Go.", "tools": [{"type": "web_search_２０２５_０８_２６"}]}),
    ("/v1/messages", {"max_tokens": 9, "messages": QUESTION, "tools": [{"type": "web_search_２０２５０３０５"}]}),
])  # fmt: skip
def test_other_digits_make_no_date(server: Server, path: str, body: dict[str, Any]) -> None:
    """A header could not name such a tool."""
    answer = server.post(path, body)
    assert answer.status_code == 400
    assert "tools[0].type" in answer.json()["error"]["message"]


def test_callers_that_are_no_list_are_refused(server: Server) -> None:
    answer = server.post("/v1/responses", {"input": "Go.", "tools": [FUNCTION | {"allowed_callers": 5}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools[0].allowed_callers"
