"""Stats in Prometheus' text format, under the names that vLLM's dashboards use; older names are kept beside them.

Owns names, help texts and labels. Reads the Stats when it is scraped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.engine.metrics.histogram import Histogram, WorkTimes
from quire.engine.metrics.server_stats import ServerStats
from quire.engine.metrics.stats import Stats
from quire.foundation.config import CacheConfig
from quire.foundation.messages.from_engine import DiskLoad, MediaLoad, TierLoad

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_Family = type[CounterMetricFamily] | type[GaugeMetricFamily] | type[HistogramMetricFamily]
_Value = float | Histogram
_GAUGE, _COUNTER, _HISTOGRAM = GaugeMetricFamily, CounterMetricFamily, HistogramMetricFamily
_LABELS = ("model_name", "engine")
_OLDER = "The same as vllm:{}, under its older name."
_PER_TOKEN = "request_time_per_output_token_seconds"

_ENGINE_METRICS: tuple[tuple[_Family, str, str, Callable[[Stats], _Value]], ...] = (
    (_GAUGE, "vllm:num_requests_running", "Sequences in the batch.", lambda s: s.load.running),
    (_GAUGE, "vllm:num_requests_waiting", "Sequences waiting to be admitted.", lambda s: s.load.waiting),
    (_GAUGE, "vllm:kv_cache_usage_perc", "KV cache in use; 1 is full.", lambda s: s.cache_usage),
    (_GAUGE, "vllm:gpu_cache_usage_perc", _OLDER.format("kv_cache_usage_perc"), lambda s: s.cache_usage),
    (_GAUGE, "vllm:cpu_cache_usage_perc", "Swap space in use; 1 is full.", lambda s: s.host_usage),
    (_GAUGE, "vllm:kv_cache_waste_perc", "Room in the KV blocks in use that holds no token; 1 is all.",
     lambda s: s.cache_waste),
    (_GAUGE, "quire:prefix_cache_retained_perc", "KV cache that is free, and kept for sessions that go on; 1 is all.",
     lambda s: s.retained_share),
    (_GAUGE, "vllm:gpu_prefix_cache_hit_rate", "Prefix cache hits of all queries since the start.",
     lambda s: s.prefix_hit_rate),
    (_GAUGE, "vllm:cpu_prefix_cache_hit_rate", _OLDER.format("gpu_prefix_cache_hit_rate"), lambda s: s.prefix_hit_rate),
    (_GAUGE, "vllm:avg_prompt_throughput_toks_per_s", "Prompt tokens a second, last 10 s.", lambda s: s.prompt_rate),
    (_GAUGE, "vllm:avg_generation_throughput_toks_per_s", "Tokens generated a second, last 10 s.",
     lambda s: s.generation_rate),
    (_GAUGE, "quire:queued_tokens", "Tokens of waiting sequences: prompts and expected outputs.",
     lambda s: s.load.queued_tokens),
    (_GAUGE, "quire:queue_seconds", "How long the engine needs to compute these.", lambda s: s.queue_seconds),
    (_GAUGE, "quire:saturated_tokens_per_second", "Tokens computed a second while requests waited.",
     lambda s: s.load.tokens_per_s),
    (_COUNTER, "vllm:prompt_tokens", "Prompt tokens processed.", lambda s: s.prompt_tokens),
    (_COUNTER, "vllm:prompt_tokens_cached", "Of these: found computed.", lambda s: s.cached_tokens),
    (_COUNTER, "vllm:generation_tokens", "Tokens generated.", lambda s: s.generation_tokens),
    (_COUNTER, "vllm:num_preemptions", "Sequences preempted to free blocks.", lambda s: s.load.preemptions),
    (_COUNTER, "vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", lambda s: s.load.prefix_queries),
    (_COUNTER, "vllm:prefix_cache_hits", "Of these: found.", lambda s: s.load.prefix_hits),
    (_COUNTER, "vllm:spec_decode_num_drafts", "Times that a sequence had draft tokens in a step.",
     lambda s: s.load.drafts),
    (_COUNTER, "vllm:spec_decode_num_draft_tokens", "Draft tokens.", lambda s: s.load.draft_tokens),
    (_COUNTER, "vllm:spec_decode_num_accepted_tokens", "Draft tokens that were accepted.",
     lambda s: sum(s.load.accepted_drafts)),
    (_HISTOGRAM, "vllm:time_to_first_token_seconds", "From arrival to the first token.", lambda s: s.first_token_s),
    (_HISTOGRAM, "vllm:inter_token_latency_seconds", "Between one step's tokens and the next.",
     lambda s: s.inter_token_s),
    (_HISTOGRAM, f"vllm:{_PER_TOKEN}", "A sequence's mean time for a token.", lambda s: s.mean_token_s),
    (_HISTOGRAM, "vllm:time_per_output_token_seconds", _OLDER.format(_PER_TOKEN), lambda s: s.mean_token_s),
    (_HISTOGRAM, "vllm:e2e_request_latency_seconds", "From arrival to the end.", lambda s: s.whole_s),
    (_HISTOGRAM, "vllm:request_queue_time_seconds", "Waiting before the first step.", lambda s: s.queued_s),
    (_HISTOGRAM, "vllm:request_inference_time_seconds", "From the first step to the end.", lambda s: s.inference_s),
    (_HISTOGRAM, "vllm:request_prefill_time_seconds", "From the first step to the first token.",
     lambda s: s.prefill_s),
    (_HISTOGRAM, "vllm:request_decode_time_seconds", "From the first token to the end.", lambda s: s.decode_s),
    (_HISTOGRAM, "vllm:request_prompt_tokens", "Length of prompts.", lambda s: s.prompt_lengths),
    (_HISTOGRAM, "vllm:request_prefill_kv_computed_tokens", "Of prompts: what was computed.",
     lambda s: s.computed_lengths),
    (_HISTOGRAM, "vllm:request_generation_tokens", "Length of outputs.", lambda s: s.output_lengths),
    (_HISTOGRAM, "vllm:request_max_num_generation_tokens", "The longest output of a prompt's n.",
     lambda s: s.most_tokens),
    (_HISTOGRAM, "vllm:request_params_max_tokens", "max_tokens asked for.", lambda s: s.max_tokens),
    (_HISTOGRAM, "vllm:request_params_n", "n asked for, once a prompt.", lambda s: s.choices),
    (_HISTOGRAM, "vllm:iteration_tokens_total", "Tokens that a step moves forward by.", lambda s: s.step_tokens),
    (_GAUGE, "quire:engine_paused", "Whether /pause was called, and no /resume since.", lambda s: bool(s.load.paused)),
    (_COUNTER, "quire:texts_pooled", "Texts that a vector or values were made of.", lambda s: s.pooled),
    (_COUNTER, "quire:sequences_replayed", "Sequences that went on in another engine.", lambda s: s.replayed),
    (_COUNTER, "quire:schema_misses", "Outputs that broke a schema that is not strict.", lambda s: s.schema_misses),
)  # fmt: skip
"""Metrics of each engine without further labels."""


class Exposition:
    """The page that /metrics shows.

    Args:
        stats: Read at each scrape that is given no others.
        model_name: A label of everything but the http metrics; the engine's number is another. What belongs to no
            engine stands with engine 0.
        cache: Shown by cache_config_info.
        max_loras: Shown by lora_requests_info; 0: no adapters are served, and the metric is left out.
    """

    def __init__(self, stats: ServerStats, model_name: str, cache: CacheConfig, max_loras: int = 0) -> None:
        self._stats = stats
        self._labels = model_name, cache, max_loras

    def families(self) -> list[Metric]:
        """All metrics now, as objects of prometheus_client."""
        return list(_Families(self._stats, *self._labels).collect())

    def text(self, stats: ServerStats | None = None) -> bytes:
        """All metrics now, as the text of the page."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Families(stats or self._stats, *self._labels))
        return generate_latest(registry)


