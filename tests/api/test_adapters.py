"""Adapters over HTTP: chosen as a request's model by every endpoint, listed, loaded and unloaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import httpx
import pytest

from quire.engine.build import ModelRuntimeInfo
from quire.engine.inprocess import InProcessClient
from quire.foundation.messages.from_engine import PoolingInfo, Ready
from tests.api.scripted import READY, ScriptedClient
from tests.api.server import KEY, Server, resolved
from tests.api.test_lifetimes import eventually
from tests.checkpoints import VOCAB_SIZE
from tests.executor.fake import FakeExecutor
from tests.executor.fake_adapters import FakeAdapters

COUNT = 4
POOLING = PoolingInfo(["embed"], dim=16)


def text_of(digest: str) -> str:
    """What every prompt is answered with: characters that count up from a place of the adapter's own."""
    first = crc32(digest.encode()) if digest else 0
    return "".join(chr(33 + (first + number) % 94) for number in range(COUNT))


def count_up(history: Any, counter: int, vocab_size: int) -> int:
    return 3 + counter % 94


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """--lora-dir, with the adapter `lazy` and the broken one `wrong`; it lies in another adapter."""
    directory = tmp_path_factory.mktemp("outside") / "adapters"
    for name in ("lazy", "wrong", "late", ".."):
        (directory / name).mkdir(parents=True, exist_ok=True)
        (directory / name / "adapter_config.json").write_text("{}")
    return directory


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, adapters: Path) -> Iterator[Server]:
    config = resolved(
        tmp_path_factory.mktemp("model"), enable_lora=True, lora_modules=("poet=x",), max_loras=2,
        lora_dir=str(adapters),
    )  # fmt: skip
    files = {"x": "dx", str(adapters / "lazy"): "dlazy", str(adapters / "late"): "dlate"}

    def client() -> InProcessClient:
        executor = FakeExecutor(
            256, vocab_size=VOCAB_SIZE, sample=count_up, adapters=FakeAdapters(files), pooling=POOLING
        )
        return InProcessClient(config, executor, runtime_info=ModelRuntimeInfo(pooling=POOLING))

    with Server(config, client) as running:
        yield running


def complete(server: Server, model: str | None) -> httpx.Response:
    return server.http.post(f"{server.url}/v1/completions", json={"model": model, "prompt": "a", "max_tokens": COUNT})


def names(server: Server) -> list[str]:
    return [card["id"] for card in server.http.get(f"{server.url}/v1/models").json()["data"]]


def test_a_request_names_its_adapter_as_its_model(server: Server) -> None:
    for model, digest in (("tiny", ""), ("poet", "dx"), ("alias", "")):
        answer = complete(server, model).json()
        assert answer["choices"][0]["text"] == text_of(digest)
        assert answer["model"] == model
    refused = complete(server, "nobody")
    assert refused.status_code == 404
    assert refused.json()["error"]["code"] == "model_not_found"
    assert "Served: tiny, alias, poet" in refused.json()["error"]["message"]


MESSAGES = [{"role": "user", "content": "a"}]
ENDPOINTS: dict[str, tuple[dict[str, Any], Any]] = {
    "/v1/chat/completions": ({"messages": MESSAGES}, lambda body: body["choices"][0]["message"]["content"]),
    "/v1/chat/completions/batch": ({"messages": [MESSAGES]}, lambda body: body["choices"][0]["message"]["content"]),
    "/v1/responses": ({"input": "a", "store": False}, lambda body: body["output"][0]["content"][0]["text"]),
    "/v1/messages": ({"messages": MESSAGES, "max_tokens": 4}, lambda body: body["content"][0]["text"]),
    "/api/chat": ({"messages": MESSAGES, "stream": False}, lambda body: body["message"]["content"]),
    "/api/generate": ({"prompt": "a", "stream": False}, lambda body: body["response"]),
    "/inference/v1/generate": (
        {"token_ids": [5], "sampling_params": {"max_tokens": COUNT, "temperature": 0}},
        lambda body: "".join(chr(30 + token) for token in body["choices"][0]["token_ids"]),
    ),
}


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(("model", "digest"), [("tiny", ""), ("poet", "dx")])
def test_every_endpoint_serves_adapters(server: Server, path: str, model: str, digest: str) -> None:
    body, text = ENDPOINTS[path]
    more = {"max_tokens": COUNT} if path.startswith("/v1/chat") else {}
    more |= {"max_output_tokens": COUNT} if path == "/v1/responses" else {}
    more |= {"options": {"num_predict": COUNT}} if path.startswith("/api/") else {}
    answer = server.http.post(f"{server.url}{path}", json={"model": model, **body, **more})
    assert answer.status_code == 200, answer.text
    assert text(answer.json()) == text_of(digest)


