"""Numbers are exact, names are those that dashboards use."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.config import CacheConfig
from quire.messages import Add, End, Load
from quire.metrics.histogram import Histogram, steps_of_1_2_5
from quire.metrics.log_line import LoadLine
from quire.metrics.prometheus import Exposition
from quire.metrics.stats import Stats
from quire.sampling import SamplingParams

NAMES = {
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc",
    "vllm:prompt_tokens", "vllm:generation_tokens", "vllm:num_preemptions", "vllm:request_success",
    "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds", "vllm:time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds", "vllm:request_queue_time_seconds", "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds", "vllm:request_prompt_tokens", "vllm:request_generation_tokens",
    "vllm:request_params_n", "vllm:request_params_max_tokens", "vllm:cache_config_info",
}  # fmt: skip


def scrape(stats: Stats) -> dict[str, float]:
    text = Exposition(stats, "tiny", CacheConfig()).text().decode()
    values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels["model_name"] == "tiny"
            assert sample.labels["engine"] == "0"
            extra = sample.labels.get("finished_reason") or sample.labels.get("le")
            values[f"{sample.name}/{extra}" if extra else sample.name] = sample.value
    return values


def one_request(stats: Stats) -> None:
    add = Add(1, [5] * 10, 10, SamplingParams(n=2, max_tokens=4), [], 0, arrival=100.0)
    progress = stats.began(add)
    for tokens, now in ((1, 100.5), (0, 100.6), (2, 100.7), (1, 100.8)):
        stats.gained(progress, tokens, now)
    stats.finished(progress, "length", 100.8, End(1, "length", queued_s=0.1, prefill_s=0.4, decode_s=0.3))


def test_every_name_is_there_from_the_start() -> None:
    text = Exposition(Stats(), "tiny", CacheConfig()).text().decode()
    assert {family.name for family in text_string_to_metric_families(text)} == NAMES


def test_one_request_is_counted_to_the_token() -> None:
    stats = Stats()
    stats.size(2_000)
    one_request(stats)
    values = scrape(stats)
    assert values["vllm:prompt_tokens_total"] == 10
    assert values["vllm:generation_tokens_total"] == 4
    assert values["vllm:request_success_total/length"] == 1
    assert values["vllm:request_success_total/stop"] == 0
    assert values["vllm:time_to_first_token_seconds_sum"] == pytest.approx(0.5)
    assert values["vllm:inter_token_latency_seconds_count"] == 2
    assert values["vllm:inter_token_latency_seconds_sum"] == pytest.approx(0.3)
    assert values["vllm:request_time_per_output_token_seconds_sum"] == pytest.approx(0.1)
    assert values["vllm:time_per_output_token_seconds_sum"] == pytest.approx(0.1)
    assert values["vllm:e2e_request_latency_seconds_sum"] == pytest.approx(0.8)
    assert values["vllm:request_queue_time_seconds_sum"] == pytest.approx(0.1)
    assert values["vllm:request_params_n_bucket/2.0"] == 1
    assert values["vllm:request_params_n_bucket/1.0"] == 0
    assert values["vllm:request_params_max_tokens_bucket/5.0"] == 1


def test_load_is_what_the_engine_said_last() -> None:
    stats = Stats()
    stats.load = Load(running=3, waiting=2, free_blocks=25, num_blocks=100, preemptions=7)
    values = scrape(stats)
    assert values["vllm:num_requests_running"] == 3
    assert values["vllm:num_requests_waiting"] == 2
    assert values["vllm:kv_cache_usage_perc"] == values["vllm:gpu_cache_usage_perc"] == 0.75
    assert values["vllm:num_preemptions_total"] == 7


def test_histograms_count_at_and_under_each_bound() -> None:
    histogram = Histogram([1, 2, 5])
    for value in (0.5, 1, 1.5, 5, 9):
        histogram.observe(value)
    assert histogram.cumulative() == [("1.0", 2), ("2.0", 3), ("5.0", 4), ("+Inf", 5)]
    assert (histogram.count, histogram.sum) == (5, 17)
    assert steps_of_1_2_5(120) == [1, 2, 5, 10, 20, 50, 100]
    assert steps_of_1_2_5(0) == [1]


def test_the_line_is_silent_when_nothing_happens() -> None:
    stats = Stats()
    line = LoadLine(stats, now=90.0)
    assert line.since_last(100.0) is None
    one_request(stats)
    assert line.since_last(110.0) == (
        "prompt 1.0 tokens/s, generation 0.4 tokens/s, running 0, waiting 0, KV cache 0.0%, preemptions 0"
    )
    assert line.since_last(120.0) is None
    stats.load = Load(running=1)
    assert line.since_last(130.0) is not None
