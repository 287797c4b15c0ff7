"""Clients of embeddings and reranking, unmodified, over the HTTP API: each gets the vectors that the engine made.

The `openai` and `ollama` packages are tried in `tests/api/pooling`.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from quire.pooling_params import PoolingParams
from tests.api.pooling.pooler import EMBEDDER, Floats, pooled
from tests.api.server import KEY, Server, running
from tests.clients.environment import run_script

pytestmark = pytest.mark.long("api")
TEXTS = ["What is the capital of France?", "Paris is a town.", "naïve café 你好", "It rains."]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server on the real engine, whose model makes vectors by a rule. It needs no key: LiteLLM sends Ollama none."""
    with running(tmp_path_factory.mktemp("embedder"), pooling=EMBEDDER) as server:
        yield server


def vectors(server: Server, prompt: str = "", **params: Any) -> Floats:
    assert server.text.tokenizer is not None
    asked = PoolingParams(task="embed", **params)
    return np.stack([pooled(server.text.tokenizer.encode(prompt + text), asked, EMBEDDER) for text in TEXTS])


def ranks(server: Server) -> list[list[float]]:
    """The two best documents and their scores, where the query is the first of them."""
    rows = vectors(server).astype(np.float64)
    scores = rows @ rows[0] / np.linalg.norm(rows, axis=1) / np.linalg.norm(rows[0])
    return [[int(place), float(scores[place])] for place in np.argsort(-scores)[:2]]


def check_ranks(found: list[list[float]], server: Server) -> None:
    for (place, score), (expected_place, expected) in zip(found, ranks(server), strict=True):
        assert (place, score) == (expected_place, pytest.approx(expected, abs=1e-6))


def test_langchain(embedder: Server) -> None:
    seen = run_script("langchain_embeddings", embedder.url, KEY, *TEXTS)
    assert seen["documents"] == vectors(embedder).tolist()
    assert seen["query"] == vectors(embedder)[0].tolist()
    assert seen["shortened"] == vectors(embedder, dimensions=8).tolist()


def test_llama_index(embedder: Server) -> None:
    seen = run_script("llama_index_embeddings", embedder.url, KEY, *TEXTS)
    assert seen["batch"] == vectors(embedder).tolist()
    assert seen["query"] == vectors(embedder)[0].tolist()


def test_litellm(embedder: Server) -> None:
    seen = run_script("litellm_embeddings", embedder.url, KEY, *TEXTS)
    for provider in ("openai", "hosted_vllm", "ollama"):
        assert seen[provider] == vectors(embedder).tolist(), provider
    for provider in ("hosted_vllm", "jina_ai"):
        check_ranks(seen[f"{provider} rerank"], embedder)


def test_cohere(embedder: Server) -> None:
    seen = run_script("cohere_client", embedder.url, KEY, *TEXTS)
    rows, found = vectors(embedder, "query: "), seen["vectors"]
    assert found["float"] == rows.tolist()
    assert [np.frombuffer(base64.b64decode(text), "<f4").tolist() for text in found["base64"]] == rows.tolist()
    assert np.abs(np.array(found["int8"])).max() == 127
    assert np.array_equal(np.array(found["uint8"]), np.array(found["int8"]) + 128)
    assert np.array_equal(np.unpackbits(np.array(found["ubinary"], np.uint8), axis=1), rows >= 0)
    assert np.array_equal(np.array(found["binary"]) + 128, found["ubinary"])
    assert seen["texts"] == TEXTS
    assert seen["tokens"] > len(TEXTS)
    check_ranks(seen["ranks"], embedder)
