"""Clients that leave or do not read, engines that die or stall, servers that start and drain."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from quire.engine.client import Lost
from quire.foundation.messages.from_engine import Dead, Deltas, End, EngineId, Heartbeat, Load
from quire.foundation.messages.to_engine import CLIENT_SHIFT
from tests.api.scripted import READY, ScriptedClient
from tests.api.server import Pace, Server, resolved, running

LONG = {"prompt": "a", "max_tokens": 500, "ignore_eos": True}


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[tuple[Server, ScriptedClient]]:
    client = ScriptedClient()
    with Server(resolved(tmp_path), lambda: client) as server:
        yield server, client
    assert client.closed


def in_background(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(work()))
    thread.start()
    return thread, result


def connect(server: Server, receive_buffer: int | None = None) -> socket.socket:
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
    return connection


def head(body: bytes) -> bytes:
    return f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()


# --- clients --------------------------------------------------------------------------------------------------------


def test_a_client_that_leaves_frees_everything(tmp_path: Path) -> None:
    with running(tmp_path, step_s=0.005) as server:
        for stream in (True, False):
            for _ in range(20):
                body = json.dumps(LONG | {"stream": stream, "n": 2}).encode()
                connection = connect(server)
                connection.sendall(head(body) + body)
                if stream:
                    assert connection.recv(10)
                else:
                    time.sleep(0.005)
                connection.close()
            server.assert_all_free()
        eventually(lambda: server.get("/debug/counts").json()["api"]["tasks"] < 12)


def test_what_a_client_held_is_free_within_a_step(tmp_path: Path) -> None:
    with running(tmp_path, step_s=0.3) as server:
        body = json.dumps(LONG | {"stream": True, "n": 3}).encode()
        connection = connect(server)
        connection.sendall(head(body) + body)
        assert connection.recv(10)
        assert server.get("/debug/counts").json()["engine"]["requests"] == 3
        connection.close()
        eventually(lambda: server.session.num_sequences == 0)
        server.get("/debug/counts")  # answered in the turn that learns of it, or in the next one
        engine = server.get("/debug/counts").json()["engine"]
        assert engine["requests"] == 0
        assert (engine["free_blocks"], engine["free_slots"]) == (engine["blocks"], engine["slots"])


def test_a_client_that_leaves_while_waiting_is_aborted(scripted: tuple[Server, ScriptedClient]) -> None:
    server, client = scripted
    client.say(READY)
    server.wait_ready()
    for stream in (False, True):
        client.adds.clear()
        body = json.dumps(LONG | {"stream": stream}).encode()
        with connect(server) as connection:
            connection.sendall(head(body) + body)
            (add,) = client.wait_for_adds(1)
        eventually(lambda add=add: add.id in client.aborted)  # type: ignore[misc]
    assert server.session.num_sequences == 0


def test_a_client_that_does_not_read_is_given_up(tmp_path: Path) -> None:
    client = ScriptedClient()
    with Server(resolved(tmp_path), lambda: client, slow_reader_s=0.3) as server:
        client.say(READY)
        server.wait_ready()
        server.limit_send_buffers(8192)
        connection = connect(server, receive_buffer=4096)
        body = json.dumps(LONG | {"stream": True}).encode()
        connection.sendall(head(body) + body)
        (add,) = client.wait_for_adds(1)
        for _ in range(20):  # 64 KiB wait in the server as well before its writes do
            client.tokens(add, [70] * 10_000)
        eventually(lambda: add.id in client.aborted, 60)
        assert server.session.num_sequences == 0
        connection.close()


def test_when_too_many_wait_a_request_is_told_when_to_come_again_before_it_costs_anything(
    scripted: tuple[Server, ScriptedClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = scripted
    assert server.text.tokenizer is not None
    encode, encoded = server.text.tokenizer.encode_each, list[str]()

    def noted(texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        encoded.extend(texts)
        return encode(texts, add_special_tokens)

    monkeypatch.setattr(server.text.tokenizer, "encode_each", noted)
    client.say(READY)
    server.wait_ready()
    long_queue = Load(running=16, waiting=50, queued_tokens=61_000, tokens_per_s=1_000.0)
    client.say(Heartbeat(time.monotonic(), time.monotonic(), long_queue))
    eventually(lambda: server.session.stats.engines[0].load == long_queue)
    for path, body in (
        ("/v1/completions", LONG),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/messages", {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"max_tokens": 5}}),
        ("/v1/completions", {"prompt": "a", "use_beam_search": True, "n": 4, "max_tokens": 9}),
        ("/v1/chat/completions/batch", {"messages": [[{"role": "user", "content": "a"}]] * 3}),
        ("/v1/responses", {"input": "a", "store": False}),
    ):
        refused = server.post(path, body)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "61"), path
        assert refused.json()["error"]["type"] == "rate_limit_error"
    assert client.adds == []
    assert encoded == []
    metrics = server.get("/metrics").text
    assert 'vllm:admission_rejections_total{engine="0",model_name="tiny",reason="tokens"} 7.0' in metrics
    of_openai = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.RateLimitError):
        of_openai.completions.create(model="tiny", prompt="a")
    short_queue = Load(running=16, waiting=5, queued_tokens=3_000, tokens_per_s=1_000.0)
    client.say(Heartbeat(time.monotonic(), time.monotonic(), short_queue))
    eventually(lambda: server.session.stats.engines[0].load == short_queue)
    thread, _ = in_background(lambda: server.post("/v1/completions", LONG))
    (add,) = client.wait_for_adds(1)
    client.say(Deltas([], [], [], ends=[End(add.id, "length")]))
    thread.join()


# --- engines --------------------------------------------------------------------------------------------------------


def test_before_the_engine_is_ready_work_is_put_off(scripted: tuple[Server, ScriptedClient]) -> None:
    server, client = scripted
    answer = server.post("/v1/completions", LONG)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    assert "still loading" in answer.json()["error"]["message"]
    assert server.get("/health").status_code == 503
    assert server.get("/v1/models").status_code == 200
    client.say(READY)
    server.wait_ready()
    assert server.get("/health").status_code == 200
    eventually(lambda: client.heartbeats > 0)


def test_what_the_engine_is_told(scripted: tuple[Server, ScriptedClient]) -> None:
    server, client = scripted
    client.say(READY)
    server.wait_ready()
    thread, result = in_background(lambda: server.post("/v1/completions", {"prompt": ["a", "b"], "n": 2, "seed": 7}))
    adds = client.wait_for_adds(4)
    assert [add.id >> CLIENT_SHIFT for add in adds] == [client.number] * 4
    assert len({add.id for add in adds}) == 4
    assert client.prompts == 2, "forks travel with the first sequence"
    assert [add.seed for add in adds[:2]] == [add.seed for add in adds[2:]]
    assert adds[0].seed == 7 != adds[1].seed
    assert all(add.sampling.max_tokens == 16 for add in adds)
    ends = [End(add.id, "stop") for add in adds]
    client.say(Deltas([adds[1].id], [1], [70], ends=[ends[1]]))
    client.say(Deltas([], [], [], ends=[ends[0], ends[3], ends[2], End(12345, "stop")]))
    thread.join()
    assert [choice["finish_reason"] for choice in result[0].json()["choices"]] == ["stop"] * 4
    assert client.aborted == []


def test_when_the_engine_dies_every_open_request_is_told(scripted: tuple[Server, ScriptedClient]) -> None:
    server, client = scripted
    client.say(READY)
    server.wait_ready()
    whole, whole_result = in_background(lambda: server.post("/v1/completions", LONG))
    client.wait_for_adds(1)
    streamed, streamed_result = in_background(
        lambda: httpx.post(server.url + "/v1/completions", json=LONG | {"stream": True}, timeout=60)
    )
    add = client.wait_for_adds(2)[1]
    client.tokens(add, [70])
    client.say(Dead("RuntimeError: /secret/path.py is broken"))
    whole.join()
    streamed.join()
    assert whole_result[0].status_code == 500
    lines = streamed_result[0].text.split("\n\n")
    assert json.loads(lines[-3].removeprefix("data: "))["error"]["code"] == "engine_dead"
    assert lines[-2] == "data: [DONE]"
    assert "secret" not in whole_result[0].text + streamed_result[0].text
    assert server.get("/health").status_code == 503
    assert server.post("/v1/completions", LONG).status_code == 503


def test_what_an_earlier_life_of_the_engine_still_says_is_dropped(scripted: tuple[Server, ScriptedClient]) -> None:
    server, client = scripted
    client.say(READY)
    server.wait_ready()
    thread, result = in_background(lambda: server.post("/v1/completions", LONG))
    (add,) = client.wait_for_adds(1)
    client.say(Deltas([add.id], [1], [71], ends=[End(add.id, "stop")], source=EngineId(0, 7)))
    client.say(Dead("that one is known", source=EngineId(1, 2)))
    client.say(Deltas([add.id], [1], [70], ends=[End(add.id, "stop")]))
    thread.join()
    assert result[0].json()["choices"][0]["text"] == "d"
    assert server.session.state == "ready"


def test_a_broken_connection_is_a_dead_engine(scripted: tuple[Server, ScriptedClient]) -> None:
    server, client = scripted
    client.say(READY)
    server.wait_ready()
    client.say(ConnectionError("gone"))
    eventually(lambda: server.session.state == "dead")


def test_a_lost_message_of_the_engine_fails_what_is_open(scripted: tuple[Server, ScriptedClient]) -> None:
    server, client = scripted
    client.say(READY)
    server.wait_ready()
    whole, whole_result = in_background(lambda: server.post("/v1/completions", LONG))
    (add,) = client.wait_for_adds(1)
    client.say(Lost("planted"))
    whole.join(60)
    assert whole_result[0].status_code == 500
    assert "lost" in whole_result[0].json()["error"]["message"]
    eventually(lambda: client.aborted == [add.id])
    client.beat()
    assert server.get("/health").status_code == 200, "the next request is served"


def test_health_follows_progress_not_mere_life(
    scripted: tuple[Server, ScriptedClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = scripted
    client.say(READY)
    server.wait_ready()
    client.beat()
    eventually(lambda: server.get("/health").status_code == 200)
    assert server.get("/ready").json() == {"status": "ok", "state": "ready"}
    client.beat(stalled=2.5, limit=4.0)
    eventually(lambda: server.get("/health").status_code == 503)
    assert "a step of the engine takes 2 s" in server.get("/health").json()["reason"]
    assert server.get("/ready").status_code == 503, "it beats but does not move"
    client.beat(stalled=2.5, limit=10.0)
    eventually(lambda: server.get("/health").status_code == 200)
    monkeypatch.setattr("quire.serving.api.session.connection.SILENT_S", 0.2)
    time.sleep(0.3)
    assert "not been heard" in server.get("/health").json()["reason"], "it fell silent"


def test_one_failed_sequence_fails_its_request_alone(scripted: tuple[Server, ScriptedClient]) -> None:
    server, client = scripted
    client.say(READY)
    server.wait_ready()
    thread, result = in_background(lambda: server.post("/v1/completions", LONG | {"n": 2}))
    first, second = client.wait_for_adds(2)
    client.say(Deltas([], [], [], ends=[End(first.id, "error", "The model's output was not a number.")]))
    thread.join()
    assert result[0].status_code == 500
    assert result[0].json()["error"]["message"] == "The model's output was not a number."
    assert client.aborted == [second.id]
    assert server.get("/health").status_code == 200


# --- the server itself ----------------------------------------------------------------------------------------------


def test_draining_finishes_what_runs_and_takes_nothing_new(tmp_path: Path) -> None:
    with running(tmp_path, sample=(pace := Pace())) as server:
        thread, result = in_background(lambda: httpx.post(server.url + "/v1/completions", json=LONG, timeout=60))
        eventually(lambda: server.session.num_sequences == 1)
        server.loop.call_soon_threadsafe(server.session.begin_drain)
        eventually(lambda: server.session.state == "draining")
        refused = server.post("/v1/completions", LONG)
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
        assert server.get("/health").status_code == 200, "it is alive"
        assert server.get("/ready").json()["reason"] == "the server is shutting down"
        assert server.session.num_sequences == 1
        pace.hurry()
        assert server.in_loop(server.session.drain(60)) is True
        thread.join()
        assert result[0].json()["usage"]["completion_tokens"] == 500


def test_draining_ends_a_pause_so_that_open_requests_finish(tmp_path: Path) -> None:
    with running(tmp_path, sample=(pace := Pace())) as server:
        thread, result = in_background(lambda: httpx.post(server.url + "/v1/completions", json=LONG, timeout=60))
        eventually(lambda: server.session.num_sequences == 1)
        assert server.post("/pause?mode=keep", {}).status_code == 200
        new, new_result = in_background(lambda: httpx.post(server.url + "/v1/completions", json=LONG, timeout=60))
        eventually(lambda: server.session.num_sequences == 2)
        server.loop.call_soon_threadsafe(server.session.begin_drain)
        eventually(lambda: server.session.state == "draining")
        again = server.post("/pause?mode=keep", {})
        assert (again.status_code, "shutting down" in again.text) == (503, True), "it would stop the drain"
        pace.hurry()
        assert server.in_loop(server.session.drain(60)) is True
        thread.join()
        new.join()
        tokens = [answer[0].json()["usage"]["completion_tokens"] for answer in (result, new_result)]
        assert tokens == [500, 500]


def test_before_a_drain_a_load_balancer_is_told_while_requests_are_still_taken(tmp_path: Path) -> None:
    with running(tmp_path, shutdown_delay=3_600.0) as server:
        draining = asyncio.run_coroutine_threadsafe(server.session.drain(20), server.loop)
        eventually(lambda: server.get("/ready").status_code == 503)
        assert server.get("/ready").json()["reason"] == "the server is shutting down"
        assert server.get("/health").status_code == 200
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 3}).status_code == 200
        draining.cancel()


def test_after_the_shutdown_delay_no_request_is_taken(tmp_path: Path) -> None:
    with running(tmp_path, shutdown_delay=0.05) as server:
        began = time.monotonic()
        assert server.in_loop(server.session.drain(20)) is True
        assert time.monotonic() - began >= 0.05
        assert server.post("/v1/completions", LONG).status_code == 503


def test_draining_ends_what_takes_too_long(scripted: tuple[Server, ScriptedClient]) -> None:
    server, client = scripted
    client.say(READY)
    server.wait_ready()
    thread, result = in_background(lambda: server.post("/v1/completions", LONG))
    (add,) = client.wait_for_adds(1)
    assert server.in_loop(server.session.drain(0.1)) is False
    thread.join()
    assert result[0].status_code == 503
    assert client.aborted == [add.id]
