"""`--api-server-count 2`: one server for its clients, whichever of its processes is killed."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.checkpoints import make_llama
from tests.e2e.faults.engine import POISON
from tests.e2e.faults.server import FaultyServer
from tests.e2e.mixed_streams import ROUNDING, Streamed, bodies, run
from tests.e2e.serve import QuireServe
from tests.e2e.test_lora import write_adapter

pytestmark = pytest.mark.long("reliability")

CLIENTS = 32
OF_ENGINE = ("vllm:num_preemptions", "vllm:prefix_cache", "vllm:spec_decode", "vllm:iteration", "quire:engine_turn")
"""Counters that begin at zero with each engine."""
SHORT = {"prompt": "The sea", "max_tokens": 4, "temperature": 0, "ignore_eos": True}


class Pair(FaultyServer):
    """A server with two API processes, whose engine fails on demand.

    Attributes:
        undisturbed: What the streams get while nothing fails.
    """

    def __init__(self, fault_file: Path) -> None:
        super().__init__(
            fault_file, "--dtype", "float32", "--port", "0", "--max-restarts", "100", "--api-server-count", "2"
        )
        self.wait_ready()
        self.undisturbed = run(self.url, bodies(CLIENTS))

    def wait_whole(self, seconds: float = 120.0) -> None:
        """Both API processes and the engine are there, and nothing is held."""
        deadline = time.monotonic() + seconds
        while True:
            counts = self.counts()
            api, engine = counts["api"], counts["engine"]
            free = engine["free_blocks"] == engine["blocks"] and engine["free_slots"] == engine["slots"]
            whole = {kind: len(pids) for kind, pids in self.all_children().items()} == {"engine": 1, "api": 2}
            if whole and free and api["sequences"] == api["streams"] == engine["requests"] == 0:
                return
            assert time.monotonic() < deadline, counts
            time.sleep(0.05)

    def metrics(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """Counters by name and labels, from whichever process answers."""
        page = httpx.get(self.url + "/metrics", timeout=60).text
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(page)
            for sample in (family.samples if family.type in ("counter", "histogram") else ())
        }

    def total(self, name: str) -> float:
        """The sum of a counter over its labels."""
        return sum(value for (own, _), value in self.metrics().items() if own == name)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with Pair(tmp_path_factory.mktemp("faults") / "fault") as server:
        assert [result.error for result in server.undisturbed] == [""] * CLIENTS
        yield server


def served_by_each(pair: Pair) -> list[int]:
    """How many completions each process has said that it served."""
    return [len(re.findall(rf"api {place}: .* \"POST /v1/completions", pair.log)) for place in (0, 1)]


def assert_undisturbed(pair: Pair, results: list[Streamed], but: set[int] = frozenset()) -> None:  # type: ignore[assignment]
    for number, (got, wanted) in enumerate(zip(results, pair.undisturbed, strict=True)):
        if number not in but:
            assert got.outcome == wanted.outcome, number
            assert got.rounding_error(wanted) <= ROUNDING


def test_both_take_part_and_metrics_are_their_sum_whoever_answers(pair: Pair) -> None:
    """Of the streams of the beginning."""
    pair.wait_whole()
    deadline = time.monotonic() + 60
    while sum(served := served_by_each(pair)) < CLIENTS:  # lines come after the answers of which they are
        assert time.monotonic() < deadline, served
        time.sleep(0.05)
    assert sum(served) == CLIENTS
    assert min(served) >= CLIENTS // 8, served
    before = pair.metrics()
    client = openai.OpenAI(base_url=pair.url + "/v1", api_key="none", max_retries=0)
    tokens = 0
    for number in range(12):
        answer = client.completions.create(model="quill", prompt=f"Tell {number}", max_tokens=5 + number)
        assert answer.usage is not None
        tokens += answer.usage.completion_tokens
        client._client.close()  # so that the next request may go to the other
        client = openai.OpenAI(base_url=pair.url + "/v1", api_key="none", max_retries=0)
    name = "vllm:generation_tokens_total", (("engine", "0"), ("model_name", "quill"))
    assert [pair.metrics()[name] - before[name] for _ in range(6)] == [tokens] * 6
    assert pair.total("vllm:request_success_total") == pair.total("vllm:e2e_request_latency_seconds_count")


def test_a_killed_api_process_takes_only_its_own_streams_with_it(pair: Pair) -> None:
    pair.wait_whole()
    for _ in range(2):
        before, counted = pair.all_children()["api"], pair.metrics()
        results = pair.disturbed(bodies(CLIENTS), functools.partial(os.kill, before[0], signal.SIGKILL))
        cut = {number for number, result in enumerate(results) if "Error" in result.error}
        assert 0 < len(cut) < CLIENTS
        assert_undisturbed(pair, results, but=cut)
        pair.wait_whole()
        after = pair.all_children()["api"]
        assert before[0] not in after
        assert before[1] in after
        for _ in range(4):
            shown = pair.metrics()
            back = {key for key, value in counted.items() if shown[key] < value}
            assert not back
            counted = shown
    while pair.total("quire:process_restarts_total") < 2:
        time.sleep(0.1)  # the last one has not begun to count


def test_connections_find_the_other_process_while_one_is_gone(pair: Pair) -> None:
    pair.wait_whole()
    failures: list[str] = []
    longest = 0.0
    stopping = threading.Event()

    def ask() -> None:
        nonlocal longest
        while not stopping.is_set():
            began = time.monotonic()
            try:
                answer = httpx.post(pair.url + "/v1/completions", json=SHORT, timeout=60)
                if answer.status_code != 200:
                    failures.append(answer.text)
            except httpx.ConnectError as error:
                failures.append(f"refused: {error}")
            except httpx.TransportError:
                pass  # it was in the killed process
            longest = max(longest, time.monotonic() - began)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for place in (0, 1, 0):
        time.sleep(0.5)
        began = pair.line_count
        os.kill(pair.all_children()["api"][place], signal.SIGKILL)
        pair.wait_line("api . process died", began)
        asked_both(pair, "/v1/models")  # the next one listens
    stopping.set()
    for thread in threads:
        thread.join(60)
    print(f"the longest request took {longest:.2f} s")
    assert not failures
    pair.wait_whole()


def test_a_killed_engine_costs_no_stream_of_either_process(pair: Pair) -> None:
    pair.wait_whole()
    replayed, counted = pair.total("quire:sequences_replayed_total"), pair.metrics()
    engine = pair.children()["engine"]  # found before: streams do not wait for that
    results = pair.disturbed(bodies(CLIENTS), lambda: os.kill(engine, signal.SIGKILL))
    assert_undisturbed(pair, results)
    pair.wait_whole()
    assert pair.total("quire:sequences_replayed_total") - replayed >= CLIENTS // 2
    shown = pair.metrics()
    assert not {key for key, value in counted.items() if shown[key] < value and not key[0].startswith(OF_ENGINE)}


def test_a_request_that_kills_the_engine_fails_alone(pair: Pair) -> None:
    """It is in one process, and nothing of the other is blamed."""
    pair.wait_whole()
    answers: list[httpx.Response] = []

    def poison() -> None:
        body = {"prompt": [5, POISON, 6], "max_tokens": 30}
        answers.append(httpx.post(pair.url + "/v1/completions", json=body, timeout=200))

    thread = threading.Thread(target=poison)

    def plant_and_poison() -> None:
        pair.plant("always poison")
        thread.start()

    results = pair.disturbed(bodies(CLIENTS), plant_and_poison)
    thread.join(200)
    pair.clear()
    assert answers[0].status_code == 500
    assert "stopped each time" in answers[0].text
    assert_undisturbed(pair, results)
    pair.wait_whole()


def test_all_streams_finish_in_a_drain(pair: Pair) -> None:
    pair.wait_whole()
    results = pair.disturbed(bodies(CLIENTS), lambda: pair.signal())
    assert pair.wait() == 0
    assert_undisturbed(pair, results)


def asked_both(server: QuireServe, path: str) -> list[Any]:
    """What each of the two processes answers: connections are opened until both have some, as the log tells."""
    answers: dict[str, Any] = {}
    deadline = time.monotonic() + 120
    with contextlib.ExitStack() as connections:
        while len(answers) < 2:
            assert time.monotonic() < deadline
            client = connections.enter_context(httpx.Client(base_url=server.url, timeout=60))
            answer = client.get(path, headers={"X-Request-Id": f"ask-{time.monotonic_ns()}"})
            line = server.wait_line(rf"request_id={answer.headers['X-Request-Id']}\b")
            answers[re.search(r"api (\d):", line)[1]] = answer.json()  # type: ignore[index]
    return [answers["0"], answers["1"]]


def test_an_adapter_is_loaded_for_both_and_outlives_each(tmp_path: Path) -> None:
    checkpoint = make_llama(tmp_path / "model", tokenizer=True)
    write_adapter(tmp_path / "poet", 1)
    flags = ("--port", "0", "--api-server-count", "2", "--enable-lora", "--max-lora-rank", "8")
    with QuireServe(str(checkpoint), *flags, environment={"VLLM_SERVER_DEV_MODE": "1"}) as server:
        server.wait_ready()
        path = str(tmp_path / "poet")
        loaded = server.post("/v1/load_lora_adapter", {"lora_name": "poet", "lora_path": path})
        assert loaded.status_code == 200, loaded.text
        one, other = asked_both(server, "/v1/models")
        assert one == other
        assert [model["id"] for model in one["data"]][-1] == "poet"
        os.kill(server.all_children()["api"][0], signal.SIGKILL)
        server.wait_line("api . process died")
        one, other = asked_both(server, "/v1/models")
        assert one == other
        os.kill(server.children()["engine"], signal.SIGKILL)
        refused = server.post("/admin/model", {"model": str(checkpoint)})
        assert refused.status_code == 400
        assert "--api-server-count" in refused.text
        answer = server.post("/v1/completions", {**SHORT, "model": "poet"})
        assert answer.status_code == 200, answer.text
        assert json.loads(answer.text)["model"] == "poet"
        server.signal()
        assert server.wait() == 0
