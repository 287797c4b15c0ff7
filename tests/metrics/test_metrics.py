"""Numbers are exact, names are those that dashboards use."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.engine.metrics.histogram import Histogram, steps_of_1_2_5
from quire.engine.metrics.log_line import StatsLogLine
from quire.engine.metrics.prometheus import Exposition
from quire.engine.metrics.server_stats import ServerStats
from quire.engine.metrics.stats import Stats
from quire.foundation.config import CacheConfig
from quire.foundation.messages.from_engine import STEP_TOKEN_BOUNDS, WORK_BOUNDS_S, End, Heartbeat, Load
from quire.foundation.messages.to_engine import Add
from quire.sampling_params import SamplingParams


def scrape(stats: Stats | ServerStats) -> dict[str, float]:
    stats = ServerStats([stats]) if isinstance(stats, Stats) else stats
    text = Exposition(stats, "tiny", CacheConfig()).text().decode()
    values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.startswith(("http_", "process_")):
                assert sample.labels.pop("model_name") == "tiny"
                assert sample.labels.pop("engine") == "0"
            extra = (
                " ".join(value for _, value in sorted(sample.labels.items()))
                if family.name != "vllm:cache_config_info"
                else ""
            )
            values[f"{sample.name}/{extra}" if extra else sample.name] = sample.value
    return values


def one_request(stats: Stats) -> None:
    add = Add(1, [5] * 10, 10, SamplingParams(max_tokens=4), [], 0, arrival=100.0)
    progress = stats.start_sequence(add)
    for tokens, now in ((1, 100.5), (0, 100.6), (2, 100.7), (1, 100.8)):
        stats.record_tokens(progress, tokens, now)
        stats.record_delivered(progress, tokens)
    progress.end = End(1, "length", queued_s=0.1, prefill_s=0.4, decode_s=0.3)
    for reason in ("length", "abort"):  # only the first counts
        stats.finish_sequence(progress, reason, 100.8)


def test_one_request_is_counted_to_the_token() -> None:
    stats = Stats()
    stats.set_max_model_len(2_000)
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
    assert values["vllm:request_params_n_bucket/1.0"] == 1
    assert values["vllm:request_inference_time_seconds_sum"] == pytest.approx(0.7)
    assert values["vllm:request_params_max_tokens_bucket/5.0"] == 1


def test_the_choices_of_a_prompt_are_one_family() -> None:
    stats = Stats()
    stats.set_max_model_len(2_000)
    params = SamplingParams(n=3, max_tokens=50)
    parents = {1: None, 2: 1, 3: 1}
    each = [
        stats.start_sequence(Add(i, [5] * 10, 10, params, [], 0, 0.0, fork_of=parent)) for i, parent in parents.items()
    ]
    for progress, tokens, cached in zip(each, (3, 30, 8), (0, 9, 9), strict=True):
        stats.record_tokens(progress, tokens + 5, 1.0, cached)
        stats.record_delivered(progress, tokens)  # a stop string: the rest is not wanted
    stats.finish_sequence(each[1], "stop", 2.0)
    stats.finish_sequence(each[0], "abort", 2.0)
    assert scrape(stats)["vllm:request_params_n_count"] == 0
    stats.finish_sequence(each[2], "length", 2.0)
    values = scrape(stats)
    assert values["vllm:request_params_n_sum"] == 3
    assert values["vllm:request_params_n_count"] == 1
    assert values["vllm:request_max_num_generation_tokens_sum"] == 30
    assert values["vllm:request_generation_tokens_sum"] == values["vllm:generation_tokens_total"] == 41
    assert values["vllm:prompt_tokens_total"] == 30
    assert values["vllm:prompt_tokens_cached_total"] == 18
    assert values["vllm:prompt_tokens_by_source_total/local_cache_hit"] == 18
    assert values["vllm:prompt_tokens_by_source_total/local_compute"] == 12
    assert values["vllm:request_prefill_kv_computed_tokens_sum"] == 12


def test_load_is_what_the_engine_said_last() -> None:
    stats = Stats()
    load = Load(
        running=3, waiting=5, free_blocks=25, num_blocks=100, preemptions=7, prefix_queries=200, prefix_hits=50,
        free_host_blocks=9, num_host_blocks=40, deferred=2, unwritten_tokens=60, block_size=16, ready_host_blocks=10,
    )  # fmt: skip
    stats.record_heartbeat(Heartbeat(0.0, 0.0, load, [0, 2, *[0] * 12], 9, [4, 0, 3, *[0] * 10], 0.02, 0.004))
    values = scrape(stats)
    for name, value in {
        "num_requests_running": 3, "num_requests_waiting": 5, "num_requests_waiting_by_reason/capacity": 3,
        "num_requests_waiting_by_reason/deferred": 2, "kv_cache_usage_perc": 0.75, "gpu_cache_usage_perc": 0.75,
        "cpu_cache_usage_perc": 0.1, "kv_cache_waste_perc": 60 / (75 * 16), "num_preemptions_total": 7,
        "prefix_cache_queries_total": 200, "prefix_cache_hits_total": 50, "gpu_prefix_cache_hit_rate": 0.25,
        "cpu_prefix_cache_hit_rate": 0.25, "iteration_tokens_total_count": 2, "iteration_tokens_total_sum": 9,
        "iteration_tokens_total_bucket/1.0": 0, "iteration_tokens_total_bucket/8.0": 2,
    }.items():  # fmt: skip
        assert values[f"vllm:{name}"] == pytest.approx(value), name
    for name, value in {
        "engine_turn_cpu_seconds_count": 7, "engine_turn_cpu_seconds_sum": 0.02,
        "engine_turn_cpu_seconds_bucket/0.002": 4, "engine_turn_cpu_seconds_bucket/0.005": 7,
        "longest_engine_turn_cpu_seconds": 0.004,
    }.items():  # fmt: skip
        assert values[f"quire:{name}"] == pytest.approx(value), name


def test_http_answers_are_counted_by_what_cannot_be_invented() -> None:
    stats = ServerStats([Stats()])
    stats.http.answered("POST", "/v1/completions", 200, 0.3)
    stats.http.answered("POST", "/v1/completions", 201, 0.7)
    stats.http.answered("BREW", None, 404, 0.0)
    values = scrape(stats)
    assert values["http_requests_total//v1/completions POST 2xx"] == 2
    assert values["http_requests_total/none OTHER 4xx"] == 1
    assert values["http_request_duration_seconds_bucket//v1/completions 0.5 POST"] == 1
    assert values["http_request_duration_seconds_sum//v1/completions POST"] == 1.0


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
    line = StatsLogLine(stats, now=90.0)
    assert line.since_last(100.0) is None
    one_request(stats)
    assert line.since_last(110.0) == (
        "prompt 1.0 tokens/s, generation 0.4 tokens/s, running 0, waiting 0, KV cache 0.0%, "
        "prefix cache hits 0.0%, preemptions 0"
    )
    assert scrape(stats)["vllm:avg_prompt_throughput_toks_per_s"] == 1.0
    assert scrape(stats)["vllm:avg_generation_throughput_toks_per_s"] == 0.4
    assert line.since_last(120.0) is None
    assert scrape(stats)["vllm:avg_generation_throughput_toks_per_s"] == 0.0
    stats.load = Load(running=1, prefix_queries=80, prefix_hits=20)
    assert "prefix cache hits 25.0%" in str(line.since_last(130.0))
    stats.load = Load(running=1, prefix_queries=100, prefix_hits=20)
    assert "prefix cache hits 0.0%" in str(line.since_last(140.0))


def test_when_an_engine_dies_nothing_runs_and_its_successor_counts_from_zero() -> None:
    stats = Stats()
    steps = [0, 3] + [0] * (len(STEP_TOKEN_BOUNDS) - 1)
    load = Load(running=3, waiting=1, deferred=1, free_blocks=25, num_blocks=100, preemptions=7, prefix_queries=200,
                prefix_hits=50, unwritten_tokens=9, block_size=16, tokens_per_s=50.0)  # fmt: skip
    stats.record_heartbeat(Heartbeat(1.0, 1.0, load, steps, 30, [2] + [0] * len(WORK_BOUNDS_S), 0.5, 0.4))
    for epoch in (1, 2):  # the next one dies before it has said anything
        stats.record_engine_death(epoch, waiting=4, queued_tokens=100)
        values = scrape(stats)
        assert values["vllm:num_requests_running"] == values["vllm:kv_cache_usage_perc"] == 0
        assert values["vllm:kv_cache_waste_perc"] == values["vllm:num_requests_waiting_by_reason/deferred"] == 0
        assert values["vllm:num_requests_waiting"] == 4
        assert values["quire:queue_seconds"] == 2.0
        assert values["quire:process_restarts_total/engine"] == epoch
    stats.record_heartbeat(
        Heartbeat(2.0, 2.0, Load(num_blocks=100, preemptions=1, prefix_queries=10, prefix_hits=10), steps, 5,
                  [1] + [0] * len(WORK_BOUNDS_S), 0.25, 0.3)
    )  # fmt: skip
    values = scrape(stats)
    assert values["vllm:num_preemptions_total"] == 1
    assert (values["vllm:prefix_cache_queries_total"], values["vllm:prefix_cache_hits_total"]) == (10, 10)
    assert (values["vllm:iteration_tokens_total_count"], values["vllm:iteration_tokens_total_sum"]) == (3, 5)
    assert values["quire:engine_turn_cpu_seconds_count"] == 1
    assert values["quire:longest_engine_turn_cpu_seconds"] == 0.3


def test_a_process_goes_on_counting_what_belongs_to_no_model() -> None:
    old, new = ServerStats([Stats()]), ServerStats([Stats()])
    old.http.answered("POST", "/v1/completions", 200, 0.3)
    old.callbacks.observe(0.1)
    old.swaps.done = 1
    one_request(old.engines[0])
    new.continue_counts(old)
    values = scrape(new)
    assert values["http_requests_total//v1/completions POST 2xx"] == 1
    assert values["quire:event_loop_callback_cpu_seconds_count"] == 1
    assert values["quire:model_swaps_total/done"] == 1
    assert values["vllm:generation_tokens_total"] == 0
