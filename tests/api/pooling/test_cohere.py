"""Cohere's /v2/embed, by raw requests."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from quire.pooling_params import PoolingParams
from tests.api.pooling.conftest import Served
from tests.api.pooling.pooler import EMBEDDER, Floats, pooled, pooling
from tests.api.server import Server

TEXTS = ["the quick brown fox", "Hello, how are you?"]


def expected(server: Server, texts: list[str], prompt: str = "", **params: Any) -> Floats:
    tokenizer = server.text.tokenizer
    assert tokenizer is not None
    asked = PoolingParams(task="embed", **params)
    return np.stack([pooled(tokenizer.encode(prompt + text), asked, EMBEDDER) for text in texts])


def embed(server: Server, **fields: Any) -> Any:
    answer = server.post("/v2/embed", {"model": "tiny", **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_every_form_of_a_vector(embedder: Served) -> None:
    server, _ = embedder
    types = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    body = embed(server, texts=TEXTS, embedding_types=types)
    values, found = expected(server, TEXTS), body["embeddings"]
    assert list(found) == types
    assert np.array_equal(np.array(found["float"], np.float32), values)
    assert [base64.b64decode(text) for text in found["base64"]] == [row.astype("<f4").tobytes() for row in values]
    bits = (values >= 0).astype(int)
    packed = [[int("".join(map(str, row[i : i + 8])), 2) for i in range(0, 16, 8)] for row in bits]
    assert found["ubinary"] == packed
    assert found["binary"] == [[number - 128 for number in row] for row in packed]
    numbers = np.array(found["int8"])
    assert np.abs(numbers).max(axis=1).tolist() == [127, 127]
    assert np.abs(numbers / 127 - values / np.abs(values).max(axis=1, keepdims=True)).max() <= 0.5 / 127 + 1e-6
    assert (np.array(found["uint8"]) - 128 == numbers).all()
    assert body["texts"] == TEXTS
    assert body["response_type"] == "embeddings_by_type"
    tokens = sum(len(server.text.tokenizer.encode(text)) for text in TEXTS) if server.text.tokenizer else 0
    assert body["meta"] == {"api_version": {"version": "2"}, "billed_units": {"input_tokens": tokens}}


@pytest.mark.parametrize(
    ("input_type", "prompt"),
    [("search_query", "query: "), ("query", "query: "), ("search_document", "passage: "), ("clustering", "")],
)
def test_input_types_are_the_models_prompts(embedder: Served, input_type: str, prompt: str) -> None:
    server, _ = embedder
    found = embed(server, texts=TEXTS, input_type=input_type)["embeddings"]["float"]
    assert np.array_equal(np.array(found, np.float32), expected(server, TEXTS, prompt))


def test_shorter_vectors_and_inputs_in_pieces(embedder: Served) -> None:
    server, _ = embedder
    inputs = [{"content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    found = embed(server, inputs=inputs, output_dimension=8)["embeddings"]["float"]
    assert np.array_equal(np.array(found, np.float32), expected(server, ["one\ntwo"], dimensions=8))


def test_long_texts_are_cut_at_the_end_unless_the_client_says_otherwise(embedder: Served) -> None:
    server, engine = embedder
    long = " ".join(["the quick brown fox"] * 200)
    assert server.text.tokenizer is not None
    tokens = server.text.tokenizer.encode(long)
    cuts: list[tuple[dict[str, Any], list[int]]] = [
        ({}, tokens[:512]),
        ({"truncate": "END", "max_tokens": 5}, tokens[:5]),
        ({"truncate": "START"}, tokens[-512:]),
        ({"truncate": "START", "max_tokens": 5}, tokens[-5:]),
    ]
    for fields, kept in cuts:
        embed(server, texts=[long], **fields)
        assert engine.adds[-1].tokens == kept
    for limit in (None, 5):
        refused = server.post("/v2/embed", {"texts": [TEXTS[0], long], "truncate": "NONE", "max_tokens": limit})
        assert refused.status_code == 400
        assert f"{limit or 512} tokens" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"texts": ["a"], "inputs": [{"content": [{"type": "text", "text": "a"}]}]}, "texts"),
        ({}, "texts"),
        ({"texts": []}, "texts"),
        ({"texts": ["a", ""]}, "texts[1]"),
        ({"texts": ["a"], "input_type": "nonsense"}, "input_type"),
        ({"texts": ["a"], "output_dimension": 99}, "output_dimension"),
        ({"texts": ["a"], "output_dimension": 9, "embedding_types": ["float", "ubinary"]}, "embedding_types"),
        ({"texts": ["a"], "max_tokens": 0}, "max_tokens"),
        ({"images": ["data:image/png;base64,AA=="]}, "images"),
        ({"inputs": [{"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "inputs[0].content"),
    ],
)
def test_what_is_wrong_is_named(embedder: Served, fields: dict[str, Any], param: str) -> None:
    answer = embedder[0].post("/v2/embed", fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_a_prompt_may_be_left_out_of_the_vector(tmp_path: Path) -> None:
    info = msgspec.structs.replace(EMBEDDER, include_prompt=False, default_prompt="passage")
    with pooling(tmp_path, info) as (server, engine):
        assert server.text.tokenizer is not None
        for input_type, prompt in (("query", "query: "), (None, "passage: ")):
            embed(server, texts=TEXTS, input_type=input_type)
            add = engine.adds[-1]
            assert add.tokens == server.text.tokenizer.encode(prompt + TEXTS[-1])
            assert add.prompt_skip == len(server.text.tokenizer.encode(prompt))
        embed(server, texts=TEXTS, input_type="query", truncate="START", max_tokens=4)
        assert (engine.adds[-1].prompt_len, engine.adds[-1].prompt_skip) == (4, 0), "the prompt was cut off"
