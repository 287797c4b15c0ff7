"""Stats in Prometheus' text format, under the names that vLLM's dashboards use; older names are kept beside them.

Owns names, help texts and labels. Reads the Stats when it is scraped.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.engine.metrics.histogram import Histogram, WorkTimes
from quire.engine.metrics.server_stats import ServerStats
from quire.engine.metrics.stats import Stats
from quire.foundation.config import CacheConfig

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LABELS = ("model_name", "engine")
_OLDER = "The same as vllm:{}, under its older name."


class Exposition:
    """The page that /metrics shows."""

    def __init__(self, stats: ServerStats, model_name: str, cache: CacheConfig, max_loras: int = 0) -> None:
        """
        Args:
            stats: Read at each scrape that is given no others.
            model_name: A label of everything but the http metrics; the engine's number is another. What belongs to no
                engine stands with engine 0.
            cache: Shown by cache_config_info.
            max_loras: Shown by lora_requests_info; 0: no adapters are served, and there is none.
        """
        self._stats = stats
        self._labels = model_name, cache, max_loras

    def families(self) -> list[Metric]:
        """All metrics now, as objects of prometheus_client."""
        return list(self._registry(self._stats).collect())

    def text(self, stats: ServerStats | None = None) -> bytes:
        """All metrics now, as the text of the page."""
        return generate_latest(self._registry(stats or self._stats))

    def _registry(self, stats: ServerStats) -> CollectorRegistry:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_ServerCollector(stats, *self._labels))
        return registry


def read_process() -> dict[str, float]:
    """What the system says of this process, by metric; empty where it says nothing."""
    return {sample.name: sample.value for family in _process_families() for sample in family.samples}


def _process_families() -> list[Metric]:
    return list(ProcessCollector(registry=None).collect())


class _ServerCollector(Collector):
    def __init__(self, stats: ServerStats, model_name: str, cache: CacheConfig, max_loras: int) -> None:
        self._stats = stats
        self._model_name = model_name
        self._max_loras = max_loras
        self._engines = [_EngineFamilies(each, (model_name, str(each.engine)), cache) for each in stats.engines]

    def collect(self) -> Iterator[Metric]:
        """Called by the registry at each scrape."""
        families: dict[str, Metric] = {}
        for engine in self._engines:
            for family in engine.collect():
                if family.name in families:
                    families[family.name].samples += family.samples
                else:
                    families[family.name] = family
        yield from families.values()
        yield self._restarts()
        yield self._rejections()
        yield from self._swaps()
        if self._max_loras:
            yield self._adapters()
        yield from _work_times(
            "event_loop_callback",
            "Processor time of a callback in the API's event loop",
            (self._model_name, "0"),
            self._stats.callbacks,
        )
        yield from self._gpus()
        yield from self._http()
        yield from self._process()

    def _process(self) -> Iterator[Metric]:
        """As prometheus_client has it, of one process or of several together."""
        for family in _process_families():
            family.samples = [
                sample._replace(value=self._stats.process.get(sample.name, sample.value)) for sample in family.samples
            ]
            yield family

    def _restarts(self) -> Metric:
        family = CounterMetricFamily(
            "quire:process_restarts", "Processes that were replaced, by kind.", labels=(*_LABELS, "process")
        )
        for engine in self._stats.engines:
            family.add_metric((self._model_name, str(engine.engine), "engine"), engine.epoch)
        family.add_metric((self._model_name, "0", "api"), self._stats.api_restarts)
        return family

    def _rejections(self) -> Metric:
        family = CounterMetricFamily(
            "vllm:admission_rejections", "Requests answered by 429, by limit.", labels=(*_LABELS, "reason")
        )
        for limit, count in self._stats.rejections.items():
            family.add_metric((self._model_name, "0", limit), count)
        return family

    def _swaps(self) -> Iterator[Metric]:
        swaps, labels = self._stats.swaps, (self._model_name, "0")
        ended = CounterMetricFamily(
            "quire:model_swaps", "Swaps of the served model, by outcome.", labels=(*_LABELS, "outcome")
        )
        ended.add_metric((*labels, "done"), swaps.done)
        ended.add_metric((*labels, "failed"), swaps.failed)
        yield ended
        for name, text, value in (
            ("model_swap_proceeds", "Whether a swap of the served model has not ended yet.", float(swaps.proceeds)),
            ("requests_waiting_for_model", "Requests that wait while no model is served.", swaps.waiting),
        ):
            family = GaugeMetricFamily(f"quire:{name}", text, labels=_LABELS)
            family.add_metric(labels, value)
            yield family

    def _adapters(self) -> Metric:
        """Names are labels, as in vLLM, and the value is the time: of several samples the last one holds."""
        names = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
        family = GaugeMetricFamily("vllm:lora_requests_info", "Adapters in use.", labels=(*_LABELS, *names))
        for engine in self._stats.engines:
            load = engine.load
            values = (str(self._max_loras), ",".join(load.waiting_adapters), ",".join(load.running_adapters))
            family.add_metric((self._model_name, str(engine.engine), *values), time.time())
        return family

    def _gpus(self) -> Iterator[Metric]:
        """Nothing where there is no GPU."""
        gpus = self._stats.gpus
        for name, text, values in (
            ("memory_used_bytes", "GPU memory in use, by all processes.", [gpu.memory_used for gpu in gpus]),
            ("memory_total_bytes", "GPU memory.", [gpu.memory_total for gpu in gpus]),
            ("utilization_perc", "Share of time in which a kernel ran; 1 is always.", [g.utilization for g in gpus]),
            ("power_watts", "Power that the GPU draws.", [gpu.power_w for gpu in gpus]),
            ("temperature_celsius", "Temperature of the GPU.", [gpu.temperature_c for gpu in gpus]),
        ):
            family = GaugeMetricFamily(f"quire:gpu_{name}", text, labels=(*_LABELS, "gpu", "gpu_name"))
            for gpu, value in zip(gpus, values, strict=True):
                if value is not None:
                    family.add_metric((self._model_name, str(gpu.engine), str(gpu.index), gpu.name), value)
            if family.samples:
                yield family

    def _http(self) -> Iterator[Metric]:
        counts = self._stats.http
        family = CounterMetricFamily(
            "http_requests", "Answers to HTTP requests.", labels=("method", "handler", "status")
        )
        for answered, count in counts.answers.items():
            family.add_metric(answered, count)
        yield family
        text = "How long they took, streams until their last byte."
        yield _histogram("http_request_duration_seconds", text, ("method", "handler"), counts.seconds)


class _EngineFamilies:
    """The metrics of one engine."""

    def __init__(self, stats: Stats, labels: tuple[str, str], cache: CacheConfig) -> None:
        self._stats = stats
        self._labels = labels
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        """Its metrics now."""
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()
        yield self._cache_info()
        yield from self._work()

    def _gauges(self) -> Iterator[Metric]:
        stats, load = self._stats, self._stats.load
        # Before num_requests_waiting: scrapers that look for this name anywhere in a line take the last one they find.
        reasons = {"capacity": load.waiting - load.deferred, "deferred": load.deferred}
        yield self._gauge_by(
            "num_requests_waiting_by_reason", "Sequences waiting, by reason.", "reason", reasons.items()
        )
        for name, text, value in (
            ("num_requests_running", "Sequences in the batch.", load.running),
            ("num_requests_waiting", "Sequences waiting to be admitted.", load.waiting),
            ("kv_cache_usage_perc", "KV cache in use; 1 is full.", stats.cache_usage),
            ("gpu_cache_usage_perc", _OLDER.format("kv_cache_usage_perc"), stats.cache_usage),
            ("cpu_cache_usage_perc", "Swap space in use; 1 is full.", stats.host_usage),
            ("kv_cache_waste_perc", "Room in the KV blocks in use that holds no token; 1 is all.", stats.cache_waste),
            ("gpu_prefix_cache_hit_rate", "Prefix cache hits of all queries since the start.", stats.prefix_hit_rate),
            ("cpu_prefix_cache_hit_rate", _OLDER.format("gpu_prefix_cache_hit_rate"), stats.prefix_hit_rate),
            ("avg_prompt_throughput_toks_per_s", "Prompt tokens a second, last 10 s.", stats.prompt_rate),
            ("avg_generation_throughput_toks_per_s", "Tokens generated a second, last 10 s.", stats.generation_rate),
        ):
            yield self._gauge(f"vllm:{name}", text, value)
        for name, text, value in (
            (
                "queued_tokens",
                "Tokens of waiting sequences: prompts and expected outputs.",
                load.queued_tokens,
            ),
            ("queue_seconds", "How long the engine needs to compute these.", stats.queue_seconds),
            ("saturated_tokens_per_second", "Tokens computed a second while requests waited.", load.tokens_per_s),
        ):
            yield self._gauge(f"quire:{name}", text, value)

    def _work(self) -> Iterator[Metric]:
        """Metrics of the engine's work that other servers do not have, under a prefix of their own."""
        yield from _work_times(
            "engine_turn", "Processor time of a turn of the engine's loop", self._labels, self._stats.turns
        )
        family = GaugeMetricFamily(
            "quire:engine_paused", "Whether /pause was called, and no /resume since.", labels=_LABELS
        )
        family.add_metric(self._labels, bool(self._stats.load.paused))
        yield family
        replayed = CounterMetricFamily(
            "quire:sequences_replayed", "Sequences that went on in another engine.", labels=_LABELS
        )
        replayed.add_metric(self._labels, self._stats.replayed)
        yield replayed

    def _counters(self) -> Iterator[Metric]:
        stats, load = self._stats, self._stats.load
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens processed.", stats.prompt_tokens),
            ("prompt_tokens_cached", "Of these: found computed.", stats.cached_tokens),
            ("generation_tokens", "Tokens generated.", stats.generation_tokens),
            ("num_preemptions", "Sequences preempted to free blocks.", load.preemptions),
            ("prefix_cache_queries", "Tokens looked up in the prefix cache.", load.prefix_queries),
            ("prefix_cache_hits", "Of these: found.", load.prefix_hits),
            ("spec_decode_num_drafts", "Times that a sequence had draft tokens in a step.", load.drafts),
            ("spec_decode_num_draft_tokens", "Draft tokens.", load.draft_tokens),
            ("spec_decode_num_accepted_tokens", "Draft tokens that were accepted.", sum(load.accepted_drafts)),
        ):
            yield self._counter_by(name, text, "", [("", value)])
        positions = {str(position): accepted for position, accepted in enumerate(load.accepted_drafts or [0])}
        yield self._counter_by(
            "spec_decode_num_accepted_tokens_per_pos", "The same, by place among the drafts.", "position",
            positions.items(),
        )  # fmt: skip
        sources = {
            "local_compute": stats.prompt_tokens - stats.cached_tokens,
            "local_cache_hit": stats.cached_tokens,
        }
        yield self._counter_by("prompt_tokens_by_source", "Prompt tokens, by source.", "source", sources.items())
        yield self._counter_by(
            "request_success", "Sequences that ended, by reason.", "finished_reason", stats.ended.items()
        )

    def _histograms(self) -> Iterator[Metric]:
        stats = self._stats
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From arrival to the first token.", stats.first_token_s),
            ("inter_token_latency_seconds", "Between one step's tokens and the next.", stats.inter_token_s),
            ("request_time_per_output_token_seconds", "A sequence's mean time for a token.", stats.mean_token_s),
            (
                "time_per_output_token_seconds",
                _OLDER.format("request_time_per_output_token_seconds"),
                stats.mean_token_s,
            ),
            ("e2e_request_latency_seconds", "From arrival to the end.", stats.whole_s),
            ("request_queue_time_seconds", "Waiting before the first step.", stats.queued_s),
            ("request_inference_time_seconds", "From the first step to the end.", stats.inference_s),
            ("request_prefill_time_seconds", "From the first step to the first token.", stats.prefill_s),
            ("request_decode_time_seconds", "From the first token to the end.", stats.decode_s),
            ("request_prompt_tokens", "Length of prompts.", stats.prompt_lengths),
            ("request_prefill_kv_computed_tokens", "Of prompts: what was computed.", stats.computed_lengths),
            ("request_generation_tokens", "Length of outputs.", stats.output_lengths),
            ("request_max_num_generation_tokens", "The longest output of a prompt's n.", stats.most_tokens),
            ("request_params_max_tokens", "max_tokens asked for.", stats.max_tokens),
            ("request_params_n", "n asked for, once a prompt.", stats.choices),
            ("iteration_tokens_total", "Tokens that a step moves forward by.", stats.step_tokens),
        ):
            yield _histogram(f"vllm:{name}", text, _LABELS, {self._labels: histogram})

    def _cache_info(self) -> Metric:
        settings = {name: str(value) for name, value in asdict(self._cache).items()}
        settings["num_gpu_blocks"] = str(self._stats.load.num_blocks)
        settings["num_cpu_blocks"] = str(self._stats.load.num_host_blocks)
        family = GaugeMetricFamily("vllm:cache_config_info", "Settings of the KV cache.", labels=(*_LABELS, *settings))
        family.add_metric((*self._labels, *settings.values()), 1)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _gauge_by(self, name: str, text: str, label: str, values: Iterable[tuple[str, float]]) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=(*_LABELS, label))
        for key, value in values:
            family.add_metric((*self._labels, key), value)
        return family

    def _counter_by(self, name: str, text: str, label: str, values: Iterable[tuple[str, float]]) -> Metric:
        """`label` may be empty: then there is one value."""
        family = CounterMetricFamily(f"vllm:{name}", text, labels=(*_LABELS, label) if label else _LABELS)
        for key, value in values:
            family.add_metric((*self._labels, key) if label else self._labels, value)
        return family


def _work_times(name: str, text: str, labels: tuple[str, str], times: WorkTimes) -> Iterator[Metric]:
    yield _histogram(f"quire:{name}_cpu_seconds", f"{text}.", _LABELS, {labels: times.seconds})
    family = GaugeMetricFamily(
        f"quire:longest_{name}_cpu_seconds", f"{text}: the longest since the start.", labels=_LABELS
    )
    family.add_metric(labels, times.longest)
    yield family


def _histogram(
    name: str, text: str, labels: tuple[str, ...], histograms: Mapping[tuple[str, str], Histogram]
) -> Metric:
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, histogram in histograms.items():
        family.add_metric(values, histogram.cumulative(), histogram.sum)
    return family
