"""The official clients of OpenAI, Anthropic and Ollama, unmodified, asking Quill."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import jsonschema
import ollama
import openai
import pytest
from pydantic import BaseModel

from tests.clients.conftest import Quill, leave_refused_threads

pytestmark = pytest.mark.long("api")
SUM: Any = [{"role": "user", "content": "What is 12 + 30?"}]
WEATHER: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "The city"}},
    "required": ["city"],
}
FUNCTION = {"name": "get_weather", "description": "Get the current weather in a city", "parameters": PARAMETERS}
TOOL: Any = {"type": "function", "function": FUNCTION}
RESULT = '{"temperature": -5, "condition": "snowy"}'


class Person(BaseModel):
    """Somebody."""

    name: str
    city: str


# --- openai ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def openai_client(quill: Quill) -> openai.OpenAI:
    return openai.OpenAI(base_url=quill.url + "/v1", api_key=quill.key, max_retries=0)


def test_openai_chat_whole_and_streamed(quill: Quill, openai_client: openai.OpenAI) -> None:
    whole = openai_client.chat.completions.create(model="quill", messages=SUM, temperature=0)
    assert "42" in (whole.choices[0].message.content or "")
    with openai_client.chat.completions.stream(
        model="quill", messages=SUM, temperature=0, stream_options={"include_usage": True}
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.completion_tokens == whole.usage.completion_tokens
    several = list(openai_client.chat.completions.create(model="quill", messages=SUM, n=3, stream=True))
    assert {choice.index for chunk in several for choice in chunk.choices} == {0, 1, 2}


def test_openai_completions_and_models(quill: Quill, openai_client: openai.OpenAI) -> None:
    assert [model.id for model in openai_client.models.list()] == ["quill"]
    whole = openai_client.completions.create(
        model="quill", prompt="The sun is", max_tokens=5, logprobs=1, temperature=0
    )
    parts = openai_client.completions.create(
        model="quill", prompt="The sun is", max_tokens=5, stream=True, temperature=0
    )
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert whole.choices[0].logprobs is not None
    assert len(whole.choices[0].logprobs.tokens or []) == 5


def test_openai_tools(quill: Quill, openai_client: openai.OpenAI) -> None:
    messages = list(WEATHER)
    first = openai_client.chat.completions.create(model="quill", messages=messages, tools=[TOOL], temperature=0)
    assert first.choices[0].finish_reason == "tool_calls"
    (call,) = first.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Oslo"})
    messages += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    with openai_client.chat.completions.stream(model="quill", messages=messages, tools=[TOOL], temperature=0) as stream:
        answer = stream.get_final_completion().choices[0].message
    assert "snowy" in (answer.content or "")
    with openai_client.chat.completions.stream(model="quill", messages=WEATHER, tools=[TOOL], temperature=0) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == "tool_calls"
    (again,) = streamed.message.tool_calls or []
    assert again.function.arguments == call.function.arguments


def test_openai_tool_calls_that_are_enforced(quill: Quill, openai_client: openai.OpenAI) -> None:
    stars, why = {"enum": [1, 2, 3]}, {"type": "string", "maxLength": 20}
    rating: dict[str, Any] = {
        "type": "object",
        "properties": {"stars": stars, "why": why},
        "required": ["stars", "why"],
    }
    rating["additionalProperties"] = False
    tools: Any = [TOOL, {"type": "function", "function": {"name": "rate", "parameters": rating, "strict": True}}]
    schemas = {"get_weather": PARAMETERS, "rate": rating}
    named: Any = {"type": "function", "function": {"name": "rate"}}
    choices: list[Any] = ["required", named]
    for choice in choices:
        whole = openai_client.chat.completions.create(
            model="quill", messages=SUM, tools=tools, tool_choice=choice, seed=1, parallel_tool_calls=False
        ).choices[0]
        assert whole.finish_reason == ("tool_calls" if choice == "required" else "stop")
        (call,) = whole.message.tool_calls or []
        assert call.type == "function"
        assert choice == "required" or call.function.name == "rate"
        jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])
    with openai_client.chat.completions.stream(
        model="quill", messages=SUM, tools=tools, tool_choice=named, seed=1
    ) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == "stop"
    (again,) = streamed.message.tool_calls or []
    jsonschema.validate(json.loads(again.function.arguments), rating)
    strict: Any = {"type": "function", "function": {**FUNCTION, "strict": True}}
    free = openai_client.chat.completions.create(model="quill", messages=WEATHER, tools=[strict], temperature=0)
    (chosen,) = free.choices[0].message.tool_calls or []
    assert chosen.type == "function"
    assert json.loads(chosen.function.arguments) == {"city": "Oslo"}


def test_openai_tools_and_a_form_in_one_request(quill: Quill, openai_client: openai.OpenAI) -> None:
    """As agents send them: the answer is a call, or what the last turn is to look like."""
    for strict in (False, True):
        parameters = {**PARAMETERS, "additionalProperties": False}
        tools: Any = [{"type": "function", "function": {**FUNCTION, "parameters": parameters, "strict": strict}}]
        question: Any = [{"role": "user", "content": "Extract name and city as JSON: Anna lives in Oslo."}]
        asked: Any = {"model": "quill", "response_format": Person, "tools": tools}
        calling = openai_client.chat.completions.stream(**asked, messages=WEATHER, temperature=0)
        with calling as stream:
            choice = stream.get_final_completion().choices[0]
        (call,) = choice.message.tool_calls or []
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        assert json.loads(call.function.arguments) == {"city": "Oslo"}
        for seed in range(3):
            with openai_client.chat.completions.stream(**asked, messages=question, seed=seed) as stream:
                choice = stream.get_final_completion().choices[0]
            assert choice.message.parsed or choice.message.tool_calls


def test_openai_parse_gives_a_pydantic_model(quill: Quill, openai_client: openai.OpenAI) -> None:
    question: Any = [{"role": "user", "content": "Extract name and city as JSON: Anna lives in Oslo."}]
    parsed = openai_client.chat.completions.parse(
        model="quill", messages=question, response_format=Person, temperature=0
    )
    assert parsed.choices[0].message.parsed == Person(name="Anna", city="Oslo")
    with openai_client.chat.completions.stream(
        model="quill", messages=question, response_format=Person, temperature=0
    ) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == Person(name="Anna", city="Oslo")


def test_openai_responses(quill: Quill, openai_client: openai.OpenAI) -> None:
    whole = openai_client.responses.create(model="quill", input="What is 12 + 30?", temperature=0)
    assert "42" in whole.output_text
    with openai_client.responses.stream(model="quill", input="What is 12 + 30?", temperature=0) as stream:
        assert stream.get_final_response().output_text == whole.output_text
    called = openai_client.responses.create(
        model="quill", input="What is the weather in Oslo?", tools=[{"type": "function", **FUNCTION}], temperature=0
    )  # type: ignore[call-overload]
    (call,) = [item for item in called.output if item.type == "function_call"]
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": RESULT}]
    answered = openai_client.responses.create(
        model="quill",
        input=result,
        previous_response_id=called.id,
        tools=[{"type": "function", **FUNCTION}],
        temperature=0,
    )  # type: ignore[call-overload]
    assert "snowy" in answered.output_text


def test_openai_responses_parse_gives_a_pydantic_model(quill: Quill, openai_client: openai.OpenAI) -> None:
    question = "Extract name and city as JSON: Anna lives in Oslo."
    whole = openai_client.responses.parse(model="quill", input=question, text_format=Person, temperature=0)
    assert whole.output_parsed == Person(name="Anna", city="Oslo")
    with openai_client.responses.stream(
        model="quill", input=question, text_format=Person, temperature=0
    ) as stream:  # fmt: skip
        assert stream.get_final_response().output_parsed == whole.output_parsed


def test_openai_async(quill: Quill) -> None:
    async def ask(client: openai.AsyncOpenAI, a: int) -> str:
        stream = await client.chat.completions.create(
            model="quill", messages=[{"role": "user", "content": f"What is {a} + 30?"}], temperature=0, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=quill.url + "/v1", api_key=quill.key, max_retries=0) as client:
            return await asyncio.gather(*(ask(client, a) for a in range(10, 18)))

    for a, answer in enumerate(asyncio.run(all_of_them()), 10):
        assert str(a + 30) in answer


# --- anthropic -------------------------------------------------------------------------------------------------------


def test_anthropic_messages_tools_and_streams(quill: Quill) -> None:
    client = anthropic.Anthropic(base_url=quill.url, api_key=quill.key, max_retries=0)
    tool: Any = {"name": "get_weather", "description": FUNCTION["description"], "input_schema": PARAMETERS}
    whole = client.messages.create(model="quill", max_tokens=100, messages=SUM)
    assert whole.content[0].type == "text"
    assert "42" in whole.content[0].text
    first = client.messages.create(model="quill", max_tokens=100, messages=WEATHER, tools=[tool])
    assert first.stop_reason == "tool_use"
    call = first.content[-1]
    assert call.type == "tool_use"
    assert call.input == {"city": "Oslo"}
    result: Any = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": RESULT}]}
    conversation: Any = [*WEATHER, first.to_param(), result]
    with client.messages.stream(model="quill", max_tokens=100, messages=conversation, tools=[tool]) as stream:
        text = "".join(stream.text_stream)
    assert "snowy" in text
    with client.messages.stream(model="quill", max_tokens=100, messages=WEATHER, tools=[tool]) as stream:
        streamed = stream.get_final_message()
    assert streamed.content[-1].input == {"city": "Oslo"}  # type: ignore[union-attr]
    count = client.messages.count_tokens(model="quill", messages=WEATHER, tools=[tool]).input_tokens
    assert count == first.usage.input_tokens + (first.usage.cache_read_input_tokens or 0)


def test_anthropic_async(quill: Quill) -> None:
    async def ask() -> str:
        async with (
            anthropic.AsyncAnthropic(base_url=quill.url, auth_token=quill.key, max_retries=0) as client,
            client.messages.stream(model="quill", max_tokens=100, messages=SUM) as stream,
        ):
            return "".join([text async for text in stream.text_stream])

    assert "42" in asyncio.run(ask())


def test_anthropics_tool_runner(quill: Quill) -> None:
    cities = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Get the current weather in a city

        Args:
            city: The city
        """
        cities.append(city)
        return RESULT

    client = anthropic.Anthropic(base_url=quill.url, api_key=quill.key, max_retries=0)
    asked: Any = {"model": "quill", "max_tokens": 200, "messages": WEATHER, "tools": [get_weather]}
    last = client.beta.messages.tool_runner(**asked).until_done()
    assert "snowy" in last.content[0].text  # type: ignore[union-attr]
    *_, stream = client.beta.messages.tool_runner(**asked, stream=True)
    assert "snowy" in stream.get_final_text()
    assert cities == ["Oslo", "Oslo"]
    leave_refused_threads(quill)


