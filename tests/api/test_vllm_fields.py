"""Fields that vLLM adds to OpenAI's: request ids, echo of a chat, tokens named by id, usage in every chunk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.api.server import Server, running
from tests.api.test_sse import events

CONTINUED: Any = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ab"}]


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


# --- request_id -----------------------------------------------------------------------------------------------------


def test_the_bodys_request_id_names_the_answer(client: openai.OpenAI) -> None:
    body = {"request_id": "mine-1"}
    assert client.completions.create(model="tiny", prompt="a", extra_body=body).id == "cmpl-mine-1"
    stream = client.chat.completions.create(
        model="tiny", messages=CONTINUED, max_tokens=2, stream=True, extra_body=body
    )
    assert {chunk.id for chunk in stream} == {"chatcmpl-mine-1"}


def test_the_headers_request_id_goes_first(server: Server) -> None:
    def post(**headers: str) -> httpx.Response:
        return server.post("/v1/completions", {"prompt": "a", "request_id": "mine-2"}, headers=headers)

    both = post(**{"X-Request-Id": "header"})
    assert (both.json()["id"], both.headers["x-request-id"]) == ("cmpl-header", "header")
    assert "x-request-id" not in post().headers, "only a header is answered by a header"


# --- echo of a chat -------------------------------------------------------------------------------------------------


def test_echo_begins_with_the_message_that_goes_on(client: openai.OpenAI) -> None:
    body = {"add_generation_prompt": False, "continue_final_message": True}
    plain, echoed = (
        client.chat.completions.create(
            model="tiny", messages=CONTINUED, max_tokens=3, n=2, extra_body=body | {"echo": echo}
        )
        for echo in (False, True)
    )
    assert plain.choices[0].message.content == "cde"
    assert [choice.message.content for choice in echoed.choices] == ["abcde"] * 2


def test_a_streamed_echo_comes_first(client: openai.OpenAI) -> None:
    body = {"add_generation_prompt": False, "continue_final_message": True, "echo": True}
    chunks = list(
        client.chat.completions.create(model="tiny", messages=CONTINUED, max_tokens=3, stream=True, extra_body=body)
    )
    assert (chunks[0].choices[0].delta.role, chunks[0].choices[0].delta.content) == ("assistant", "ab")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "abcde"


def test_a_message_of_another_role_is_not_echoed(client: openai.OpenAI) -> None:
    plain, echoed = (
        client.chat.completions.create(
            model="tiny", messages=CONTINUED[:1], max_tokens=3, extra_body={"echo": echo}
        ).choices[0].message.content
        for echo in (False, True)
    )  # fmt: skip
    assert plain == echoed


# --- return_tokens_as_token_ids -------------------------------------------------------------------------------------


def test_log_probabilities_name_tokens_by_id(server: Server, client: openai.OpenAI) -> None:
    body = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    (choice,) = client.completions.create(model="tiny", prompt="a", max_tokens=3, logprobs=1, extra_body=body).choices
    names = [f"token_id:{token}" for token in choice.token_ids]  # type: ignore[attr-defined]
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == names
    assert all(name in top for name, top in zip(names, choice.logprobs.top_logprobs or [], strict=True))
    chat = client.chat.completions.create(
        model="tiny", messages=CONTINUED, max_tokens=2, logprobs=True, top_logprobs=1, extra_body=body
    ).choices[0]
    assert chat.logprobs is not None
    for token, entry in zip(chat.token_ids, chat.logprobs.content or [], strict=True):  # type: ignore[attr-defined]
        assert entry.token == f"token_id:{token}"
        assert server.text.tokenizer.token_bytes(token) == bytes(entry.bytes or [])  # type: ignore[union-attr]
        assert entry.top_logprobs[0].token.startswith("token_id:")


def test_so_do_streams(server: Server) -> None:
    fields = {"prompt": "a", "max_tokens": 3, "logprobs": 0, "return_tokens_as_token_ids": True}
    chunks = events(server, "/v1/completions", **fields)
    entries = [c["choices"][0]["logprobs"] for c in chunks]
    names = [name for entry in entries if entry for name in entry["tokens"]]
    assert names == [f"token_id:{t}" for t in server.text.tokenizer.encode("bcd")]  # type: ignore[union-attr]


# --- continuous_usage_stats -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("logprobs", [None, 0])
def test_usage_counts_up_in_every_chunk_of_each_choice(server: Server, logprobs: int | None) -> None:
    usage = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = events(
        server, "/v1/completions", prompt=["a", "abc"], n=2, max_tokens=4, echo=logprobs is None, logprobs=logprobs,
        stream_options=usage,
    )  # fmt: skip
    counts: dict[int, list[int]] = {}
    for chunk in chunks:
        index, shown = chunk["choices"][0]["index"], chunk["usage"]
        assert shown["prompt_tokens"] == (1 if index < 2 else 3)
        assert shown["total_tokens"] == shown["prompt_tokens"] + shown["completion_tokens"]
        counts.setdefault(index, []).append(shown["completion_tokens"])
    for each in counts.values():
        assert each == sorted(each)
        assert (each[0], each[-1]) == (0 if logprobs is None else each[0], 4)
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (4, 16)


# --- vllm_xargs -----------------------------------------------------------------------------------------------------


def test_arguments_of_processors_are_what_messages_between_processes_hold(tmp_path: Path) -> None:
    with running(tmp_path, logits_processors=("tests.sampling.processors:CountUp",)) as server:
        body = {"prompt": "a", "max_tokens": 1}
        for wrong in (2**64, -(2**63) - 1, 10**40, {"deep": [{"in": 2**70}]}):
            answer = server.post("/v1/completions", body | {"vllm_xargs": {"count": wrong}})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "extra_args"), wrong
            assert "an integer beyond 64 bits" in error["message"]
        large = server.post("/v1/completions", body | {"vllm_xargs": {"text": "x" * 2**20}})
        assert "at most 1048576 bytes" in large.json()["error"]["message"]
        assert server.post("/v1/completions", body | {"vllm_xargs": {"count": 2**64 - 1}}).status_code == 200
