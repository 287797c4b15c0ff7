"""Functions in namespaces, as Codex sends its own and those of MCP servers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.api.responses.test_tools import TIME, WEATHER, group
from tests.api.responses.wire import connect, events_of, response_of
from tests.api.server import Server, prompts_sent
from tests.api.speaker import Speaker

SEARCH: Any = {"type": "function", "name": "search", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture
def server(conversations: tuple[Server, Speaker]) -> Server:
    return conversations[0]


def call(name: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'


def ask(server: Server, **fields: Any) -> dict[str, Any]:
    """A response, whose types were checked."""
    return response_of(server, {"input": "Go.", **fields})


def prompt(server: Server, **fields: Any) -> str:
    """What the model reads."""
    with prompts_sent(server) as sent:
        ask(server, **fields)
    text: str = server.post("/detokenize", {"tokens": sent[0]}).json()["prompt"]
    return text


@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_says_the_namespace(server: Server, model: Speaker, streamed: bool) -> None:
    model.text = call("get_time") + call("get_weather")
    tools = [WEATHER, group("clocks", TIME)]
    if streamed:
        events = events_of(server, {"input": "Go.", "tools": tools})
        items = events[-1]["response"]["output"]
        for kind in ("added", "done"):
            found = [event["item"] for event in events if event["type"] == f"response.output_item.{kind}"]
            assert [item.get("namespace") for item in found] == ["clocks", None]
    else:
        body = ask(server, tools=tools)
        items = body["output"]
        assert body["tools"] == tools
    assert [(item["name"], item.get("namespace")) for item in items] == [("get_time", "clocks"), ("get_weather", None)]
    assert "namespace" not in items[1]


def test_the_model_is_shown_what_is_said_about_functions_and_namespaces(server: Server, model: Speaker) -> None:
    model.text = "Done."
    said = prompt(server, tools=[group("sky", {**WEATHER, "description": "Looks up."}, TIME)])
    shown = [
        json.loads(tool) for tool in said.split("<tools>")[1].split("</tools>")[0].replace("}}{", "}}\n{").split("\n")
    ]
    assert [tool["function"]["name"] for tool in shown] == ["get_weather", "get_time"]
    assert shown[0]["function"]["description"] == "Looks up.\n\nsky: All of sky."
    assert shown[0]["function"]["parameters"] == WEATHER["parameters"]
    assert "description" not in shown[1]["function"]


def test_functions_of_one_name_are_told_apart(server: Server, model: Speaker) -> None:
    tools = [SEARCH, group("mcp__mail__", SEARCH), group("web", SEARCH), group("web__", SEARCH, TIME)]
    called = {
        "search": ("search", None),
        "mcp__mail__search": ("search", "mcp__mail__"),
        "web__search": ("search", "web"),
        "web__search_2": ("search", "web__"),
        "get_time": ("get_time", "web__"),
    }
    model.text = "".join(map(call, called))
    items = ask(server, tools=tools)["output"]
    assert [(item["name"], item.get("namespace")) for item in items] == list(called.values())
    model.text = "Done."
    history = [
        item
        for at, (name, namespace) in enumerate(called.values())
        for item in (
            {"type": "function_call", "call_id": str(at), "name": name, "arguments": "{}", "namespace": namespace},
            {"type": "function_call_output", "call_id": str(at), "output": "ok"},
        )
    ]
    said = prompt(server, tools=tools, input=[{"role": "user", "content": "Go."}, *history])
    for name in called:
        assert call(name) in said


def test_the_next_turn_knows_the_call(server: Server, model: Speaker) -> None:
    client = connect(server)
    tools: Any = [group("clocks", SEARCH), group("maps", SEARCH)]
    model.text = call("maps__search")
    first = client.responses.create(model="tiny", input="Go.", tools=tools)
    (item,) = first.output
    assert item.type == "function_call"
    assert (item.name, item.namespace) == ("search", "maps")
    model.text = "Found."
    output: Any = {"type": "function_call_output", "call_id": item.call_id, "output": "here"}
    second = client.responses.create(model="tiny", input=[output], tools=tools, previous_response_id=first.id)
    sent: Any = [{"role": "user", "content": "Go."}, item.to_dict(), output]
    again = client.responses.create(model="tiny", input=sent, tools=tools, store=False)
    assert second.usage is not None
    assert again.usage is not None
    assert second.usage.input_tokens == again.usage.input_tokens
    listed = client.responses.input_items.list(second.id, order="asc").data
    assert [getattr(each, "namespace", None) for each in listed] == [None, "maps", None]


def test_a_choice_may_name_a_function_in_a_namespace(server: Server, model: Speaker) -> None:
    tools = [group("clocks", TIME), WEATHER, group("maps", SEARCH), group("web", SEARCH)]
    model.text = "Done."
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "clocks"}]}
    assert prompt(server, tools=tools, tool_choice=allowed) == prompt(server, tools=tools[:1])
    allowed["tools"] = [{"type": "function", "name": "search", "namespace": "web"}]
    said = prompt(server, tools=tools, tool_choice=allowed)
    assert '"web__search"' in said
    assert "get_time" not in said
    for wrong in ({"name": "search"}, {"name": "get_time", "namespace": "maps"}):
        answer = server.post(
            "/v1/responses", {"input": "x", "tools": tools, "tool_choice": {"type": "function", **wrong}}
        )
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")
