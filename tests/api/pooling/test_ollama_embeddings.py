"""Ollama's /api/embed and /api/embeddings, by the `ollama` client."""

from __future__ import annotations

from typing import Any

import numpy as np
import ollama
import pytest

from quire.pooling_params import PoolingParams
from tests.api.pooling.conftest import Served
from tests.api.pooling.pooler import EMBEDDER, Floats, pooled
from tests.api.server import Server

TEXTS = ["the quick brown fox", "Hello, how are you?"]


def expected(server: Server, text: str, **params: Any) -> Floats:
    assert server.text.tokenizer is not None
    return pooled(server.text.tokenizer.encode(text), PoolingParams(task="embed", **params), EMBEDDER)


def test_texts_are_embedded_for_ollamas_client(embedder: Served) -> None:
    server, engine = embedder
    client = ollama.Client(server.url)
    several = client.embed("tiny:latest", TEXTS, options={"num_ctx": 512}, keep_alive="5m")
    assert np.array_equal(np.array(several.embeddings, np.float32), np.stack([expected(server, t) for t in TEXTS]))
    assert several.prompt_eval_count == sum(add.prompt_len for add in engine.adds[-2:])
    assert (several.total_duration or 0) > 0
    assert client.embed("tiny", TEXTS[0], dimensions=8).embeddings == [
        expected(server, TEXTS[0], dimensions=8).tolist()
    ]
    assert client.embeddings("tiny", TEXTS[0]).embedding == expected(server, TEXTS[0]).tolist()
    assert "embedding" in (client.show("tiny").capabilities or [])
    assert "completion" not in (client.show("tiny").capabilities or [])


def test_no_text_loads_the_model(embedder: Served) -> None:
    client = ollama.Client(embedder[0].url)
    assert client.embed("tiny", "").embeddings == []
    assert client.embed("tiny", []).embeddings == []
    assert client.embeddings("tiny", "").embedding == []


def test_long_texts_are_cut_unless_the_client_says_otherwise(embedder: Served) -> None:
    server, engine = embedder
    client, long = ollama.Client(server.url), " ".join(["the quick brown fox"] * 200)
    client.embed("tiny", long)
    assert engine.adds[-1].prompt_len == 512
    with pytest.raises(ollama.ResponseError, match="512 tokens") as refused:
        client.embed("tiny", long, truncate=False)
    assert refused.value.status_code == 400


def test_errors_have_ollamas_form(embedder: Served, classifier: Served) -> None:
    client = ollama.Client(embedder[0].url)
    with pytest.raises(ollama.ResponseError, match="other"):
        client.embed("other", "a")
    with pytest.raises(ollama.ResponseError, match=r"input\[1\] is empty"):
        client.embed("tiny", ["a", ""])
    with pytest.raises(ollama.ResponseError, match="does not embed texts"):
        ollama.Client(classifier[0].url).embed("tiny", "a")
