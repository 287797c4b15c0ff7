"""What the dashboards show: for each panel its place, unit and PromQL. Knows nothing about Grafana's JSON.

`$w` stands for the model and servers that the viewer has chosen, `$i` for the servers alone, and `$r` for the window
of rates.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        unit: Grafana's name of it.
        queries: PromQL by legend.
        about: What to read from it.
        kind: Grafana's name of the panel's type.
        width, height: In a grid of 24 columns.
    """

    title: str
    unit: str
    queries: dict[str, str]
    about: str
    kind: str = "timeseries"
    width: int = 12
    height: int = 8


def stat(title: str, unit: str, query: str, about: str) -> Panel:
    """A single number."""
    return Panel(title, unit, {"": query}, about, "stat", 4, 4)


def quantile(q: float, metric: str) -> str:
    """A quantile of a histogram over all servers."""
    return f"histogram_quantile({q}, sum by (le) (rate({metric}_bucket{{$w}}[$r])))"


def quantiles(metric: str) -> dict[str, str]:
    """The usual three."""
    return {f"p{q * 100:.0f}": quantile(q, metric) for q in (0.5, 0.95, 0.99)}


def mean(metric: str) -> str:
    """The mean of a histogram's values."""
    return f"sum(rate({metric}_sum{{$w}}[$r])) / sum(rate({metric}_count{{$w}}[$r]))"


def total(metric: str, by: str = "") -> str:
    """A counter's growth a second."""
    return f"sum{f' by ({by})' if by else ''} (rate({metric}_total{{$w}}[$r]))"


_ERRORS = 'sum(rate(http_requests_total{$i,status="5xx"}[$r]))'
_HIT_RATE = f"{total('vllm:prefix_cache_hits')} / {total('vllm:prefix_cache_queries')}"

OVERVIEW = (
    stat("Running", "short", "sum(vllm:num_requests_running{$w})", "Sequences in the batch."),
    stat("Waiting", "short", "sum(vllm:num_requests_waiting{$w})", "Sequences not yet admitted."),
    stat("KV cache", "percentunit", "max(vllm:kv_cache_usage_perc{$w})", "The fullest server's."),
    stat("Tokens generated", "short", total("vllm:generation_tokens"), "A second, over all servers."),
    stat("First token, p99", "s", quantile(0.99, "vllm:time_to_first_token_seconds"), "From arrival."),
    stat(
        "Server errors",
        "percentunit",
        f"({_ERRORS} or vector(0)) / sum(rate(http_requests_total{{$i}}[$r]))",
        "Share of answers that are 5xx.",
    ),
    Panel(
        "Tokens a second",
        "short",
        {"prompts": total("vllm:prompt_tokens"), "generated": total("vllm:generation_tokens")},
        "Prompt tokens include those found in the prefix cache.",
    ),
    Panel(
        "Sequences",
        "short",
        {
            "running": "sum(vllm:num_requests_running{$w})",
            "waiting: {{reason}}": "sum by (reason) (vllm:num_requests_waiting_by_reason{$w})",
        },
        "A queue that does not shrink needs another server.",
    ),
    Panel("Time to first token", "s", quantiles("vllm:time_to_first_token_seconds"), "Queue and prefill together."),
    Panel("Time between tokens", "s", quantiles("vllm:inter_token_latency_seconds"), "What a reader of a stream sees."),
    Panel(
        "Answers",
        "reqps",
        {"{{status}}": "sum by (status) (rate(http_requests_total{$i}[$r]))"},
        "By the hundred of their status.",
    ),
    Panel(
        "Processes replaced, open requests carried over",
        "short",
        {
            "{{process}} restarts": "sum by (process) (increase(quire:process_restarts_total{$w}[1h]))",
            "sequences replayed": "sum(increase(quire:sequences_replayed_total{$w}[1h]))",
        },
        "In the last hour. The log has the causes.",
    ),
)

