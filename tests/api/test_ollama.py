"""Ollama's API, through its unmodified client and over plain HTTP."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import ollama
import pytest

from quire.serving.dialects.ollama.routes import _model_files
from tests.api.server import KEY, Server, running
from tests.api.speaker import Speaker

QUESTION: list[Any] = [{"role": "user", "content": "How is the weather in Oslo?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
THINKING = "<think>Let me see.</think>\n\n"


@pytest.fixture
def server(conversations: tuple[Server, Speaker]) -> Server:
    return conversations[0]


@pytest.fixture
def client(server: Server) -> ollama.Client:
    return ollama.Client(host=server.url)


def lines(server: Server, path: str, **fields: Any) -> list[dict[str, Any]]:
    """All lines of a stream."""
    answer = server.post(path, {"model": "tiny", **fields})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


# --- chat ------------------------------------------------------------------------------------------------------------


def test_a_chat(model: Speaker, client: ollama.Client) -> None:
    model.text = THINKING + "Fine."
    answer = client.chat(model="tiny", messages=QUESTION, think=True)
    assert (answer.message.role, answer.message.content, answer.message.thinking) == (
        "assistant",
        "Fine.",
        "Let me see.",
    )
    assert (answer.done, answer.done_reason, answer.model) == (True, "stop", "tiny")
    assert answer.prompt_eval_count
    assert answer.eval_count
    assert answer.total_duration
    assert 0 < (answer.prompt_eval_duration or 0) <= answer.total_duration
    assert datetime.fromisoformat(str(answer.created_at)).tzinfo is not None


@pytest.mark.parametrize("text", ["Fine.", THINKING + "Fine.", THINKING + "So: " + CALL + CALL, ""])
def test_a_stream_says_what_the_whole_says(server: Server, model: Speaker, client: ollama.Client, text: str) -> None:
    model.text = text
    whole = client.chat(model="tiny", messages=QUESTION, tools=[WEATHER])
    parts = list(client.chat(model="tiny", messages=QUESTION, tools=[WEATHER], stream=True))
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert "".join(part.message.thinking or "" for part in parts) == (whole.message.thinking or "")
    calls = [call for part in parts for call in part.message.tool_calls or []]
    assert calls == list(whole.message.tool_calls or [])
    last = parts[-1]
    assert (last.done_reason, last.eval_count) == (whole.done_reason, whole.eval_count)
    server.assert_all_free()


def test_calls_are_objects_and_their_results_come_back(server: Server, model: Speaker, client: ollama.Client) -> None:
    model.text = CALL
    answer = client.chat(model="tiny", messages=QUESTION, tools=[WEATHER])
    (call,) = answer.message.tool_calls or []
    assert (call.function.name, dict(call.function.arguments)) == ("get_weather", {"city": "Oslo"})
    model.text = "It is -5 degrees."
    result = {"role": "tool", "content": "-5", "tool_name": "get_weather"}
    again = client.chat(model="tiny", messages=[*QUESTION, answer.message, result], tools=[WEATHER])
    assert again.message.content == "It is -5 degrees."


def test_calls_have_ids_by_which_results_name_them(server: Server, model: Speaker) -> None:
    model.text = CALL + CALL.replace("Oslo", "Rome")
    parts = lines(server, "/api/chat", messages=QUESTION, tools=[WEATHER])
    calls = [call for part in parts for call in part["message"].get("tool_calls", ())]
    assert len({call["id"] for call in calls}) == 2
    asked = {"role": "assistant", "content": "", "tool_calls": calls}
    results = [{"role": "tool", "content": str(i), "tool_call_id": call["id"]} for i, call in enumerate(calls)]
    model.text = "Fine."
    whole = {"model": "tiny", "messages": [*QUESTION, asked, *results], "tools": [WEATHER], "stream": False}
    assert server.post("/api/chat", whole).json()["message"]["content"] == "Fine."


def test_a_python_function_is_a_tool(model: Speaker, client: ollama.Client) -> None:
    def get_weather(city: str) -> str:
        """The weather in a city.

        Args:
            city: Its name.
        """
        return city

    model.text = CALL
    answer = client.chat(model="tiny", messages=QUESTION, tools=[get_weather])
    assert [call.function.name for call in answer.message.tool_calls or []] == ["get_weather"]


def test_a_stream_is_the_default_and_any_content_type_will_do(server: Server, model: Speaker) -> None:
    model.text = "Fine."
    body = json.dumps({"model": "tiny", "messages": QUESTION})
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = server.http.post(server.url + "/api/chat", content=body, headers=form)
    assert [json.loads(line)["done"] for line in answer.text.splitlines()][-1] is True
    assert len(answer.text.splitlines()) > 1
    page = server.http.post(server.url + "/api/chat", content=body, headers=form | {"Origin": "https://x.example"})
    assert page.status_code == 415


def test_options_are_sampling_parameters(model: Speaker, client: ollama.Client) -> None:
    model.text = "one two three"
    options: Any = {
        "num_predict": 2,
        "temperature": 0.5,
        "top_k": 5,
        "min_p": 0.1,
        "num_ctx": 99,
        "repeat_penalty": 1.1,
    }
    cut = client.chat(model="tiny", messages=QUESTION, options=options)
    assert (cut.done_reason, cut.eval_count) == ("length", 2)
    stopped = client.chat(model="tiny", messages=QUESTION, options={"stop": [" two"], "num_predict": -1})
    assert (stopped.message.content, stopped.done_reason) == ("one", "stop")


def test_thinking_is_the_templates_switch(server: Server, model: Speaker) -> None:
    model.text = THINKING + "Fine."
    shown = lines(server, "/api/chat", messages=QUESTION)
    assert "".join(part["message"].get("thinking", "") for part in shown) == "Let me see."
    hidden = lines(server, "/api/chat", messages=QUESTION, think=False)
    assert not any("thinking" in part["message"] for part in hidden)


def test_the_async_client(server: Server, model: Speaker) -> None:
    model.text = "Fine."

    async def talk() -> str:
        client = ollama.AsyncClient(host=server.url)
        return "".join([part.message.content or "" async for part in await client.chat("tiny", QUESTION, stream=True)])

    assert asyncio.run(talk()) == "Fine."


# --- generate ---------------------------------------------------------------------------------------------------------


def test_a_prompt_goes_through_the_template_unless_it_is_raw(
    server: Server, model: Speaker, client: ollama.Client
) -> None:
    model.text = "Fine."
    answer = client.generate(model="tiny", prompt="hi", system="Be brief.")
    raw = client.generate(model="tiny", prompt="hi", raw=True)
    assert (answer.response, raw.response) == ("Fine.", "Fine.")
    assert (answer.prompt_eval_count or 0) > (raw.prompt_eval_count or 0) + 10
    parts = list(client.generate(model="tiny", prompt="hi", raw=True, stream=True))
    assert "".join(part.response for part in parts) == "Fine."
    assert parts[-1].done_reason == "stop"


def test_raw_text_goes_on_as_long_as_it_may(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        answer = ollama.Client(host=server.url).generate(model="tiny", prompt="a", raw=True)
        assert answer.response[:5] == "bcdef"
        assert answer.eval_count == 511  # not OpenAI's 16


def test_without_a_prompt_a_model_is_only_loaded(server: Server, client: ollama.Client) -> None:
    assert client.generate(model="tiny").done_reason == "load"
    assert client.chat(model="tiny", messages=[]).done_reason == "load"
    assert client.generate(model="tiny", keep_alive=0).done_reason == "unload"
    with pytest.raises(ollama.ResponseError, match="not served here"):
        client.generate(model="other")


# --- models -----------------------------------------------------------------------------------------------------------


def test_models_are_listed_and_described(server: Server, client: ollama.Client) -> None:
    assert [model.model for model in client.list().models] == ["tiny", "alias"]
    (loaded,) = client.ps().models
    assert (loaded.model, loaded.context_length) == ("tiny", 2048)
    shown = client.show("tiny:latest")
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert "im_start" in (shown.template or "")
    version = tuple(map(int, server.get("/api/version").json()["version"].split(".")))
    assert version >= (0, 14, 0)  # the first with /v1/messages; Codex asks for 0.13.4, with /v1/responses
    assert shown.modelinfo is not None
    assert shown.modelinfo[f"{shown.modelinfo['general.architecture']}.context_length"] == 2048
    assert server.http.head(server.url + "/").status_code == 200


def test_a_gguf_file_is_described_as_one(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" * 9)
    files = _model_files(tmp_path)
    assert (files.format, files.size) == ("gguf", 36)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"options": {"num_predict": 10**6}}, "The prompt has"),
        ({"options": {"temperature": -1.0}}, "temperature must be"),
        ({"options": {"temprature": 1.0}}, "'temprature' is not a known field. Did you mean 'temperature'?"),
        ({"options": {"mirostat": 2}}, "'mirostat' is not supported yet"),
        ({"images": ["aGk="]}, "'images' is not supported yet"),
        ({"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, "messages[0].images"),
        ({"template": "{{ .Prompt }}"}, "'template' is not supported yet"),
        ({"model": None}, "model must be a valid string."),
        ({"thread": "x"}, "'thread' is not a known field."),
    ],
)
def test_what_is_wrong_is_said_in_ollamas_shape(server: Server, fields: dict[str, Any], message: str) -> None:
    answer = server.post("/api/chat", {"model": "tiny", "messages": QUESTION, **fields})
    assert answer.status_code == 400
    assert list(answer.json()) == ["error"]
    assert message in answer.json()["error"]


def test_errors_become_the_clients_own(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError) as unknown:
        client.chat(model="llama3", messages=QUESTION)
    assert (unknown.value.status_code, "not served here" in unknown.value.error) == (404, True)


def test_a_key_is_needed_where_there_is_one(tmp_path: Path) -> None:
    with running(tmp_path, api_key=(KEY,)) as server:
        with pytest.raises(ollama.ResponseError) as refused:
            ollama.Client(host=server.url).list()
        assert refused.value.status_code == 401
        client = ollama.Client(host=server.url, headers={"Authorization": f"Bearer {KEY}"})
        assert client.chat(model="tiny", messages=QUESTION, options={"num_predict": 1}).eval_count == 1


@pytest.mark.parametrize("path", ["/api/pull", "/api/push", "/api/create", "/api/copy", "/api/blobs/sha256:../../a"])
def test_nothing_fetches_or_writes_models(server: Server, path: str) -> None:
    assert server.post(path, {"model": "tiny"}).status_code == 404
