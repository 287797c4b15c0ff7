"""The unmodified official client, sync and async, streaming and not."""

from __future__ import annotations

import asyncio

import openai
import pytest

from tests.api.server import Server

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="a", max_tokens=4, temperature=0)
    assert answer.choices[0].text == "bcde"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (1, 4, 5)
    assert answer.model == "tiny"


def test_completion_streamed(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model="alias", prompt="a", max_tokens=4, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "bcde"
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert {chunk.model for chunk in chunks} == {"alias"}


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=3)  # type: ignore[arg-type]
    assert answer.choices[0].message.role == "assistant"
    assert len(answer.choices[0].message.content or "") == 3
    again = [*MESSAGES, answer.choices[0].message, {"role": "user", "content": "more"}]
    assert client.chat.completions.create(model="tiny", messages=again, max_tokens=1).choices  # type: ignore[arg-type]


def test_chat_streamed_with_usage_and_logprobs(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=5, stream=True, stream_options={"include_usage": True},
        logprobs=True, top_logprobs=2, seed=1,
    )  # type: ignore[arg-type]  # fmt: skip
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    entries = [entry for c in chunks if c.choices[0].logprobs for entry in c.choices[0].logprobs.content or []]
    assert "".join(entry.token for entry in entries) == "".join(c.choices[0].delta.content or "" for c in chunks)
    assert [bytes(entry.bytes or []).decode() for entry in entries] == [entry.token for entry in entries]
    assert {len(entry.top_logprobs) for entry in entries} == {2}
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 5 == len(entries)


def test_without_a_length_the_answer_fills_the_context(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES)  # type: ignore[arg-type]
    assert answer.usage is not None
    assert answer.usage.total_tokens == 512
    assert answer.choices[0].finish_reason == "length"


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "alias"]
    assert client.models.retrieve("alias").id == "alias"
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.models.retrieve("nothing")


def test_errors_become_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature must be at least 0") as wrong:
        client.completions.create(model="tiny", prompt="a", temperature=-1)
    assert wrong.value.param == "temperature"
    assert wrong.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="gpt-4", prompt="a")
    assert unknown.value.code == "model_not_found"


def test_many_at_once(server: Server) -> None:
    async def one(client: openai.AsyncOpenAI, letter: str) -> str:
        stream = await client.completions.create(model="tiny", prompt=letter, max_tokens=20, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, chr(ord("A") + i % 26)) for i in range(40)))

    for i, text in enumerate(asyncio.run(all_of_them())):
        assert text == "".join(chr(ord("A") + i % 26 + 1 + k) for k in range(20))
    server.assert_all_free()
