"""Two API processes before one engine, asked by the official client: whichever is asked, it is one server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.api.server import Pace, count_up
from tests.api.several import ApiServer, several
from tests.api.test_lifetimes import eventually
from tests.checkpoints import VOCAB_SIZE
from tests.executor.fake import FakeExecutor
from tests.executor.fake_adapters import FakeAdapters

Two = tuple[ApiServer, ApiServer]
FILES = {"x": "dx", "y": "dy", "z": "dz"}


@contextmanager
def two_of(directory: Path, sample: Callable[[Sequence[int], int, int], int], step_s: float = 0.0) -> Iterator[Two]:
    def executor() -> FakeExecutor:
        return FakeExecutor(
            256, vocab_size=VOCAB_SIZE, sample=sample, step_s=step_s, adapters=FakeAdapters(dict(FILES))
        )

    with several(directory, executor, enable_lora=True, max_loras=2, max_queued_requests=4) as (first, second):
        yield first, second


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    with two_of(tmp_path, count_up, step_s=0.002) as both:
        yield both


def complete(server: ApiServer, **body: Any) -> Any:
    return server.openai.completions.create(**{"model": "tiny", "prompt": "a", "max_tokens": 4, **body})


def models(server: ApiServer) -> list[dict[str, Any]]:
    return [model.model_dump() for model in server.openai.models.list()]


def metric(server: ApiServer, name: str, **labels: str) -> float:
    page = server.http.get("/metrics").text
    found = [
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert len(found) == 1, (name, found)
    return found[0]


def load_adapter(server: ApiServer, name: str, path: str) -> int:
    return server.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path}).status_code


def test_each_answers_its_own_clients_and_ids_do_not_collide(two: Two) -> None:
    def one(number: int) -> tuple[str, str]:
        stream = complete(two[number % 2], prompt="abc"[number % 3], max_tokens=30, stream=True)
        chunks = list(stream)
        return chunks[0].id, "".join(chunk.choices[0].text for chunk in chunks)

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(one, range(24)))
    assert len({id for id, _ in answers}) == 24
    for number, (_, text) in enumerate(answers):
        start = ord("abc"[number % 3]) + 1
        assert text == "".join(chr(33 + (start - 33 + i) % 94) for i in range(30))


def test_an_adapter_is_served_by_all_as_soon_as_one_has_loaded_it(two: Two) -> None:
    first, second = two
    assert models(first) == models(second)
    assert load_adapter(first, "poet", "x") == 200
    assert [model["id"] for model in models(second)] == ["tiny", "alias", "poet"]
    assert models(first) == models(second)
    assert complete(second, model="poet").model == "poet"
    assert load_adapter(second, "poet", "y") == 400, "it is loaded already"
    assert load_adapter(second, "late", "z") == 200
    assert second.http.post("/v1/unload_lora_adapter", json={"lora_name": "poet"}).status_code == 200
    for server in two:
        assert [model["id"] for model in models(server)] == ["tiny", "alias", "late"]
        with pytest.raises(openai.NotFoundError):
            complete(server, model="poet")


def test_of_two_that_load_under_one_name_at_the_same_time_one_does(two: Two) -> None:
    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            codes = list(pool.map(lambda asked: load_adapter(*asked), [(two[0], "poet", "x"), (two[1], "poet", "y")]))
            assert sorted(codes) == [200, 400]
            assert models(two[0]) == models(two[1])
            two[0].http.post("/v1/unload_lora_adapter", json={"lora_name": "poet"})


def test_a_pause_is_for_all_and_whoever_is_asked_ends_it(two: Two) -> None:
    first, second = two
    assert first.http.post("/pause", params={"mode": "wait"}).status_code == 200
    assert second.http.get("/is_paused").json() == {"is_paused": True}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(complete, second)
        time.sleep(0.2)
        assert not waiting.done()
        assert second.http.post("/resume").status_code == 200
        assert waiting.result(60).choices[0].text == "bcde"
    assert first.http.get("/is_paused").json() == {"is_paused": False}
    connections = [server.model.session.engines[0].connection for server in two]
    eventually(lambda: [connection._pause for connection in connections] == ["", ""])


def test_metrics_are_those_of_all_whoever_is_asked(two: Two) -> None:
    for number, server in enumerate(two):
        for _ in range(2 + number):
            complete(server, max_tokens=10)
    for server in two:
        assert metric(server, "vllm:generation_tokens_total") == 50
        assert metric(server, "vllm:request_success_total", finished_reason="length") == 5
        assert metric(server, "vllm:e2e_request_latency_seconds_count") == 5
        assert metric(server, "http_requests_total", handler="/v1/completions", status="2xx") == 5


def test_what_is_open_is_that_of_all_whoever_is_asked(tmp_path: Path) -> None:
    with two_of(tmp_path, Pace()) as two:
        streams = [complete(server, max_tokens=400, stream=True) for server in two]
        for stream in streams:
            next(iter(stream))
        for server in two:
            assert server.http.get("/load").json() == {"server_load": 2}
            assert server.http.get("/debug/counts").json()["api"]["sequences"] == 2
        for stream in streams:
            stream.close()
        eventually(lambda: all(server.http.get("/load").json() == {"server_load": 0} for server in two))
        eventually(lambda: two[0].http.get("/debug/counts").json()["engine"]["requests"] == 0)


def test_no_counter_goes_back_while_scrapes_are_answered_in_turn(two: Two) -> None:
    stopping = threading.Event()

    def ask() -> None:
        while not stopping.is_set():
            for server in two:
                complete(server, prompt="a shared prefix of some length", max_tokens=8)

    asking = threading.Thread(target=ask)
    asking.start()
    before: dict[Any, float] = {}
    generated = "vllm:generation_tokens_total", (("engine", "0"), ("model_name", "tiny"))
    number = 0
    while number < 30 or not before.get(generated):
        number += 1
        page = two[number % 2].http.get("/metrics").text
        for family in text_string_to_metric_families(page):
            for sample in family.samples if family.type in ("counter", "histogram") else ():
                key = sample.name, tuple(sorted(sample.labels.items()))
                assert sample.value >= before.get(key, 0.0), key
                before[key] = sample.value
    stopping.set()
    asking.join(60)


def test_a_queue_that_one_has_filled_is_full_for_the_other(two: Two) -> None:
    first, second = two
    assert first.http.post("/pause", params={"mode": "keep"}).status_code == 200
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(complete, first) for _ in range(4)]
        eventually(lambda: metric(second, "vllm:num_requests_waiting") == 4)
        with pytest.raises(openai.RateLimitError):
            complete(second)
        assert metric(first, "vllm:admission_rejections_total", reason="requests") == 1
        first.http.post("/resume")
        assert [answer.result(60).choices[0].text for answer in waiting] == ["bcde"] * 4


def test_an_answer_that_one_has_stored_the_other_continues(two: Two) -> None:
    first, second = two
    stored = first.openai.responses.create(model="tiny", input="hello", max_output_tokens=16)
    assert second.openai.responses.retrieve(stored.id).output_text == stored.output_text
    more = second.openai.responses.create(
        model="tiny", input="more", max_output_tokens=16, previous_response_id=stored.id
    )
    assert more.previous_response_id == stored.id