POOLED: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "a"},
    "/pooling": {"input": "a"},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/v2/embed": {"texts": ["a"]},
    "/api/embed": {"input": "a"},
}


@pytest.mark.parametrize("path", POOLED)
def test_texts_are_pooled_with_the_adapter(server: Server, path: str) -> None:
    sent: list[Any] = []
    find = server.session.adapters.find

    async def found(name: str) -> Any:
        sent.append(await find(name))
        return sent[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.session.adapters, "find", found)
        for model in ("poet", "tiny"):
            answer = server.http.post(f"{server.url}{path}", json={"model": model, **POOLED[path]})
            assert answer.status_code == 200, answer.text
    poet, base = sent
    assert (poet.digest, base) == ("dx", None)


def test_beams_are_searched_with_the_adapter(server: Server) -> None:
    body = {"model": "poet", "prompt": "a", "max_tokens": COUNT, "use_beam_search": True, "n": 1, "temperature": 0}
    answer = server.http.post(f"{server.url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"][0] == text_of("dx")[0]


def test_adapters_are_listed_with_their_base_model(server: Server) -> None:
    card = server.http.get(f"{server.url}/v1/models/poet").json()
    assert (card["id"], card["parent"], card["root"]) == ("poet", "tiny", "x")
    assert names(server)[:3] == ["tiny", "alias", "poet"]
    assert server.http.get(f"{server.url}/v1/models/tiny").json()["parent"] is None
    cards = {card["name"]: card for card in server.http.get(f"{server.url}/api/tags").json()["models"]}
    assert list(cards) == names(server)
    assert (cards["poet"]["digest"], cards["poet"]["details"]["parent_model"]) == ("dx", "tiny")
    shown = {name: server.http.post(f"{server.url}/api/show", json={"model": name}).json() for name in ("tiny", "poet")}
    assert [each["details"]["parent_model"] for each in shown.values()] == ["", "tiny"]


def test_an_adapter_of_the_directory_is_loaded_when_it_is_first_named(server: Server) -> None:
    assert "lazy" not in names(server)
    assert complete(server, "lazy").json()["choices"][0]["text"] == text_of("dlazy")
    assert "lazy" in names(server)
    before = names(server)
    refused = complete(server, "wrong")
    assert refused.status_code == 400
    assert "cannot be read" in refused.json()["error"]["message"]
    assert refused.json()["error"]["param"] == "model"
    for outside in ("../adapters/lazy", "..", ".", "lazy/", "lazy\0", "x" * 300):
        assert complete(server, outside).status_code == 404
    assert names(server) == before
    assert complete(server, "tiny").status_code == 200


def test_adapters_are_loaded_and_unloaded_while_serving(server: Server, adapters: Path) -> None:
    def post(action: str, **body: Any) -> httpx.Response:
        return server.http.post(f"{server.url}/v1/{action}_lora_adapter", json=body)

    late = str(adapters / "late")
    answer = post("load", lora_name="new", lora_path=late)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'new' added successfully.")
    assert complete(server, "new").json()["choices"][0]["text"] == text_of("dlate")
    for wrong, word in (
        ({"lora_name": "new", "lora_path": late}, "load_inplace"),
        ({"lora_name": "bad", "lora_path": str(adapters / "wrong")}, "cannot be read"),
        ({"lora_name": "bad", "lora_path": "/etc"}, "--lora-dir"),
        ({"lora_name": "bad", "lora_path": f"{adapters}/../x"}, "--lora-dir"),
        ({"lora_name": "tiny", "lora_path": late}, "base model"),
        ({"lora_name": "", "lora_path": late}, "1 to 256"),
        ({"lora_name": "new"}, "lora_path"),
    ):
        refused = post("load", **wrong)
        assert refused.status_code == 400, wrong
        assert word in refused.json()["error"]["message"]
    assert post("load", lora_name="new", lora_path=str(adapters / "lazy"), load_inplace=True).status_code == 200
    assert complete(server, "new").json()["choices"][0]["text"] == text_of("dlazy")
    assert post("unload", lora_name="new", lora_int_id=1).status_code == 200
    assert complete(server, "new").status_code == 404
    assert post("unload", lora_name="new").status_code == 404
    assert "new" not in names(server)
    assert "bad" not in names(server)


