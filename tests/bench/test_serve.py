"""`quire bench serve` as it is typed, against a server that does what the test says."""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import main
from tests.bench.scripted_server import HEAD, Body, ScriptedServer, text_event, tokens


def bench(server: ScriptedServer, *arguments: str) -> int:
    """Its exit code."""
    usual = ["--port", str(server.port), "--input-len", "6", "--output-len", "4"]
    with pytest.raises(SystemExit) as ended:
        main(["bench", "serve", *usual, *arguments])
    return int(ended.value.code or 0)


def result(directory: Path, server: ScriptedServer, *arguments: str) -> dict[str, Any]:
    file = directory / "result.json"
    code = bench(server, "--save-result", "--result-dir", str(directory), "--result-filename", file.name, *arguments)
    found: dict[str, Any] = json.loads(file.read_text())
    assert code == (1 if found["failed"] else 0)
    return found


def test_figures_are_those_of_the_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer(lambda body, writer: tokens(body, writer, gap=0.02)) as server:
        found = result(tmp_path, server, "--num-prompts", "8", "--save-detailed", "--metric-percentiles", "50,99.9")
    assert (found["completed"], found["failed"], found["num_prompts"]) == (8, 0, 8)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (48, 32)
    assert found["request_throughput"] == pytest.approx(8 / found["duration"])
    assert found["output_throughput"] == pytest.approx(32 / found["duration"])
    assert found["total_token_throughput"] == pytest.approx(80 / found["duration"])
    assert found["max_concurrent_requests"] == 8
    assert found["median_itl_ms"] == pytest.approx(1e3 * statistics.median(chain(*found["itls"])))
    assert found["mean_ttft_ms"] + 3 * found["mean_tpot_ms"] == pytest.approx(found["mean_e2el_ms"])
    assert found["p99.9_e2el_ms"] >= found["p50_e2el_ms"] == pytest.approx(found["median_e2el_ms"])
    assert found["generated_texts"] == ["xxxx"] * 8
    assert [len(gaps) for gaps in found["itls"]] == [3] * 8
    assert found["machine"]["cores"] >= 1
    assert found["versions"]["quire"]
    assert found["settings"]["num_prompts"] == 8
    out, err = capsys.readouterr()
    assert "P99.9 TTFT" in out
    assert "Prefix cache hits" in out
    assert "Seed (new for this run)" in out
    assert err == ""


def test_prompts_are_token_ids_of_the_served_vocabulary_and_new_each_time() -> None:
    with ScriptedServer() as server:
        bench(server, "--num-prompts", "5")
        bench(server, "--num-prompts", "5")
        bench(server, "--num-prompts", "5", "--seed", "3")
        bench(server, "--num-prompts", "5", "--seed", "3")
    prompts = [body["prompt"] for body in server.bodies]
    assert all(len(prompt) == 6 and all(0 < token < 127 for token in prompt) for prompt in prompts)
    assert len({str(prompt) for prompt in prompts[:10]}) == 10
    assert sorted(prompts[10:15]) == sorted(prompts[15:])
    assert {body["model"] for body in server.bodies} == {"tiny"}


def test_chat_sends_text_of_the_served_tokenizer() -> None:
    with ScriptedServer() as server:
        assert bench(server, "--num-prompts", "2", "--backend", "openai-chat") == 0
    assert all(len(body["messages"][0]["content"]) == 6 for body in server.bodies)


def test_sampling_body_headers_and_key_are_sent(tmp_path: Path) -> None:
    with ScriptedServer() as server:
        found = result(
            tmp_path, server, "--num-prompts=1", "--temperature=0.7", "--top-p=0.9", "--top-k=5", "--ignore-eos",
            "--extra-body", '{"logit_bias": {"3": 1}}', "--header", "X-Tenant=a=b", "--api-key", "hidden", "--model=m",
            "--vocab-size=50", "--metadata", "run=7",
        )  # fmt: skip
    body = server.bodies[0]
    assert (body["temperature"], body["top_p"], body["top_k"], body["ignore_eos"]) == (0.7, 0.9, 5, True)
    assert body["logit_bias"] == {"3": 1}
    assert "min_p" not in body
    assert max(body["prompt"]) < 50
    assert "x-tenant: a=b" in server.headers[0].lower()
    assert "authorization: bearer hidden" in server.headers[0].lower()
    assert "hidden" not in json.dumps(found)
    assert (found["model_id"], found["metadata"]) == ("m", {"run": "7"})


def test_warm_ups_are_sent_before_with_prompts_of_their_own(tmp_path: Path) -> None:
    with ScriptedServer() as server:
        found = result(tmp_path, server, "--num-prompts", "4", "--num-warmups", "3")
    assert found["completed"] == 4
    assert len({str(body["prompt"]) for body in server.bodies}) == 7


def test_arrivals_follow_the_rate_and_concurrency_is_kept(tmp_path: Path) -> None:
    with ScriptedServer() as server:
        found = result(tmp_path, server, "--num-prompts=21", "--request-rate=50", "--burstiness=100", "--save-detailed")
        assert 0.3 < found["start_times"][-1] < 0.5 + found["latest_send_s"], "as late as this client was"
        assert found["request_rate"] == "50"
    with ScriptedServer(lambda body, writer: tokens(body, writer, gap=0.005)) as server:
        assert result(tmp_path, server, "--num-prompts=8", "--max-concurrency=2")["max_concurrent_requests"] == 2
    assert server.max_open == 2