def read_process() -> dict[str, float]:
    """What the system says of this process, by metric; empty where it says nothing."""
    return {sample.name: sample.value for family in _process_families() for sample in family.samples}


def _process_families() -> list[Metric]:
    return list(ProcessCollector(registry=None).collect())


class _Families(Collector):
    """All metrics of one scrape, each family once however many engines it has samples of."""

    def __init__(self, stats: ServerStats, model_name: str, cache: CacheConfig, max_loras: int) -> None:
        self._stats = stats
        self._model_name = model_name
        self._cache = cache
        self._max_loras = max_loras
        self._by_name: dict[str, Metric] = {}

    def collect(self) -> Iterator[Metric]:
        """Called by the registry at each scrape."""
        self._by_name = {}
        for engine in self._stats.engines:
            self._add_engine(engine)
        self._add_server()
        if self._max_loras:
            self._add_adapters()
        self._add_work_times(
            "event_loop_callback", "Processor time of a callback in the API's event loop", self._stats.callbacks
        )
        self._add_gpus()
        yield from self._by_name.values()
        yield from self._http()
        yield from self._process()

    def _add(self, family: _Family, name: str, text: str, value: _Value, engine: int = 0, **labels: str) -> None:
        """Add a sample to its family, which is made with the first one."""
        found = self._by_name.get(name)
        if found is None:
            found = self._by_name[name] = family(name, text, labels=(*_LABELS, *labels))
        values = (self._model_name, str(engine), *labels.values())
        if isinstance(found, HistogramMetricFamily):
            assert isinstance(value, Histogram)
            found.add_metric(values, value.cumulative(), value.sum)
        else:
            assert isinstance(found, GaugeMetricFamily | CounterMetricFamily) and not isinstance(value, Histogram)
            found.add_metric(values, value)

    def _add_engine(self, stats: Stats) -> None:
        load, number = stats.load, stats.engine
        # Before num_requests_waiting: scrapers that look for this name anywhere in a line take the last one they find.
        for reason, count in (("capacity", load.waiting - load.deferred), ("deferred", load.deferred)):
            name = "vllm:num_requests_waiting_by_reason"
            self._add(_GAUGE, name, "Sequences waiting, by reason.", count, number, reason=reason)
        for family, name, text, value in _ENGINE_METRICS:
            self._add(family, name, text, value(stats), number)
        if (states := load.states) is not None:
            used = 1 - states.free / states.num_states
            text = "States of recurrent layers that sequences hold; 1 is all."
            self._add(_GAUGE, "quire:state_usage_perc", text, used, number)
            name, text = "quire:state_checkpoints", "Checkpoints of states, made or left out for want of a free state."
            for outcome, count in (("made", states.checkpoints), ("left_out", states.skipped)):
                self._add(_COUNTER, name, text, count, number, outcome=outcome)
        if load.tier is not None:
            self._add_tier(load.tier, number)
        if load.media is not None:
            self._add_media(load.media, number)
        for position, accepted in enumerate(load.accepted_drafts or [0]):
            name = "vllm:spec_decode_num_accepted_tokens_per_pos"
            text = "The same, by place among the drafts."
            self._add(_COUNTER, name, text, accepted, number, position=str(position))
        computed = stats.prompt_tokens - stats.cached_tokens
        for source, count in (("local_compute", computed), ("local_cache_hit", stats.cached_tokens)):
            name = "vllm:prompt_tokens_by_source"
            self._add(_COUNTER, name, "Prompt tokens, by source.", count, number, source=source)
        for ended, count in stats.ended.items():
            name, text = "vllm:request_success", "Sequences that ended, by reason."
            self._add(_COUNTER, name, text, count, number, finished_reason=ended)
        settings = {name: str(value) for name, value in asdict(self._cache).items()}
        settings |= {"num_gpu_blocks": str(load.num_blocks), "num_cpu_blocks": str(load.num_host_blocks)}
        self._add(_GAUGE, "vllm:cache_config_info", "Settings of the KV cache.", 1, number, **settings)
        self._add_work_times("engine_turn", "Processor time of a turn of the engine's loop", stats.turns, number)
        name, text = "quire:process_restarts", "Processes that were replaced, by kind."
        self._add(_COUNTER, name, text, stats.epoch, number, process="engine")

    def _add_media(self, media: MediaLoad, engine: int) -> None:
        text = "Images that prompts brought into steps."
        self._add(_COUNTER, "vllm:mm_cache_queries", text, media.queries, engine)
        self._add(_COUNTER, "vllm:mm_cache_hits", "Of these: had their vectors already.", media.hits, engine)

    def _add_tier(self, tier: TierLoad, engine: int) -> None:
        text = "Tokens of prompts that the device's prefix cache did not have."
        self._add(_COUNTER, "vllm:external_prefix_cache_queries", text, tier.query_tokens, engine)
        text = "Of these: loaded from the host."
        self._add(_COUNTER, "vllm:external_prefix_cache_hits", text, tier.hit_tokens, engine)
        text = "Bytes of KV blocks that were copied between the device and the host."
        for way, copied in (("GPU_to_CPU", tier.stored_bytes), ("CPU_to_GPU", tier.loaded_bytes)):
            self._add(_COUNTER, "vllm:kv_offload_total_bytes", text, copied, engine, transfer_type=way)
        text = "KV blocks that the host holds contents of."
        self._add(_GAUGE, "quire:kv_offload_blocks", text, tier.cached_blocks, engine)
        text = "Blocks that were not stored because the host had no room, and prefixes that were quicker to compute."
        for reason, count in (("no_room", tier.left_out), ("too_slow", tier.too_slow)):
            self._add(_COUNTER, "quire:kv_offload_left_out", text, count, engine, reason=reason)
        text = "Seconds of orders that moved KV blocks."
        self._add(_COUNTER, "vllm:kv_offload_total_time", text, tier.load_s, engine, transfer_type="CPU_to_GPU")
        text = "KV blocks that could not be moved: they are computed again, or not kept."
        name = "quire:kv_offload_failures"
        self._add(_COUNTER, name, text, tier.failed_loads, engine, transfer_type="CPU_to_GPU")
        if tier.disk is not None:
            self._add_disk(tier.disk, engine)

    def _add_disk(self, disk: DiskLoad, engine: int) -> None:
        for way, copied, seconds, failed in (
            ("CPU_to_disk", disk.stored_bytes, disk.store_s, disk.unwritten),
            ("disk_to_CPU", disk.loaded_bytes, disk.load_s, disk.unread),
        ):
            for name, count in (("total_bytes", copied), ("total_time", seconds)):
                self._add(_COUNTER, f"vllm:kv_offload_{name}", "", count, engine, transfer_type=way)
            self._add(_COUNTER, "quire:kv_offload_failures", "", failed, engine, transfer_type=way)
        for state, blocks in (("used", disk.blocks), ("free", disk.num_blocks - disk.blocks)):
            text = "KV blocks that the disk holds, and that it has room for beside."
            self._add(_GAUGE, "quire:kv_disk_blocks", text, blocks, engine, state=state)
        self._add(_COUNTER, "quire:kv_offload_left_out", "", disk.left_out, engine, reason="disk_no_room")

    def _add_server(self) -> None:
        stats, swaps = self._stats, self._stats.swaps
        name, text = "quire:process_restarts", "Processes that were replaced, by kind."
        self._add(_COUNTER, name, text, stats.api_restarts, process="api")
        for limit, count in stats.rejections.items():
            name, text = "vllm:admission_rejections", "Requests answered by 429, by limit."
            self._add(_COUNTER, name, text, count, reason=limit)
        text = "Seconds of sound that requests have brought."
        self._add(_COUNTER, "quire:audio_seconds", text, stats.http.audio_seconds)
        for outcome, count in (("done", swaps.done), ("failed", swaps.failed)):
            name, text = "quire:model_swaps", "Swaps of the served model, by outcome."
            self._add(_COUNTER, name, text, count, outcome=outcome)
        text = "Whether a swap of the served model has not ended yet."
        self._add(_GAUGE, "quire:model_swap_proceeds", text, swaps.proceeds)
        text = "Requests that wait while no model is served."
        self._add(_GAUGE, "quire:requests_waiting_for_model", text, swaps.waiting)

    def _add_adapters(self) -> None:
        """Names are labels, as in vLLM, and the value is the time: of several samples the last one holds."""
        for engine in self._stats.engines:
            self._add(
                _GAUGE, "vllm:lora_requests_info", "Adapters in use.", time.time(), engine.engine,
                max_lora=str(self._max_loras),
                waiting_lora_adapters=",".join(engine.load.waiting_adapters),
                running_lora_adapters=",".join(engine.load.running_adapters),
            )  # fmt: skip

    def _add_work_times(self, name: str, text: str, times: WorkTimes, engine: int = 0) -> None:
        self._add(_HISTOGRAM, f"quire:{name}_cpu_seconds", f"{text}.", times.seconds, engine)
        longest = f"quire:longest_{name}_cpu_seconds"
        self._add(_GAUGE, longest, f"{text}: the longest since the start.", times.longest, engine)

    def _add_gpus(self) -> None:
        for gpu in self._stats.gpus:
            for name, text, value in (
                ("memory_used_bytes", "GPU memory in use, by all processes.", gpu.memory_used),
                ("memory_total_bytes", "GPU memory.", gpu.memory_total),
                ("utilization_perc", "Share of time in which a kernel ran; 1 is always.", gpu.utilization),
                ("power_watts", "Power that the GPU draws.", gpu.power_w),
                ("temperature_celsius", "Temperature of the GPU.", gpu.temperature_c),
            ):
                if value is not None:
                    self._add(
                        _GAUGE, f"quire:gpu_{name}", text, value, gpu.engine, gpu=str(gpu.index), gpu_name=gpu.name
                    )

    def _http(self) -> Iterator[Metric]:
        answers = CounterMetricFamily(
            "http_requests", "Answers to HTTP requests.", labels=("method", "handler", "status")
        )
        for answered, count in self._stats.http.answers.items():
            answers.add_metric(answered, count)
        yield answers
        text = "How long they took, streams until their last byte."
        seconds = HistogramMetricFamily("http_request_duration_seconds", text, labels=("method", "handler"))
        for labels, histogram in self._stats.http.seconds.items():
            seconds.add_metric(labels, histogram.cumulative(), histogram.sum)
        yield seconds

    def _process(self) -> Iterator[Metric]:
        """What prometheus_client says of a process, of this one or of several together."""
        for family in _process_families():
            family.samples = [
                sample._replace(value=self._stats.process.get(sample.name, sample.value)) for sample in family.samples
            ]
            yield family
