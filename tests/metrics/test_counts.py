"""What processes have counted, beside and after each other: sums of what requests bring, and no counter goes back."""

from __future__ import annotations

import itertools

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from quire.engine.metrics.counts import Counts, continue_after, count_of, total
from quire.engine.metrics.prometheus import Exposition
from quire.engine.metrics.server_stats import ServerStats
from quire.engine.metrics.stats import Stats
from quire.foundation.config import CacheConfig
from quire.foundation.messages.from_engine import STEP_TOKEN_BOUNDS, End, Heartbeat, Load
from quire.foundation.messages.to_engine import Add
from quire.sampling_params import SamplingParams


def process(engines: int = 1) -> ServerStats:
    stats = ServerStats([Stats(number) for number in range(engines)])
    for each in stats.engines:
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


def sent(counts: Counts) -> Counts:
    """As another process reads it."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(counts), type=Counts)


def together(*processes: ServerStats) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """The page of all of them, by name and labels."""
    stats = total([sent(count_of(each)) for each in processes])
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
        stats.engines[0].record_engine_death(waiting, 10 * waiting)
        stats.engines[0].epoch = 1
    late = process()  # has not heard of the death
    late.engines[0].record_heartbeat(beat(9, running=7, preemptions=5))
    page = together(late, first, second)
    assert value(page, "vllm:num_requests_waiting", engine="0") == 7
    assert value(page, "vllm:num_requests_running", engine="0") == 0
    assert value(page, "vllm:num_preemptions_total", engine="0") == 5


def test_no_counter_goes_back_when_a_process_is_replaced() -> None:
    """Whatever dies in between: the engine not at all, before the process, or after it has written last."""
    for epoch_known, epoch_at_start in ((0, 0), (1, 1), (0, 1)):
        stats, pages = process(), []
        engine = stats.engines[0]
        engine.record_heartbeat(beat(6, preemptions=6, prefix_queries=60))
        if epoch_known:
            engine.record_engine_death(0, 0)
            engine.epoch = 1
            engine.record_heartbeat(beat(2, preemptions=2, prefix_queries=20))
        serve(stats, 5)
        pages.append(together(stats))
        written = sent(count_of(stats))
        successor = ServerStats([Stats()])  # no engine is heard yet, so lengths have no scale
        successor.engines[0].epoch = epoch_at_start
        continue_after(successor, written)
        pages.append(together(successor))
        successor.engines[0].set_max_model_len(512)
        pages.append(together(successor))
        again = 6 if (epoch_known, epoch_at_start) == (0, 0) else 2 if epoch_known else 1
        successor.engines[0].record_heartbeat(beat(again, preemptions=again, prefix_queries=10 * again))
        serve(successor, 4)
        pages.append(together(successor))
        for before, after in itertools.pairwise(pages):
            back = {key: (n, after[key]) for key, n in before.items() if _counts(key[0]) and after[key] < n}
            assert not back
        last = pages[-1]
        assert value(last, "vllm:generation_tokens_total") == 9
        expected = {(0, 0): 6, (1, 1): 8, (0, 1): 7}[epoch_known, epoch_at_start]
        assert value(last, "vllm:num_preemptions_total") == expected
        assert value(last, "vllm:iteration_tokens_total_count") == expected
        assert value(last, "vllm:request_generation_tokens_count") == 2


def _counts(name: str) -> bool:
    return name.endswith(("_total", "_count", "_sum", "_bucket")) and not name.startswith("process_")


def test_a_process_that_serves_another_model_counts_for_the_process_alone() -> None:
    stats = process()
    serve(stats, 5)
    successor = process()
    continue_after(successor, sent(count_of(stats, generation=0)), generation=1)
    page = together(successor)
    assert value(page, "vllm:generation_tokens_total") == 0
    assert value(page, "http_requests_total", handler="/v1/completions") == 1