def test_goodput_counts_requests_that_keep_every_limit(tmp_path: Path) -> None:
    async def one_in_two_is_slow(body: Body, writer: asyncio.StreamWriter) -> None:
        await tokens(body, writer, gap=0.05 if sum(body["prompt"]) % 2 else 0.0)

    with ScriptedServer(one_in_two_is_slow) as server:
        limits = ("--goodput", "tpot:25", "e2el:5000")
        found = result(tmp_path, server, "--num-prompts=20", "--save-detailed", *limits)
    fast = sum(statistics.mean(gaps) <= 0.025 for gaps in found["itls"])  # on a machine that keeps up, half of them
    assert 0 < fast < 20
    assert found["request_goodput"] * found["duration"] == pytest.approx(fast)


@pytest.mark.parametrize("flags", [[], ["--ignore-eos"]])
def test_answers_without_text_are_completed(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def only_an_end(body: Body, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD.format(status=200, kind="text/event-stream").encode())
        writer.write(text_event("", "stop") + b"data: [DONE]\n\n")

    with ScriptedServer(only_an_end) as server:
        found = result(tmp_path, server, "--num-prompts=4", "--plot", str(tmp_path / "plot.svg"), *flags)
    assert (found["completed"], found["failed"]) == (4, 0)
    assert found["mean_e2el_ms"] > 0
    said = capsys.readouterr().err
    assert "4 answer(s) had no text" in said
    assert ("--ignore-eos makes it go on" in said) is not bool(flags)


def test_failures_are_counted_shown_and_end_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def some_fail(body: Body, writer: asyncio.StreamWriter) -> None:
        if random.Random(str(body["prompt"])).random() < 0.5:
            writer.write(HEAD.format(status=400, kind="text/plain").encode() + b'{"error": {"message": "too odd"}}')
        else:
            await tokens(body, writer)

    with ScriptedServer(some_fail) as server:
        found = result(tmp_path, server, "--num-prompts=20", "--save-detailed")
    assert 0 < found["failed"] < 20
    assert found["completed"] + found["failed"] == 20
    assert found["errors"].count("HTTP 400: too odd") == found["failed"]
    assert f"{found['failed']} request(s) failed: HTTP 400: too odd" in capsys.readouterr().err
    assert not math.isnan(found["mean_ttft_ms"])


def test_help_of_a_prefix_cache_is_flagged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = 'vllm:prefix_cache_queries_total{{engine="{e}"}} {q}\nvllm:prefix_cache_hits_total{{engine="{e}"}} {h}\n'

    async def counted(body: Body, writer: asyncio.StreamWriter) -> None:
        server.metrics = page.format(e=0, q=100, h=60) + page.format(e=1, q=100, h=30)
        await tokens(body, writer)

    with ScriptedServer(counted) as server:
        server.metrics = "# HELP\n" + page.format(e=0, q=50, h=0) + page.format(e=1, q=50, h=0)
        found = result(tmp_path, server, "--num-prompts", "2")
    assert found["prefix_cache_hit_rate"] == pytest.approx(0.9)
    out, err = capsys.readouterr()
    assert "90.0%" in out
    assert "came from the prefix cache" in err


def test_cache_hits_in_usage_count_where_there_are_no_metrics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ScriptedServer(lambda body, writer: tokens(body, writer, cached=3)) as server:
        assert result(tmp_path, server, "--num-prompts", "2")["prefix_cache_hit_rate"] == 0.5
    capsys.readouterr()
    with ScriptedServer() as server:
        assert bench(server, "--num-prompts", "1", "--seed", "1") == 0
    assert "--seed was given" in capsys.readouterr().err


def test_a_plot_and_results_a_line_each(tmp_path: Path) -> None:
    lines = tmp_path / "all.jsonl"
    with ScriptedServer() as server:
        for _ in range(2):
            appended = ["--append-result", "--result-filename", str(lines)]
            assert bench(server, "--num-prompts", "3", "--plot", str(tmp_path / "new" / "p.svg"), *appended) == 0
        assert bench(server, "--num-prompts", "3", "--save-result", "--result-dir", str(tmp_path), "--label", "x") == 0
    assert [json.loads(line)["completed"] for line in lines.read_text().splitlines()] == [3, 3]
    assert "<svg" in (tmp_path / "new" / "p.svg").read_text()
    assert len(list(tmp_path.glob("x-infqps-tiny-*.json"))) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--goodput", "speed:3"], "--goodput"),
        (["--goodput", "ttft:fast"], "--goodput"),
        (["--percentile-metrics", "ttft,xyz"], "xyz"),
        (["--metric-percentiles", "101"], "--metric-percentiles"),
        (["--header", "nothing"], "--header"),
        (["--metadata", "nothing"], "--metadata"),
        (["--request-rate", "0"], "--request-rate"),
        (["--num-prompts", "0"], "--num-prompts"),
        (["--plot-timeline"], "Did you mean --plot?"),
        (["--dataset-name", "sonnet"], "sonnet"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer() as server:
        assert bench(server, *arguments) == 2
    assert server.bodies == []
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("quire: error: ")
    assert said in line


def test_a_server_that_is_not_ready_or_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer() as server:
        server.health = 503
        assert bench(server) == 1
        assert "--ready-check-timeout-sec" in capsys.readouterr().err
    assert bench(server) == 1
    assert "quire serve" in capsys.readouterr().err
