"""What is wrong with a request is named, and nothing runs for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.serving.api.pooling import service
from tests.api.pooling.conftest import Served
from tests.api.pooling.pooler import EMBEDDER, pooling, write_bert_tokenizer
from tests.api.server import Server
from tests.api.test_lifetimes import in_background
from tests.api.test_wrong_requests import LEAKS

LONG = "x " * 1_000
CHAT = [{"role": "user", "content": "hi"}]
PAIR = {"text_1": "a", "text_2": "b"}
WRONG: list[tuple[str, dict[str, Any], str | None, str]] = [
    ("/v1/embeddings", {}, "input", "either input or messages"),
    ("/v1/embeddings", {"input": "a", "messages": CHAT}, "input", "either input or messages"),
    ("/v1/embeddings", {"input": ""}, "input", "is empty"),
    ("/v1/embeddings", {"input": ["a", ""]}, "input[1]", "is empty"),
    ("/v1/embeddings", {"input": []}, "input", "empty list"),
    ("/v1/embeddings", {"input": [[]]}, "input[0]", "is empty"),
    ("/v1/embeddings", {"input": [[1], []]}, "input[1]", "is empty"),
    ("/v1/embeddings", {"input": [1, "a"]}, "input", "must be a text"),
    ("/v1/embeddings", {"input": [{"role": "user"}]}, "input", "must be a text"),
    ("/v1/embeddings", {"input": ["a"] * 2049}, "input", "may have 2048"),
    ("/v1/embeddings", {"input": [5, 320]}, "input", "outside the vocabulary of 320"),
    ("/v1/embeddings", {"input": [-1]}, "input", "outside the vocabulary of 320"),
    ("/v1/embeddings", {"messages": []}, "messages", "must not be empty"),
    ("/v1/embeddings", {"messages": [CHAT, []]}, "messages", "must not be empty"),
    ("/v1/embeddings", {"messages": CHAT, "prompt_name": "query"}, "prompt_name", "goes with input"),
    ("/v1/embeddings", {"messages": CHAT, "chat_template": "{{ 1 }}"}, "chat_template", "--trust-request"),
    ("/v1/embeddings", {"input": LONG}, "input", "maximum context length is 512 tokens"),
    ("/v1/embeddings", {"input": ["a", LONG]}, "input[1]", "The prompt has 2000 tokens"),
    ("/v1/embeddings", {"input": ["a", "x" * 100_000]}, "input[1]", "The prompt has at least"),
    ("/v1/embeddings", {"input": [5] * 513}, "input", "has 513 tokens; the maximum context length is 512"),
    ("/v1/embeddings", {"messages": [{"role": "user", "content": LONG}]}, "messages", "is 512 tokens"),
    ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions", "between 1"),
    ("/v1/embeddings", {"input": "a", "dimensions": 17}, "dimensions", "at most 16"),
    ("/v1/embeddings", {"input": "a", "dimensions": "8"}, "dimensions", "integer"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format", "'float', 'base64'"),
    ("/v1/embeddings", {"input": "a", "embed_dtype": "float16"}, "embed_dtype", "needs encoding_format base64"),
    ("/v1/embeddings", {"input": "a", "endianness": "big"}, "endianness", "needs encoding_format base64"),
    ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "between 1 and 512"),
    ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 513}, "truncate_prompt_tokens", "between 1 and 512"),
    ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "between 1 and 512"),
    ("/v1/embeddings", {"input": "a", "truncation_side": "middle"}, "truncation_side", "'left' or 'right'"),
    ("/v1/embeddings", {"input": "a", "prompt_name": "nonsense"}, "prompt_name", "it has passage, query"),
    ("/v1/embeddings", {"input": [1], "prompt_name": "query"}, "prompt_name", "not with token ids"),
    ("/v1/embeddings", {"input": "a", "stream": True}, "stream", "not supported"),
    ("/v1/embeddings", {"input": "a", "padding": "max_length"}, "padding", "not supported"),
    ("/v1/embeddings", {"input": "a", "temperature": 0.5}, "temperature", "not a known field"),
    ("/v1/embeddings", {"input": "a", "dimension": 8}, "dimension", "'dimensions'"),
    ("/v1/embeddings", {"input": "a", "normalize": True, "use_activation": False}, "normalize", "older name"),
    ("/v1/embeddings", {"input": "a", "cache_salt": ""}, "cache_salt", "1 to 1024"),
    ("/v1/embeddings", {"input": "a", "timeout": -1.0}, "timeout", "above 0"),
    ("/v1/embeddings", {"input": "a", "request_id": "no spaces"}, "request_id", "letters"),
    ("/pooling", {"input": "a", "task": "classify"}, "task", "it does embed"),
    ("/pooling", {"input": "a", "task": "plugin"}, "task", "'embed'"),
    ("/pooling", {"data": {"image": "x"}}, "data", "not supported"),
    ("/classify", {"input": "a"}, "model", "does not classify texts"),
    ("/score", {"text_1": "a"}, "text_2", "Send one of"),
    ("/score", {**PAIR, "queries": "a"}, "queries", "Send one of"),
    ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1", "send one text, or as many"),
    ("/score", {"text_1": [], "text_2": "a"}, "text_1", "must not be empty"),
    ("/score", {"text_1": "a", "text_2": ["a", ""]}, "text_2[1]", "is empty"),
    ("/score", {"text_1": 5, "text_2": "a"}, "text_1", "must be"),
    ("/score", {**PAIR, "max_tokens_per_doc": 512}, "max_tokens_per_doc", "between 0 and 511"),
    ("/score", {**PAIR, "max_tokens_per_query": -1}, "max_tokens_per_query", "between 0 and 511"),
    ("/rerank", {"documents": ["a"]}, "query", "is required"),
    ("/rerank", {"query": "a"}, "documents", "is required"),
    ("/rerank", {"query": "", "documents": ["a"]}, "query", "is empty"),
    ("/rerank", {"query": "a", "documents": []}, "documents", "must not be empty"),
    ("/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n", "at least 0"),
    ("/rerank", {"query": "a", "documents": [{}]}, "documents[0]", "either text or content"),
    ("/rerank", {"query": "a", "documents": ["b", LONG]}, "documents[1]", "is 512 tokens"),
    ("/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["title"]}, "rank_fields", "not supported"),
    (
        "/rerank",
        {"query": "a", "documents": [{"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "documents[0]",
        "image_url input is not served",
    ),
]


def refusal(server: Server, path: str, fields: dict[str, Any], status: int = 400) -> dict[str, Any]:
    answer = server.post(path, fields)
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert not LEAKS.search(error["message"])
    return error


@pytest.mark.parametrize(("path", "fields", "param", "words"), WRONG)
def test_gets_its_message(embedder: Served, path: str, fields: dict[str, Any], param: str | None, words: str) -> None:
    server, engine = embedder
    before = len(engine.adds)
    error = refusal(server, path, fields)
    assert words in error["message"], error
    assert error["param"] == param
    assert len(engine.adds) == before, "nothing runs for a wrong request"
    assert server.session.num_sequences == 0


def test_another_model_is_not_found(embedder: Served) -> None:
    for path in ("/v1/embeddings", "/pooling"):
        assert "not served here" in refusal(embedder[0], path, {"input": "a", "model": "other"}, 404)["message"]


def test_a_model_that_only_generates_says_so(server: Server) -> None:
    for path, fields in (
        ("/v1/embeddings", {"input": "a"}),
        ("/pooling", {"input": "a"}),
        ("/classify", {"input": "a"}),
        ("/score", PAIR),
        ("/rerank", {"query": "a", "documents": ["b"]}),
        ("/v2/embed", {"texts": ["a"]}),
    ):
        assert "generates text, and makes no vectors" in refusal(server, path, fields)["message"], path
    answer = server.post("/api/embed", {"model": "tiny", "input": "a"})
    assert (answer.status_code, "generates text" in answer.json()["error"]) == (400, True)


def test_a_model_that_does_not_generate_says_so(embedder: Served) -> None:
    for path, fields in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/responses", {"input": "a"}),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {}}),
        ("/v1/decisions", {"input": "a", "questions": [{"type": "predicate", "name": "b", "instructions": "c"}]}),
    ):
        message = refusal(embedder[0], path, fields)["message"]
        assert "generates none" in message, path
        assert "/v1/embeddings" in message
    answer = embedder[0].post("/v1/messages", {"messages": CHAT, "max_tokens": 5, "model": "tiny"})
    assert "generates none" in answer.json()["error"]["message"]
    assert "generates none" in embedder[0].post("/api/chat", {"model": "tiny", "messages": CHAT}).json()["error"]


def test_a_model_without_a_chat_template_says_that_it_does_not_generate(tmp_path: Path) -> None:
    write_bert_tokenizer(tmp_path)
    with pooling(tmp_path, EMBEDDER) as (server, _):
        message = refusal(server, "/v1/chat/completions", {"messages": CHAT})["message"]
        assert "generates none" in message
        assert "/v1/embeddings" in message


def test_without_a_tokenizer_token_ids_are_embedded(tmp_path: Path) -> None:
    with pooling(tmp_path, EMBEDDER, skip_tokenizer_init=True) as (server, _):
        assert server.post("/v1/embeddings", {"input": [5, 6]}).status_code == 200
        assert "--skip-tokenizer-init" in refusal(server, "/v1/embeddings", {"input": "a"})["message"]
        assert "--skip-tokenizer-init" in refusal(server, "/score", PAIR)["message"]


def test_an_answer_that_would_be_too_large_is_refused(embedder: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_VALUES", 16 * 100)
    fields = {"input": [[5] * 60, [6] * 41], "task": "token_embed"}
    assert "101 × 16 values" in refusal(embedder[0], "/pooling", fields)["message"]
    assert embedder[0].post("/pooling", {"input": [[5] * 60, [6] * 40], "task": "token_embed"}).status_code == 200


def test_too_many_waiting_requests_are_a_429(tmp_path: Path) -> None:
    with pooling(tmp_path, EMBEDDER, max_num_seqs=1, max_queued_requests=2) as (server, engine):
        engine.held = True
        asking, answers = in_background(lambda: server.post("/v1/embeddings", {"input": ["a"] * 4}))
        for add in list(engine.wait_for_adds(4)):
            refused = server.post("/rerank", {"query": "a", "documents": ["b"]})
            assert (refused.status_code, int(refused.headers["retry-after"]) > 0) == (429, True)
            engine.finish(add)
        asking.join(60)
        assert answers[0].status_code == 200


def test_texts_behind_a_limit_of_the_pooler_are_refused(tmp_path: Path) -> None:
    info = msgspec.structs.replace(EMBEDDER, max_embed_len=8)
    with pooling(tmp_path, info) as (server, _):
        assert "is 8 tokens" in refusal(server, "/v1/embeddings", {"input": [5] * 9})["message"]
        assert server.post("/v1/embeddings", {"input": [5] * 9, "truncate_prompt_tokens": -1}).status_code == 200
