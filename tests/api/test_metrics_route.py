"""What /metrics shows equals what was served."""

from __future__ import annotations

import json
import time
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.api.server import Pace, Server, running


def scrape(server: Server) -> dict[str, float]:
    answer = server.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = text_string_to_metric_families(answer.text)
    return {
        "/".join((s.name, *(v for k, v in sorted(s.labels.items()) if k not in ("model_name", "engine")))): s.value
        for family in families
        for s in family.samples
    }


def test_counters_are_exact_to_the_token(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        prompt = generated = 0
        for i in range(5):
            usage = server.post("/v1/completions", {"prompt": "abc", "max_tokens": 7 + i, "n": 2}).json()["usage"]
            prompt, generated = prompt + 2 * usage["prompt_tokens"], generated + usage["completion_tokens"]
        server.assert_all_free()
        values = scrape(server)
        assert values["vllm:prompt_tokens_total"] == prompt
        assert values["vllm:generation_tokens_total"] == generated
        assert values["vllm:request_success_total/length"] == 10
        assert values["vllm:time_to_first_token_seconds_count"] == 10
        assert values["vllm:num_requests_running"] == values["vllm:num_requests_waiting"] == 0
        assert values["http_requests_total//v1/completions/POST/2xx"] == 5


def test_stop_strings_count_what_usage_says(tmp_path: Path) -> None:
    """Text goes abcdef…, so the stop string ends each after a few tokens, whatever the engine drew meanwhile."""
    with running(tmp_path) as server:
        generated = 0
        for stop in ("h", "ijk", "z"):
            answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 60, "stop": stop}).json()
            assert answer["choices"][0]["finish_reason"] == "stop"
            generated += answer["usage"]["completion_tokens"]
        server.assert_all_free()
        values = scrape(server)
        assert values["vllm:generation_tokens_total"] == generated < 60
        assert values["vllm:request_generation_tokens_sum"] == generated
        assert values["vllm:request_success_total/stop"] == 3


def test_who_hangs_up_is_counted_until_then(tmp_path: Path) -> None:
    with running(tmp_path, sample=Pace()) as server:
        body = {"prompt": "abc", "max_tokens": 400, "stream": True, "ignore_eos": True}
        seen = 0
        with server.http.stream("POST", server.url + "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                seen += line.startswith("data: {")
                if seen == 10:
                    break
        server.assert_all_free()
        values = scrape(server)
        assert values["vllm:request_success_total/abort"] == 1
        assert values["vllm:prompt_tokens_total"] == values["vllm:request_prompt_tokens_sum"]
        assert 10 <= values["vllm:generation_tokens_total"] < 400
        assert values["vllm:generation_tokens_total"] == values["vllm:request_generation_tokens_sum"]


def test_cached_tokens_are_those_of_usage(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        prompt = list(range(5, 105))
        cached = []
        for salt in ("one", "one", "two"):
            body = {"prompt": prompt, "max_tokens": 2, "cache_salt": salt}
            usage = server.post("/v1/completions", body).json()["usage"]
            cached.append((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        assert cached == [0, 96, 0]
        server.assert_all_free()
        values = scrape(server)
        assert values["vllm:prompt_tokens_total"] == 300
        assert values["vllm:prompt_tokens_cached_total"] == 96
        assert values["vllm:prompt_tokens_by_source_total/local_cache_hit"] == 96
        assert values["vllm:prompt_tokens_by_source_total/local_compute"] == 204
        assert values["vllm:request_prefill_kv_computed_tokens_sum"] == 204
        assert (values["vllm:prefix_cache_queries_total"], values["vllm:prefix_cache_hits_total"]) == (300, 96)
        assert values["vllm:gpu_prefix_cache_hit_rate"] == values["vllm:cpu_prefix_cache_hit_rate"] == 96 / 300


def test_steps_are_counted_by_their_tokens(tmp_path: Path) -> None:
    """Each request moves forward by its prompt and all outputs but the last."""
    with running(tmp_path) as server:
        for _ in range(3):
            server.post("/v1/completions", {"prompt": list(range(40)), "max_tokens": 5, "cache_salt": str(_)})
        server.assert_all_free()
        for _ in range(1_200):  # comes with the engine's next heartbeat
            values = scrape(server)
            if values["vllm:iteration_tokens_total_sum"] == 3 * (40 + 4):
                break
            time.sleep(0.05)
        assert values["vllm:iteration_tokens_total_sum"] == 3 * (40 + 4)
        assert values["vllm:iteration_tokens_total_count"] == 3 * 5


def test_wrong_requests_are_http_answers_and_nothing_else(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": -1}).status_code == 400
        assert server.get("/no/such/page").status_code == 404
        server.http.request("BREW", server.url + "/v1/models")
        values = scrape(server)
        assert values["http_requests_total//v1/completions/POST/4xx"] == 1
        assert values["http_requests_total/none/GET/4xx"] == 1
        assert not any("BREW" in name or "/metrics" in name for name in values), json.dumps(sorted(values))
        assert (
            values["vllm:prompt_tokens_total"] == sum(values[f"vllm:request_success_total/{r}"] for r in ("stop",)) == 0
        )