def test_ollamas_tag_may_be_part_of_an_adapters_name(server: Server, adapters: Path) -> None:
    def text(model: str) -> str:
        body = {"model": model, "prompt": "a", "stream": False, "options": {"num_predict": COUNT}}
        answer = server.http.post(f"{server.url}/api/generate", json=body)
        assert answer.status_code == 200, answer.text
        for path in ("generate", "show"):  # without a prompt a model is only loaded
            assert server.http.post(f"{server.url}/api/{path}", json={"model": model}).status_code == 200
        return str(answer.json()["response"])

    assert text("poet:latest") == text_of("dx")
    named = {"lora_name": "poet:latest"}
    late = named | {"lora_path": str(adapters / "late")}
    assert server.http.post(f"{server.url}/v1/load_lora_adapter", json=late).status_code == 200
    assert (text("poet:latest"), text("poet")) == (text_of("dlate"), text_of("dx"))
    assert server.http.post(f"{server.url}/v1/unload_lora_adapter", json=named).status_code == 200
    assert text("poet:latest") == text_of("dx")


def test_metrics_name_the_adapters_in_use(server: Server) -> None:
    complete(server, "poet")
    page = server.http.get(f"{server.url}/metrics").text
    (line,) = [line for line in page.splitlines() if line.startswith("vllm:lora_requests_info{")]
    assert 'max_lora="2"' in line
    assert "running_lora_adapters=" in line
    assert "waiting_lora_adapters=" in line


@pytest.mark.parametrize(
    ("settings", "environment", "served"),
    [
        ({}, {}, False),
        ({"api_key": (KEY,)}, {}, True),
        ({}, {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}, True),
        ({"api_key": (KEY,), "enable_lora": False}, {}, False),
    ],
)
def test_loading_needs_a_key_or_the_operators_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Any, environment: dict[str, str], served: bool
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    config = resolved(tmp_path, **{"enable_lora": True, **settings})
    client = ScriptedClient()
    client.say(READY)
    with Server(config, lambda: client, developer_mode=False) as running:
        path = f"{running.url}/v1/unload_lora_adapter"
        if "api_key" in settings:
            assert running.http.post(path, json={"lora_name": "a"}).status_code == 401
        headers = {"Authorization": f"Bearer {KEY}"}
        answer = running.http.post(path, json={"lora_name": "a"}, headers=headers)
        assert answer.status_code == 404
        assert ("There is no adapter" in answer.text) == served
        assert "lora_requests_info" not in running.http.get(f"{running.url}/metrics").text or config.lora.enable_lora


def test_an_engine_that_takes_anothers_place_is_told_what_was_loaded(tmp_path: Path) -> None:
    """And a new API process hears it from the engine."""
    from quire.foundation.messages.from_engine import Dead, EngineId
    from quire.foundation.messages.to_engine import Adapter

    config = resolved(tmp_path, enable_lora=True)
    client = ScriptedClient()
    poet, other = Adapter("poet", "x", "dx"), Adapter("other", "y", "dy")
    ready = Ready(**{**{name: getattr(READY, name) for name in READY.__struct_fields__}, "adapters": [poet]})
    client.say(ready)
    with Server(config, lambda: client) as running:
        running.in_loop(running.session.wait_ready())
        assert names(running)[-1] == "poet"
        running.session.adapters._by_name["other"] = other
        running.session.adapters._by_name.pop("poet")
        running.session.adapters._removed.add("poet")
        successor = EngineId(0, 1)
        client.say(Dead("killed", successor))
        import msgspec

        client.say(msgspec.structs.replace(ready, source=successor))
        eventually(lambda: len(client.controls) >= 2)
        assert sorted(action for action, _ in client.controls) == ["load_adapter", "unload_adapter"]
        assert names(running)[-1] == "other"
        assert json.dumps(names(running))
