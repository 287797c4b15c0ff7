"""/pooling and /classify, what /v1/models and metrics say, and what is shared with other endpoints."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.routing import APIRoute

from quire.foundation.messages.from_engine import EndReason, PoolingInfo
from quire.pooling_params import PoolingParams, PoolingTask
from quire.serving.router.app import SERVED
from tests.api.pooling.conftest import Served
from tests.api.pooling.pooler import EMBEDDER, Floats, pooled, pooling
from tests.api.server import KEY, Server, running
from tests.api.test_lifetimes import connect, eventually, head, in_background
from tests.executor.fake_pooling import CLASSIFIES

TEXTS = ["the quick brown fox", "Hello, how are you?"]


def expected(server: Server, text: str, task: PoolingTask, **params: Any) -> Floats:
    tokenizer = server.text.tokenizer
    assert tokenizer is not None
    info = EMBEDDER if "embed" in task else CLASSIFIES
    return pooled(tokenizer.encode(text), PoolingParams(task=task, **params), info)


def post(server: Server, path: str, **fields: Any) -> Any:
    answer = server.post(path, fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("task", [None, "embed", "token_embed"])
def test_pooling_returns_vectors_of_texts_or_of_their_tokens(embedder: Served, task: PoolingTask | None) -> None:
    server, _ = embedder
    body = post(server, "/pooling", input=TEXTS, task=task)
    assert {item["object"] for item in body["data"]} == {"pooling"}
    for text, item in zip(TEXTS, body["data"], strict=True):
        assert np.array_equal(np.array(item["data"], np.float32), expected(server, text, task or "embed"))
    encoded = post(server, "/pooling", input=TEXTS[0], task=task, encoding_format="base64", dimensions=8)
    values = expected(server, TEXTS[0], task or "embed", dimensions=8)
    assert base64.b64decode(encoded["data"][0]["data"]) == values.tobytes()


def test_pooling_returns_labels_of_tokens(classifier: Served) -> None:
    server, _ = classifier
    body = post(server, "/pooling", input=TEXTS, task="token_classify")
    for text, item in zip(TEXTS, body["data"], strict=True):
        assert np.array_equal(np.array(item["data"], np.float32), expected(server, text, "token_classify"))


@pytest.mark.parametrize("name", ["use_activation", "softmax", "activation"])
def test_classify_names_the_likeliest_label(classifier: Served, name: str) -> None:
    server, _ = classifier
    body = post(server, "/classify", input=TEXTS)
    assert body["id"].startswith("classify-")
    for text, item in zip(TEXTS, body["data"], strict=True):
        values = expected(server, text, "classify")
        assert item["label"] == CLASSIFIES.labels[int(values.argmax())]
        assert np.array_equal(np.array(item["probs"], np.float32), values)
        assert item["num_classes"] == 3
    raw = post(server, "/classify", input=TEXTS[0], **{name: False})
    assert raw["data"][0]["probs"] == expected(server, TEXTS[0], "classify", use_activation=False).tolist()
    chat = post(server, "/classify", messages=[{"role": "user", "content": "hi"}])
    assert chat["data"][0]["probs"] == expected(server, "<|im_start|>user\nhi<|im_end|>\n", "classify").tolist()


def test_embeddings_and_text_come_from_one_server(tmp_path: Path) -> None:
    both = PoolingInfo(["embed"], generates=True, dim=16)
    with running(tmp_path, pooling=both) as server:  # the real engine
        assert post(server, "/v1/completions", prompt="a", max_tokens=3)["choices"][0]["text"] == "bcd"
        (item,) = post(server, "/v1/embeddings", input="a quick fox")["data"]
        assert server.text.tokenizer is not None
        values = pooled(server.text.tokenizer.encode("a quick fox"), PoolingParams(task="embed"), both)
        assert np.allclose(item["embedding"], values)
        server.assert_all_free()


def test_invocations_are_what_their_body_and_model_say(
    embedder: Served, classifier: Served, cross_encoder: Served
) -> None:
    chat = [{"role": "user", "content": "hi"}]
    for (server, _), body, kind in (
        (embedder, {"input": "a"}, "embd"),
        (embedder, {"messages": chat}, "embd"),
        (embedder, {"input": "a", "task": "token_embed"}, "pool"),
        (classifier, {"input": "a"}, "classify"),
        (cross_encoder, {"query": "a", "documents": ["b"]}, "rerank"),
        (cross_encoder, {"queries": "a", "documents": ["b"]}, "score"),
        (cross_encoder, {"text_1": "a", "text_2": "b"}, "score"),
    ):
        assert post(server, "/invocations", **body)["id"].startswith(f"{kind}-"), body
    refused = embedder[0].post("/invocations", {"input": "a", "padding": "max_length"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "padding")
    assert "generates none" in embedder[0].post("/invocations", {"prompt": "a"}).json()["error"]["message"]


def test_keys_guard_every_route(tmp_path: Path) -> None:
    with pooling(tmp_path, EMBEDDER, api_key=(KEY,)) as (server, engine):
        for path in ("/v1/embeddings", "/pooling", "/classify", "/score", "/rerank", "/v2/embed", "/api/embed"):
            assert server.post(path, {"input": "a"}).status_code == 401, path
        headers = {"Authorization": f"Bearer {KEY}"}
        assert server.post("/v1/embeddings", {"input": "a"}, headers=headers).status_code == 200
        assert engine.adds[-1].tenant


def test_the_router_passes_every_route_on(embedder: Served) -> None:
    routes = [route for route in embedder[0].app.router.routes if isinstance(route, APIRoute)]
    paths = {route.path for route in routes if "pooling" in route.tags}
    assert {"/v1/embeddings", "/v2/embed", "/rerank"} <= paths <= SERVED


def test_priorities_need_a_server_that_orders_by_them(embedder: Served, tmp_path: Path) -> None:
    refused = embedder[0].post("/v1/embeddings", {"input": "a", "priority": 5})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")
    with pooling(tmp_path, EMBEDDER, scheduling_policy="priority") as (server, engine):
        post(server, "/v1/embeddings", input="a", priority=5)
        post(server, "/v2/embed", texts=["a"], priority=-5)
        assert [add.priority for add in engine.adds] == [5, -5]


def test_a_client_that_leaves_aborts_what_it_asked(tmp_path: Path) -> None:
    with pooling(tmp_path, EMBEDDER) as (server, engine):
        engine.held = True
        body = json.dumps({"input": TEXTS}).encode()
        with connect(server) as connection:
            connection.sendall(head(body).replace(b"/v1/completions", b"/v1/embeddings") + body)
            engine.wait_for_adds(2)
        eventually(lambda: len(engine.aborted) == 2)
        assert server.session.num_sequences == 0


def test_a_deadline_that_passes_is_a_504_and_an_abort_a_503(tmp_path: Path) -> None:
    with pooling(tmp_path, EMBEDDER) as (server, engine):
        engine.held = True
        ends: dict[EndReason, int] = {"timeout": 504, "abort": 503, "error": 500}
        for reason, status in ends.items():
            number = len(engine.adds)
            asking, answers = in_background(lambda: server.post("/v1/embeddings", {"input": TEXTS}))
            first, second = engine.wait_for_adds(number + 2)[-2:]
            engine.finish(first)
            engine.say_end(second, reason)
            asking.join(60)
            assert answers[0].status_code == status, answers[0].text


def test_models_say_what_they_make(embedder: Served, classifier: Served) -> None:
    card = embedder[0].get("/v1/models").json()["data"][0]
    assert card["pooling"]["tasks"] == ["embed", "token_embed"]
    assert card["pooling"]["dimension"] == 16
    assert card["pooling"]["prompts"] == ["passage", "query"]
    assert classifier[0].get("/v1/models").json()["data"][0]["pooling"]["labels"] == CLASSIFIES.labels


def test_metrics_count_texts_and_tokens(tmp_path: Path) -> None:
    with pooling(tmp_path, EMBEDDER) as (server, _):
        tokens = post(server, "/v1/embeddings", input=TEXTS)["usage"]["prompt_tokens"]
        stats = server.session.stats.engines[0]
        assert (stats.prompt_tokens, stats.ended["stop"]) == (tokens, 2)
        assert (stats.generation_tokens, stats.pooled) == (0, 2)
