"""`quire bench serve` with backends that generate nothing: what they send, and which figures there are."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.bench.scripted_server import HEAD, Body, ScriptedServer
from tests.bench.test_serve import bench, result

USAGE = {"prompt_tokens": 7, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 2}}


async def vectors(body: Body, writer: asyncio.StreamWriter) -> None:
    """An answer without vectors: nobody looks at them."""
    text = json.dumps({"data": [], "usage": USAGE})
    writer.write(HEAD.format(status=200, kind="application/json").encode() + text.encode())


@pytest.mark.parametrize(
    ("backend", "texts"),
    [("openai-embeddings", 3), ("embeddings", 3), ("vllm-pooling", 3), ("vllm-rerank", 4), ("rerank", 4)],
)
def test_texts_are_sent_together(tmp_path: Path, backend: str, texts: int) -> None:
    endpoint = ["--endpoint", "/v1/pooling"] if backend == "vllm-pooling" else []
    with ScriptedServer(vectors) as server:
        found = result(
            tmp_path, server, "--backend", backend, "--num-prompts", "5", "--random-batch-size", "3", *endpoint
        )
    assert (found["completed"], found["total_input_tokens"], found["total_output_tokens"]) == (5, 35, 0)
    assert found["mean_e2el_ms"] > 0
    assert found["prefix_cache_hit_rate"] == pytest.approx(2 / 7)
    assert len(server.bodies) == 5
    sent: list[Any] = []
    for body in server.bodies:
        assert body["model"] == "tiny"
        assert not {"stream", "temperature", "max_tokens"} & body.keys()
        if "query" in body:
            assert set(body) == {"model", "query", "documents"}
            assert all(isinstance(text, str) for text in [body["query"], *body["documents"]])
            sent += [body["query"], *body["documents"]]
        else:
            assert set(body) == {"model", "input"}
            assert [len(ids) for ids in body["input"]] == [6] * 3
            sent += body["input"]
    assert len({str(text) for text in sent}) == 5 * texts, "each text is new"


def test_conversations_are_embedded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer(vectors) as server:
        extra = json.dumps({"dimensions": 8})
        assert bench(server, "--backend", "openai-embeddings-chat", "--num-prompts", "2", "--extra-body", extra) == 0
    for body in server.bodies:
        ((message,), dimensions) = body["messages"], body["dimensions"]
        assert (message["role"], dimensions) == ("user", 8)
    out, err = capsys.readouterr()
    assert "E2EL" in out
    assert "TTFT" not in out
    assert "no text" not in err


@pytest.mark.parametrize(
    ("backend", "size", "words"),
    [("openai", "2", "is not for --backend openai"), ("embeddings", "0", "must be at least 1")],
)
def test_wrong_batches_are_refused(backend: str, size: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer(vectors) as server:
        assert bench(server, "--backend", backend, "--random-batch-size", size, "--num-prompts", "2") == 2
    assert words in capsys.readouterr().err


def test_a_refused_request_has_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def refuse(body: Body, writer: asyncio.StreamWriter) -> None:
        error = json.dumps({"error": {"message": "This model does not embed texts."}})
        writer.write(HEAD.format(status=400, kind="application/json").encode() + error.encode())

    with ScriptedServer(refuse) as server:
        found = result(tmp_path, server, "--backend", "embeddings", "--num-prompts", "2")
    assert found["failed"] == 2
    assert "does not embed texts" in capsys.readouterr().err
