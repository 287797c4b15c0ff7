"""What processes have counted together: sums of what requests bring, and what an engine says stands there once."""

from __future__ import annotations

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from quire.engine.metrics.prometheus import Exposition
from quire.engine.metrics.server_stats import ServerStats, total
from quire.engine.metrics.stats import Stats
from quire.foundation.config import CacheConfig
from quire.foundation.messages.from_engine import STEP_TOKEN_BOUNDS, End, Heartbeat, Load
from quire.foundation.messages.to_engine import Add
from quire.sampling_params import SamplingParams


def process(engines: int = 1, **buckets: list[float]) -> ServerStats:
    stats = ServerStats([Stats(number) for number in range(engines)])
    for each in stats.engines:
        each.set_buckets(buckets)
        each.set_max_model_len(512)
    return stats


def serve(stats: ServerStats, tokens: int, engine: int = 0) -> None:
    """One request of so many tokens, from its prompt to its end."""
    of_engine = stats.engines[engine]
    add = Add(1, [1, 2, 3], 3, SamplingParams(max_tokens=tokens), [], 0, arrival=0.0)
    sequence = of_engine.start_sequence(add)
    of_engine.record_tokens(sequence, tokens, 0.5)
    of_engine.record_delivered(sequence, tokens)
    sequence.end = End(1, "length")
    of_engine.finish_sequence(sequence, "length", 1.0)
    stats.http.answered("POST", "/v1/completions", 200, 0.2)