# --- ollama ----------------------------------------------------------------------------------------------------------


def test_ollama_chat_tools_format_and_models(quill: Quill) -> None:
    client = ollama.Client(host=quill.url, headers={"Authorization": f"Bearer {quill.key}"})
    cold = {"temperature": 0.0}
    whole = client.chat("quill", SUM, options=cold)
    assert "42" in (whole.message.content or "")
    streamed = client.chat("quill", SUM, options=cold, stream=True)
    assert "".join(part.message.content or "" for part in streamed) == whole.message.content
    (call,) = client.chat("quill", WEATHER, tools=[TOOL], options=cold).message.tool_calls or []
    assert (call.function.name, dict(call.function.arguments)) == ("get_weather", {"city": "Oslo"})
    question = "Extract name and city as JSON: Anna lives in Oslo."
    formed = client.generate("quill", question, format=Person.model_json_schema(), options=cold)
    assert Person.model_validate_json(formed.response) == Person(name="Anna", city="Oslo")
    assert [model.model for model in client.list().models] == ["quill"]
    assert "tools" in (client.show("quill").capabilities or [])
    assert client.ps().models[0].context_length == 2048


# --- vllm bench serve ------------------------------------------------------------------------------------------------


def test_vllm_bench_serves_requests(quill: Quill) -> None:
    """The bodies and headers of vllm/benchmarks/lib/endpoint_request_func.py, vLLM 0.22.1, and how it reads the
    stream: `usage` in the last chunk, a text or a delta in all others."""
    headers = {"Authorization": f"Bearer {quill.key}", "x-request-id": "bench-0"}
    completion = {
        "model": "quill", "prompt": "The sun is", "repetition_penalty": 1.0, "max_tokens": 6, "logprobs": None,
        "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, "temperature": 0.0,
    }  # fmt: skip
    chat = {
        "model": "quill", "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        "max_completion_tokens": 6, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip
    for path, body in (("/v1/completions", completion), ("/v1/chat/completions", chat)):
        with openai.DefaultHttpxClient() as http:
            answer = http.post(quill.url + path, json=body, headers=headers)
        assert answer.status_code == 200
        assert answer.headers["x-request-id"] == "bench-0"
        *_, usage, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert done == "[DONE]"
        assert json.loads(usage)["usage"]["completion_tokens"] == 6
