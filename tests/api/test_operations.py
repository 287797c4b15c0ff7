"""Routes for operators: what they say, and that they are not there for everybody."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.api.server import KEY, Server, running

ROUTES = [("GET", "/server_info"), ("POST", "/reset_prefix_cache")]


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