def sent(stats: ServerStats) -> ServerStats:
    """As another process reads it."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=ServerStats)


def together(*processes: ServerStats) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """The page of all of them, by name and labels."""
    return page_of(total([sent(each) for each in processes]))


def page_of(stats: ServerStats) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    page = Exposition(stats, "tiny", CacheConfig()).text().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def value(page: dict[tuple[str, tuple[tuple[str, str], ...]], float], name: str, **labels: str) -> float:
    found = [each for (known, its), each in page.items() if known == name and labels.items() <= dict(its).items()]
    assert len(found) == 1, (name, labels, found)
    return found[0]


def beat(step: int, **load: int) -> Heartbeat:
    buckets = [0] * (len(STEP_TOKEN_BOUNDS) + 1)
    buckets[0] = step
    return Heartbeat(0.0, 0.0, Load(step=step, num_blocks=8, free_blocks=8, **load), buckets, step)


def test_what_requests_bring_is_added_and_what_engines_say_is_not() -> None:
    first, second = process(2), process(2)
    serve(first, 5)
    serve(second, 7)
    serve(second, 7, engine=1)
    for stats, step in ((first, 3), (second, 4)):  # the second has heard the engine a moment later
        stats.engines[0].record_heartbeat(beat(step, running=step, prefix_queries=10 * step))
    first.rejections["tokens"] += 2
    second.rejections["tokens"] += 1
    for order in ((first, second), (second, first)):
        page = together(*order)
        assert value(page, "vllm:generation_tokens_total", engine="0") == 12
        assert value(page, "vllm:generation_tokens_total", engine="1") == 7
        assert value(page, "vllm:request_success_total", engine="0", finished_reason="length") == 2
        assert value(page, "vllm:time_to_first_token_seconds_count", engine="0") == 2
        assert value(page, "vllm:request_generation_tokens_bucket", engine="0", le="5.0") == 1
        assert value(page, "vllm:num_requests_running", engine="0") == 4
        assert value(page, "vllm:prefix_cache_queries_total", engine="0") == 40
        assert value(page, "vllm:iteration_tokens_total_count", engine="0") == 4
        assert value(page, "vllm:admission_rejections_total", reason="tokens") == 3
        assert value(page, "http_requests_total", handler="/v1/completions") == 3
        assert value(page, "quire:process_restarts_total", process="api") == 0


def test_while_an_engine_is_replaced_the_requests_that_wait_are_those_of_all_processes() -> None:
    first, second = process(), process()
    for stats, waiting in ((first, 3), (second, 4)):
        stats.engines[0].record_heartbeat(beat(9, running=7, preemptions=5))
        stats.engines[0].record_engine_death(1, waiting, 10 * waiting)
    late = process()  # has not heard of the death
    late.engines[0].record_heartbeat(beat(9, running=7, preemptions=5))
    page = together(late, first, second)
    assert value(page, "vllm:num_requests_waiting", engine="0") == 7
    assert value(page, "vllm:num_requests_running", engine="0") == 0
    assert value(page, "vllm:num_preemptions_total", engine="0") == 5


def test_of_a_process_that_has_ended_only_counters_are_left() -> None:
    here, gone = process(), process()
    for stats in (here, gone):
        serve(stats, 5)
        stats.callbacks.observe(0.5)
        stats.rejections["requests"] += 1
        stats.api_restarts += 1
        stats.process = {"process_cpu_seconds_total": 4.0, "process_resident_memory_bytes": 100.0}
    here.engines[0].record_heartbeat(beat(3, running=1))
    gone.engines[0].record_heartbeat(beat(2, running=2))
    gone.engines[0].prompt_rate = 7.0
    page = page_of(total([here], [sent(gone)]))
    assert value(page, "vllm:generation_tokens_total") == 10
    assert value(page, "vllm:request_generation_tokens_count") == 2
    assert value(page, "vllm:admission_rejections_total", reason="requests") == 2
    assert value(page, "quire:event_loop_callback_cpu_seconds_count") == 2
    assert value(page, "http_requests_total", handler="/v1/completions") == 2
    assert value(page, "process_cpu_seconds_total") == 8
    assert value(page, "process_resident_memory_bytes") == 100
    assert value(page, "vllm:num_requests_running") == 1
    assert value(page, "vllm:avg_prompt_throughput_toks_per_s") == 0
    assert value(page, "quire:process_restarts_total", process="api") == 1


def test_no_counter_of_an_engine_goes_back_when_the_process_that_heard_it_last_is_gone() -> None:
    here, gone = process(), process()
    here.engines[0].record_heartbeat(beat(3, prefix_queries=30))
    gone.engines[0].record_heartbeat(beat(4, prefix_queries=40))
    page = page_of(total([here], [sent(gone)]))
    assert value(page, "vllm:iteration_tokens_total_count") == 4
    assert value(page, "vllm:prefix_cache_queries_total") == 40
    here.engines[0].record_engine_death(1, 0, 0)  # its successor counts from zero, whatever the other one had heard
    here.engines[0].record_heartbeat(beat(1, prefix_queries=10))
    assert value(page_of(total([here], [sent(gone)])), "vllm:iteration_tokens_total_count") == 1


def test_a_process_that_has_not_heard_how_long_sequences_are_changes_no_scale() -> None:
    early, late = ServerStats([Stats()]), process()
    for served in (False, True):
        if served:
            serve(late, 5)
        for order in ((early, late), (late, early)):
            page = together(*order)
            assert value(page, "vllm:request_generation_tokens_bucket", le="500.0") == served


def test_buckets_of_one_s_own_stay_when_processes_are_added_up() -> None:
    own: dict[str, list[float]] = {"time_to_first_token": [0.1, 0.6], "request_tokens": [2.0, 4.0]}
    first, second = process(**own), process(**own)
    serve(first, tokens=3)
    serve(second, tokens=5)
    page = together(first, second)
    assert value(page, "vllm:time_to_first_token_seconds_bucket", le="0.1") == 0
    assert value(page, "vllm:time_to_first_token_seconds_bucket", le="0.6") == 2
    assert value(page, "vllm:request_generation_tokens_bucket", le="4.0") == 1
    bounds = {dict(its)["le"] for name, its in page if name == "vllm:request_prompt_tokens_bucket"}
    assert bounds == {"2.0", "4.0", "+Inf"}
    assert value(page, "vllm:e2e_request_latency_seconds_bucket", le="0.3") == 0  # others have vLLM's
