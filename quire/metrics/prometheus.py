"""Stats in Prometheus' text format, under the names that vLLM's dashboards use; older names are kept beside them.

Owns names, help texts and labels. One registry for each server; reads the Stats when it is scraped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.config import CacheConfig
from quire.metrics.histogram import Histogram
from quire.metrics.stats import Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LABELS = ("model_name", "engine")


class Exposition:
    """The page that /metrics shows."""

    def __init__(self, stats: Stats, model_name: str, cache: CacheConfig, engine: int = 0) -> None:
        """
        Args:
            stats: Read at each scrape.
            model_name, engine: Labels of everything.
            cache: Shown by cache_config_info.
        """
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_StatsCollector(stats, (model_name, str(engine)), cache))

    def text(self) -> bytes:
        """All metrics now."""
        return generate_latest(self._registry)


class _StatsCollector(Collector):
    def __init__(self, stats: Stats, labels: tuple[str, str], cache: CacheConfig) -> None:
        self._stats = stats
        self._labels = labels
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        """Called by the registry at each scrape."""
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()
        yield self._cache_info()

    def _gauges(self) -> Iterator[Metric]:
        load, usage = self._stats.load, self._stats.cache_usage
        for name, text, value in (
            ("num_requests_running", "Sequences in the batch.", load.running),
            ("num_requests_waiting", "Sequences waiting to be admitted.", load.waiting),
            ("kv_cache_usage_perc", "KV cache in use; 1 is full.", usage),
            ("gpu_cache_usage_perc", "The same as vllm:kv_cache_usage_perc, under its older name.", usage),
        ):
            family = GaugeMetricFamily(f"vllm:{name}", text, labels=_LABELS)
            family.add_metric(self._labels, value)
            yield family

    def _counters(self) -> Iterator[Metric]:
        stats = self._stats
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens processed.", stats.prompt_tokens),
            ("generation_tokens", "Tokens generated.", stats.generation_tokens),
            ("num_preemptions", "Sequences put back to make room.", stats.load.preemptions),
        ):
            family = CounterMetricFamily(f"vllm:{name}", text, labels=_LABELS)
            family.add_metric(self._labels, value)
            yield family
        success = CounterMetricFamily(
            "vllm:request_success", "Sequences that ended, by reason.", labels=(*_LABELS, "finished_reason")
        )
        for reason, count in stats.ended.items():
            success.add_metric((*self._labels, reason), count)
        yield success

    def _histograms(self) -> Iterator[Metric]:
        stats = self._stats
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From arrival to the first token.", stats.first_token_s),
            ("inter_token_latency_seconds", "Between one step's tokens and the next.", stats.inter_token_s),
            ("request_time_per_output_token_seconds", "A request's mean time for a token.", stats.mean_token_s),
            ("time_per_output_token_seconds", "The same, under its older name.", stats.mean_token_s),
            ("e2e_request_latency_seconds", "From arrival to the end.", stats.whole_s),
            ("request_queue_time_seconds", "Waiting before the first step.", stats.queued_s),
            ("request_prefill_time_seconds", "From the first step to the first token.", stats.prefill_s),
            ("request_decode_time_seconds", "From the first token to the end.", stats.decode_s),
            ("request_prompt_tokens", "Length of prompts.", stats.prompt_lengths),
            ("request_generation_tokens", "Length of outputs.", stats.output_lengths),
            ("request_params_max_tokens", "max_tokens asked for.", stats.max_tokens),
            ("request_params_n", "n asked for.", stats.choices),
        ):
            yield self._histogram(f"vllm:{name}", text, histogram)

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._labels, histogram.cumulative(), histogram.sum)
        return family

    def _cache_info(self) -> Metric:
        settings = {name: str(value) for name, value in asdict(self._cache).items()}
        settings["num_gpu_blocks"] = str(self._stats.load.num_blocks)
        family = GaugeMetricFamily("vllm:cache_config_info", "Settings of the KV cache.", labels=(*_LABELS, *settings))
        family.add_metric((*self._labels, *settings.values()), 1)
        return family
