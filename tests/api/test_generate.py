"""POST /inference/v1/generate: token ids in, token ids out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.api.server import Server, running
from tests.api.test_sse import events

PATH = "/inference/v1/generate"


def generate(server: Server, *, status: int = 200, **fields: Any) -> dict[str, Any]:
    answer = server.post(PATH, {"token_ids": [67, 68], "sampling_params": {"max_tokens": 3}} | fields)
    assert answer.status_code == status, answer.text
    return dict(answer.json())


def test_token_ids_go_on(server: Server) -> None:
    body = generate(server, sampling_params={"max_tokens": 3, "n": 2}, request_id="mine", model="alias")
    assert body["request_id"] == "generate-tokens-mine"
    assert [choice["token_ids"] for choice in body["choices"]] == [[69, 70, 71]] * 2
    assert [(choice["index"], choice["finish_reason"]) for choice in body["choices"]] == [(0, "length"), (1, "length")]
    assert body["usage"]["completion_tokens"] == 6
    assert "text" not in body["choices"][0]


def test_so_does_a_stream(server: Server) -> None:
    *chunks, last = events(
        server, PATH, token_ids=[67, 68], sampling_params={"max_tokens": 3}, stream_options={"include_usage": True}
    )
    assert {chunk["request_id"] for chunk in chunks} == {last["request_id"]}
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == [69, 70, 71]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"
    assert last["usage"]["completion_tokens"] == 3


def test_log_probabilities_name_tokens_by_id(server: Server) -> None:
    body = generate(server, sampling_params={"max_tokens": 2, "logprobs": 1, "prompt_logprobs": 1})
    entries = body["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["token_id:69", "token_id:70"]
    assert all(len(entry["top_logprobs"]) == 1 for entry in entries)
    assert body["prompt_logprobs"][0] is None
    assert next(iter(body["prompt_logprobs"][1])) == "68"


def test_sampling_params_are_vllms(server: Server) -> None:
    sampling = {"max_tokens": 9, "stop_token_ids": [70], "logit_bias": {"5": -1}, "output_kind": 2, "seed": None}
    (choice,) = generate(server, sampling_params=sampling)["choices"]
    assert (choice["token_ids"], choice["finish_reason"], choice["stop_reason"]) == ([69, 70], "stop", 70)


def test_without_max_tokens_the_context_is_filled(server: Server) -> None:
    assert generate(server, sampling_params={"ignore_eos": True})["usage"]["total_tokens"] == 512


def test_no_tokenizer_is_needed(tmp_path: Path) -> None:
    with running(tmp_path, skip_tokenizer_init=True) as server:
        assert generate(server)["choices"][0]["token_ids"] == [69, 70, 71]
        refused = generate(server, sampling_params={"bad_words": ["x"]}, status=400)
        assert refused["error"]["param"] == "sampling_params.bad_words"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"sampling_params": {"warmth": 1}}, "sampling_params.warmth",
         "'sampling_params.warmth' is not a known field."),
        ({"sampling_params": {"n": "2"}}, "sampling_params.n", "sampling_params.n: Expected int, got str."),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature", "sampling_params.temperature must …"),
        ({"sampling_params": {"max_tokens": 10**6}}, "sampling_params.max_tokens", "The prompt has 2 tokens …"),
        ({"sampling_params": {"stop": "x"}}, "sampling_params.stop", "sampling_params.stop strings need …"),
        ({"sampling_params": {"logit_bias": {"x": 1}}}, "sampling_params.logit_bias", "sampling_params.logit_bias: …"),
        ({"sampling_params": {"repetition_detection": {"max_pattern_size": 0}}},
         "sampling_params.repetition_detection.max_pattern_size", "sampling_params.repetition_detection.max_…"),
        ({"sampling_params": []}, "sampling_params", "sampling_params must be an object."),
        ({"sampling_params": None}, "sampling_params", "sampling_params must be an object."),
        ({"token_ids": []}, "token_ids", "The prompt is empty: send at least one token."),
        ({"token_ids": [10**9]}, "token_ids", "Token id 1000000000 is outside the vocabulary of …"),
        ({"token_ids": "a"}, "token_ids", "token_ids must be a valid list."),
        ({"stream": True, "sampling_params": {"prompt_logprobs": 1}}, "sampling_params.prompt_logprobs",
         "sampling_params.prompt_logprobs cannot be streamed: leave stream out."),
        ({"features": {"mm_hashes": {}}}, "features", "'features' is not supported yet: leave it out."),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params", "'kv_transfer_params' is not supported yet: …"),
        ({"priority": 1}, "priority", "priority needs a server with --scheduling-policy priority; …"),
        ({"stream_options": {}}, "stream_options", "stream_options needs stream=true."),
        ({"temperature": 1}, "temperature", "'temperature' is not a known field."),
        ({"model": "other"}, "model", "The model 'other' is not served here. …"),
    ],
)  # fmt: skip
def test_wrong_requests_name_their_field(server: Server, fields: dict[str, Any], param: str, message: str) -> None:
    error = generate(server, status=404 if param == "model" else 400, **fields)["error"]
    assert error["param"] == param, error
    assert error["message"].startswith(message.removesuffix("…")), error
    assert message.endswith("…") or error["message"] == message


def test_the_body_is_documented(server: Server) -> None:
    document = server.get("/openapi.json").json()
    body = document["paths"][PATH]["post"]["requestBody"]["content"]["application/json"]["schema"]
    content = document["components"]["schemas"][body["$ref"].rpartition("/")[2]]
    assert {"token_ids", "sampling_params", "stream", "cache_salt", "priority", "request_id"} <= set(
        content["properties"]
    )
    assert content["required"] == ["token_ids", "sampling_params"]


def test_nothing_is_held_afterwards(server: Server) -> None:
    server.assert_all_free()