REQUESTS = (
    Panel(
        "Requests by endpoint",
        "reqps",
        {"{{method}} {{handler}}": "sum by (method, handler) (rate(http_requests_total{$i}[$r]))"},
        "Probes are left out.",
    ),
    Panel(
        "How sequences end",
        "short",
        {"{{finished_reason}}": total("vllm:request_success", "finished_reason")},
        "abort: the client went away; timeout: its deadline passed.",
    ),
    Panel("Whole request", "s", quantiles("vllm:e2e_request_latency_seconds"), "From arrival to the last token."),
    Panel("Waiting in the queue", "s", quantiles("vllm:request_queue_time_seconds"), "Before the first step."),
    Panel(
        "Where the time goes, on average",
        "s",
        {
            "queue": mean("vllm:request_queue_time_seconds"),
            "prefill": mean("vllm:request_prefill_time_seconds"),
            "decode": mean("vllm:request_decode_time_seconds"),
        },
        "Long prefill: long prompts. Long decode: long answers, or a large batch.",
    ),
    Panel(
        "Time per output token",
        "s",
        quantiles("vllm:request_time_per_output_token_seconds"),
        "A sequence's mean.",
    ),
    Panel("Length of prompts", "short", quantiles("vllm:request_prompt_tokens"), "Tokens."),
    Panel("Length of answers", "short", quantiles("vllm:request_generation_tokens"), "Tokens."),
    Panel(
        "Speculation",
        "short",
        {
            "drafted": total("vllm:spec_decode_num_draft_tokens"),
            "accepted": total("vllm:spec_decode_num_accepted_tokens"),
        },
        "Draft tokens a second. Drafting stops by itself where few are accepted.",
    ),
    Panel(
        "Sequences by engine",
        "short",
        {"{{instance}} engine {{engine}}": "sum by (instance, engine) (vllm:num_requests_running{$w})"},
        "With --data-parallel-size: whether the engines of a server are used alike.",
    ),
    Panel(
        "Turned away (429)",
        "reqps",
        {"{{reason}}": total("vllm:admission_rejections", "reason")},
        "By the limit of the queue that was reached.",
    ),
    Panel(
        "How long the queue takes",
        "s",
        {"longest": "max(quire:queue_seconds{$w})"},
        "What waits, at the speed of today.",
    ),
)

CACHE = (
    stat("In use", "percentunit", "max(vllm:kv_cache_usage_perc{$w})", "KV blocks, of the fullest server."),
    stat("Hit rate", "percentunit", _HIT_RATE, "Share of looked-up prompt tokens that were cached."),
    stat("Waste", "percentunit", "max(vllm:kv_cache_waste_perc{$w})", "Room in used blocks that holds no token."),
    stat("Preemptions", "short", "sum(increase(vllm:num_preemptions_total{$w}[1h]))", "In the last hour."),
    Panel(
        "KV cache and swap space",
        "percentunit",
        {"KV cache": "max(vllm:kv_cache_usage_perc{$w})", "swap space": "max(vllm:cpu_cache_usage_perc{$w})"},
        "1 is full. Full and preempting: fewer sequences, shorter lengths or more memory.",
    ),
    Panel("Prefix cache hits", "percentunit", {"hit rate": _HIT_RATE}, "Over the window of rates."),
    Panel(
        "Prompt tokens by source",
        "short",
        {"{{source}}": total("vllm:prompt_tokens_by_source", "source")},
        "local_cache_hit was not computed again.",
    ),
    Panel("Preemptions a minute", "short", {"preemptions": f"60 * {total('vllm:num_preemptions')}"}, "0 is good."),
    Panel(
        "Tokens a step",
        "short",
        {"mean": mean("vllm:iteration_tokens_total"), "p99": quantile(0.99, "vllm:iteration_tokens_total")},
        "Decoding rows count one each, chunks of prompts their tokens.",
    ),
    Panel(
        "Prompt tokens computed for a request",
        "short",
        quantiles("vllm:request_prefill_kv_computed_tokens"),
        "Without those found in the cache.",
    ),
)

HARDWARE = (
    Panel(
        "GPU memory",
        "bytes",
        {
            "GPU {{gpu}} in use": "quire:gpu_memory_used_bytes{$w}",
            "GPU {{gpu}} in all": "quire:gpu_memory_total_bytes{$w}",
        },
        "Weights and KV cache are taken at the start, so this is flat.",
    ),
    Panel("GPU utilization", "percentunit", {"GPU {{gpu}}": "quire:gpu_utilization_perc{$w}"}, "A kernel was running."),
    Panel("GPU power", "watt", {"GPU {{gpu}}": "quire:gpu_power_watts{$w}"}, "What the GPU draws."),
    Panel("GPU temperature", "celsius", {"GPU {{gpu}}": "quire:gpu_temperature_celsius{$w}"}, "Hot GPUs slow down."),
    Panel(
        "Processor time of the loops",
        "percentunit",
        {
            "engine": "sum by (instance) (rate(quire:engine_turn_cpu_seconds_sum{$w}[$r]))",
            "API": "sum by (instance) (rate(quire:event_loop_callback_cpu_seconds_sum{$w}[$r]))",
        },
        "1 is a whole core; the API's loop near 1 makes all streams wait.",
    ),
    Panel(
        "Longest piece of work in a loop",
        "s",
        {
            "engine": "max(quire:longest_engine_turn_cpu_seconds{$w})",
            "API": "max(quire:longest_event_loop_callback_cpu_seconds{$w})",
        },
        "Since the start: how long everything else once waited.",
    ),
    Panel("Memory of the API process", "bytes", {"{{instance}}": "process_resident_memory_bytes{$i}"}, "Resident."),
    Panel("Open files of the API process", "short", {"{{instance}}": "process_open_fds{$i}"}, "Connections count."),
)

DASHBOARDS = {
    "overview": ("Quire: overview", OVERVIEW),
    "requests": ("Quire: requests and latency", REQUESTS),
    "cache": ("Quire: KV cache", CACHE),
    "hardware": ("Quire: hardware", HARDWARE),
}
