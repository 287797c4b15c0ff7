"""/v1/embeddings: every form of input and of output, by raw requests and by the `openai` client."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from typing import Any

import numpy as np
import openai
import pytest
import torch
from openai.types import CreateEmbeddingResponse

from quire.pooling_params import PoolingParams
from quire.serving.api.pooling.routes import items
from quire.serving.api.pooling.vectors import Pooled, json_numbers
from tests.api.openai_types import check
from tests.api.pooling.conftest import Served
from tests.api.pooling.pooler import EMBEDDER, Floats, pooled
from tests.api.server import Server

TEXTS = ["the quick brown fox", "Hello, how are you?", "naïve café 你好"]


def tokens_of(server: Server, text: str) -> list[int]:
    tokenizer = server.text.tokenizer
    assert tokenizer is not None
    return tokenizer.encode(text)


def expected(server: Server, text: str | list[int], **params: Any) -> Floats:
    tokens = tokens_of(server, text) if isinstance(text, str) else text
    skip = params.pop("skip", 0)
    return pooled(tokens, PoolingParams(task="embed", **params), EMBEDDER, skip=skip)


def embed(server: Server, **fields: Any) -> Any:
    answer = server.post("/v1/embeddings", {"model": "tiny", **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def vectors(server: Server, **fields: Any) -> Floats:
    return np.array([item["embedding"] for item in embed(server, **fields)["data"]], np.float32)


@pytest.mark.parametrize("form", ["text", "texts", "ids", "lists of ids"])
def test_every_form_of_input(embedder: Served, form: str) -> None:
    server, _ = embedder
    ids = [tokens_of(server, text) for text in TEXTS]
    sent: Any = {"text": TEXTS[0], "texts": TEXTS, "ids": ids[0], "lists of ids": ids}[form]
    body = embed(server, input=sent)
    texts = TEXTS if form in ("texts", "lists of ids") else TEXTS[:1]
    assert [item["index"] for item in body["data"]] == list(range(len(texts)))
    found = np.array([item["embedding"] for item in body["data"]], np.float32)
    assert np.array_equal(found, np.stack([expected(server, text) for text in texts]))
    number = sum(len(tokens_of(server, text)) for text in texts)
    assert (body["usage"]["prompt_tokens"], body["usage"]["total_tokens"]) == (number, number)
    assert body["object"] == "list"
    assert {item["object"] for item in body["data"]} == {"embedding"}
    check(CreateEmbeddingResponse, body)


def test_the_openai_client_gets_the_same_bits_by_both_encodings(embedder: Served) -> None:
    server, _ = embedder
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    by_default = client.embeddings.create(model="tiny", input=TEXTS)  # base64, which the client decodes
    as_floats = client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
    assert [item.embedding for item in by_default.data] == [item.embedding for item in as_floats.data]
    assert by_default.data[1].embedding == expected(server, TEXTS[1]).tolist()
    shortened = client.embeddings.create(model="tiny", input=TEXTS, dimensions=8, user="somebody")
    assert shortened.data[2].embedding == expected(server, TEXTS[2], dimensions=8).tolist()


def test_messages_are_rendered_by_the_chat_template(embedder: Served) -> None:
    server, _ = embedder
    one, two = [{"role": "user", "content": "hi"}], [{"role": "user", "content": "ho"}]
    text = "<|im_start|>user\nhi<|im_end|>\n"
    assert np.array_equal(vectors(server, messages=one)[0], expected(server, text))
    both = vectors(server, messages=[one, two])
    assert np.array_equal(both[0], expected(server, text))
    assert np.array_equal(both[1], expected(server, text.replace("hi", "ho")))
    opened = vectors(server, messages=one, add_generation_prompt=True)
    assert np.array_equal(opened[0], expected(server, text + "<|im_start|>assistant\n"))
    left_open = vectors(server, messages=one, continue_final_message=True)
    assert np.array_equal(left_open[0], expected(server, "<|im_start|>user\nhi"))


def test_prompts_go_before_texts_by_name(embedder: Served) -> None:
    server, engine = embedder
    assert np.array_equal(vectors(server, input="fox", prompt_name="query")[0], expected(server, "query: fox"))
    assert engine.adds[-1].prompt_skip == 0, "the model's prompts are pooled with the text"


@pytest.mark.parametrize("older", ["use_activation", "normalize"])
def test_what_is_not_normalised(embedder: Served, older: str) -> None:
    server, _ = embedder
    assert np.array_equal(
        vectors(server, input="fox", **{older: False})[0], expected(server, "fox", use_activation=False)
    )


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("endianness", ["little", "big", "native"])
def test_number_types_and_byte_orders(embedder: Served, dtype: str, endianness: str) -> None:
    server, _ = embedder
    names = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
    values = torch.from_numpy(expected(server, "fox")).to(getattr(torch, names.get(dtype, dtype)))
    order = {"little": "<", "big": ">", "native": "="}[endianness]
    bits = values.view({4: torch.float32, 2: torch.int16, 1: torch.uint8}[values.element_size()]).numpy()
    fields = {"input": "fox", "embed_dtype": dtype, "endianness": endianness}
    data = bits.astype(bits.dtype.newbyteorder(order)).tobytes()
    assert base64.b64decode(embed(server, **fields, encoding_format="base64")["data"][0]["embedding"]) == data
    answer = server.post("/v1/embeddings", {**fields, "encoding_format": "bytes_only"})
    assert answer.content == data


def test_bytes_come_with_where_each_vector_is(embedder: Served) -> None:
    server, _ = embedder
    answer = server.post("/v1/embeddings", {"input": TEXTS, "encoding_format": "bytes"})
    assert answer.headers["content-type"] == "application/octet-stream"
    metadata = json.loads(answer.headers["metadata"])
    assert metadata["usage"]["prompt_tokens"] > 0
    for text, about in zip(TEXTS, metadata["data"], strict=True):
        found = np.frombuffer(answer.content[about["start"] : about["end"]], "=f4").reshape(about["shape"])
        assert np.array_equal(found, expected(server, text))
        assert (about["embed_dtype"], about["endianness"]) == ("float32", "native")
    many = server.post("/v1/embeddings", {"input": ["fox"] * 500, "encoding_format": "bytes"})
    assert (many.status_code, many.json()["error"]["param"]) == (400, "encoding_format")
    assert "bytes_only" in many.json()["error"]["message"]
    assert "metadata" not in server.post("/v1/embeddings", {"input": "a", "encoding_format": "bytes_only"}).headers


def test_long_texts_are_cut_when_asked_and_only_then(embedder: Served) -> None:
    server, _ = embedder
    text = " ".join(["the quick brown fox"] * 200)
    tokens = tokens_of(server, text)
    assert len(tokens) > 512
    assert np.array_equal(vectors(server, input=text, truncate_prompt_tokens=-1)[0], expected(server, tokens[:512]))
    assert np.array_equal(vectors(server, input=text, truncate_prompt_tokens=7)[0], expected(server, tokens[:7]))
    left = vectors(server, input=text, truncate_prompt_tokens=7, truncation_side="left")
    assert np.array_equal(left[0], expected(server, tokens[-7:]))
    ids = vectors(server, input=[tokens, [5]], truncate_prompt_tokens=3)
    assert np.array_equal(ids, np.stack([expected(server, tokens[:3]), expected(server, [5])]))


def test_what_stands_around_a_text_stays_when_it_is_cut(cross_encoder: Served) -> None:
    server, engine = cross_encoder
    words = "what is the capital of france"
    cls, *middle, sep = tokens_of(server, words)
    for side, kept in (("right", middle[:3]), ("left", middle[-3:])):
        fields = {"input": words, "truncate_prompt_tokens": 5, "truncation_side": side}
        assert server.post("/classify", fields).status_code == 200
        assert engine.adds[-1].tokens == [cls, *kept, sep]
    server.post("/classify", {"input": words, "add_special_tokens": False})
    assert engine.adds[-1].tokens == middle


def test_ids_headers_and_names_are_as_elsewhere(embedder: Served) -> None:
    server, engine = embedder
    answer = server.post("/v1/embeddings", {"input": "a", "model": "alias"}, headers={"X-Request-Id": "mine-1"})
    assert (answer.json()["id"], answer.json()["model"]) == ("embd-mine-1", "alias")
    assert answer.headers["x-request-id"] == "mine-1"
    assert embed(server, input="a", request_id="mine-2")["id"] == "embd-mine-2"
    embed(server, input="a", cache_salt="salt", timeout=30.0)
    assert engine.adds[-1].cache_salt == "salt"
    assert engine.adds[-1].deadline is not None


def test_many_texts_go_in_one_request(embedder: Served) -> None:
    server, _ = embedder
    texts = [f"fox {number}" for number in range(2048)]
    body = embed(server, input=texts, encoding_format="base64")
    assert len(body["data"]) == 2048
    last = np.frombuffer(base64.b64decode(body["data"][-1]["embedding"]), "<f4")
    assert np.array_equal(last, expected(server, texts[-1]))


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_many_long_texts_do_not_hold_the_event_loop(embedder: Served, encoding: str) -> None:
    server, _ = embedder
    done, longest = threading.Event(), 0.0

    async def watch() -> None:
        nonlocal longest
        while not done.is_set():
            begun = time.thread_time()  # of the loop's own thread, whatever else runs on the machine
            await asyncio.sleep(0.001)
            longest = max(longest, time.thread_time() - begun)

    watching = asyncio.run_coroutine_threadsafe(watch(), server.loop)
    texts = [f"{TEXTS[number % 3]} " * 25 + str(number) for number in range(500)]
    body = embed(server, input=texts, encoding_format=encoding)
    done.set()
    watching.result(60)
    assert len(body["data"]) == 500
    assert 0 < longest < 0.1


@pytest.mark.parametrize("number", [4, 4_096])
def test_many_vectors_of_one_text_are_written_beside_the_event_loop(number: int) -> None:
    vectors = np.random.default_rng(5).standard_normal((number, 64)).astype("<f4")
    result, threads = Pooled(vectors.tobytes(), vectors.shape, number), list[int]()

    def write(index: int, each: Pooled) -> bytes:
        threads.append(threading.get_ident())
        return json_numbers(each.array)

    pieces = asyncio.run(items([result], write))
    assert json.loads(b"".join(pieces.pieces)) == [vectors.tolist()]
    assert (threads != [threading.get_ident()]) == (number > 4)
