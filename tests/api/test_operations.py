"""Routes for operators: what they say, and that they are not there for everybody."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.api.server import KEY, Pace, Server, running

ROUTES = [("GET", "/server_info"), ("POST", "/reset_prefix_cache"), ("POST", "/pause"), ("GET", "/is_paused"),
          ("POST", "/resume")]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_without_a_key_and_developer_mode_they_do_not_exist(tmp_path: Path, method: str, path: str) -> None:
    with running(tmp_path, developer_mode=False) as server:
        assert server.http.request(method, server.url + path).status_code == 404


def test_with_a_key_they_exist_for_those_who_have_it(tmp_path: Path) -> None:
    with running(tmp_path, developer_mode=False, api_key=(KEY,), hf_token="hf_secret") as server:
        for method, path in ROUTES:
            assert server.http.request(method, server.url + path).status_code == 401
            headers = {"Authorization": f"Bearer {KEY}"}
            answer = server.http.request(method, server.url + path, headers=headers)
            assert answer.status_code == 200
            assert KEY not in answer.text
            assert "hf_secret" not in answer.text


def test_server_info_has_the_settings_in_use(server: Server) -> None:
    info = server.get("/server_info?config_format=json").json()
    assert info["vllm_config"]["scheduler"]["max_num_seqs"] == 16
    assert "'max_num_seqs': 16" in server.get("/server_info").json()["vllm_config"]
    wrong = server.get("/server_info?config_format=xml")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "config_format")


def test_a_reset_forgets_prefixes(tmp_path: Path) -> None:
    prompt = {"prompt": list(range(3, 83)), "max_tokens": 1}

    def cached(server: Server) -> int:
        usage = server.post("/v1/completions", prompt).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    with running(tmp_path) as server:
        assert cached(server) == 0
        assert cached(server) == 64
        assert server.post("/reset_prefix_cache", None).status_code == 200
        assert cached(server) == 0
        wrong = server.post("/reset_prefix_cache?reset_external=true", None)
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "reset_external")


def paused(server: Server) -> float:
    """What the metrics say."""
    (line,) = [line for line in server.get("/metrics").text.splitlines() if line.startswith("quire:engine_paused{")]
    return float(line.split()[-1])


def is_open(server: Server, sequences: int) -> bool:
    """Whether so many sequences are open, soon."""
    for _ in range(3_000):
        if server.get("/load").json()["server_load"] == sequences:
            return True
        threading.Event().wait(0.02)
    return False


@pytest.mark.parametrize(("query", "reason"), [
    ("", "abort"), ("?mode=keep", "length"), ("?mode=wait", "length"), ("?wait_for_inflight_requests=true", "length"),
])  # fmt: skip
def test_a_paused_server_takes_requests_and_answers_them_after_the_resume(
    tmp_path: Path, query: str, reason: str
) -> None:
    with running(tmp_path, sample=(pace := Pace())) as server, ThreadPoolExecutor(3) as threads:

        def complete(tokens: int) -> httpx.Response:
            return server.post("/v1/completions", {"prompt": "a", "max_tokens": tokens, "ignore_eos": True})

        first = threads.submit(complete, 400)
        assert is_open(server, 1)
        pausing = threads.submit(lambda: server.post("/pause" + query, None))
        if "wait" in query:
            with pytest.raises(TimeoutError):
                pausing.result(0.3)
            pace.hurry()
        assert pausing.result(60).json() == {"status": "paused"}
        assert server.get("/is_paused").json() == {"is_paused": True}
        if "keep" not in query:
            assert first.result(60).json()["choices"][0]["finish_reason"] == reason
        later = threads.submit(complete, 3)
        assert is_open(server, 2 if "keep" in query else 1)
        assert server.get("/health").status_code == 200
        with pytest.raises(TimeoutError):
            later.result(0.3)
        pace.hurry()
        assert server.post("/resume", None).json() == {"status": "resumed"}
        assert later.result(60).json()["choices"][0]["finish_reason"] == "length"
        assert first.result(60).json()["choices"][0]["finish_reason"] == reason
        assert server.get("/is_paused").json() == {"is_paused": False}
        server.assert_all_free()


def test_the_metrics_tell_of_a_pause(server: Server) -> None:
    assert paused(server) == 0
    server.post("/pause", None)
    for _ in range(1_200):
        if paused(server):
            break
        threading.Event().wait(0.05)
    assert paused(server) == 1
    server.post("/resume", None)


def test_a_wrong_mode_is_refused_by_name(server: Server) -> None:
    wrong = server.post("/pause?mode=later", None)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "mode")


def test_a_pause_forgets_prefixes_unless_told_otherwise(tmp_path: Path) -> None:
    prompt = {"prompt": list(range(3, 83)), "max_tokens": 1}

    def cached(server: Server, query: str) -> int:
        server.post("/pause" + query, None)
        server.post("/resume", None)
        usage = server.post("/v1/completions", prompt).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    with running(tmp_path) as server:
        queries = ("", "?clear_cache=false", "?mode=keep", "?mode=wait")
        assert [cached(server, query) for query in queries] == [0, 64, 64, 0]
