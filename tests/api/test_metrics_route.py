"""What /metrics shows equals what was served."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.api.server import Server, running


def scrape(server: Server) -> dict[str, float]:
    answer = server.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = text_string_to_metric_families(answer.text)
    return {s.name + s.labels.get("finished_reason", ""): s.value for family in families for s in family.samples}


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
        assert values["vllm:request_success_totallength"] == 10
        assert values["vllm:time_to_first_token_seconds_count"] == 10
        assert values["vllm:num_requests_running"] == values["vllm:num_requests_waiting"] == 0
