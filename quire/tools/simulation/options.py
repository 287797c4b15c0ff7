"""The options of `quire simulate`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import tyro

from quire.errors import ConfigError
from quire.foundation.config.cache import BlockSize, KVCacheDtype
from quire.foundation.config.model import ModelDtype
from quire.foundation.config.scheduler import PerformanceMode, PreemptionMode
from quire.tools.bench.datasets import DatasetOptions
from quire.tools.bench.load import ArrivalOptions
from quire.tools.simulation.trace import TraceFileOptions


@dataclass(frozen=True)
class ServingOptions:
    """How the model is served, under the names of `quire serve`."""

    tensor_parallel_size: int = 1
    """Devices that divide the model."""
    dtype: ModelDtype = "auto"
    """Of weights that are not quantized. auto: on a GPU bfloat16, or float16 where the checkpoint is."""
    quantization: str | None = None
    """Quantize at the start: fp8 and others, as quire serve takes it."""
    max_model_len: int | None = None
    """Most tokens of a sequence. Default: the model's limit."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """Of keys and values."""
    block_size: BlockSize = 16
    """Tokens of a block of the KV cache."""
    gpu_memory_utilization: float | None = None
    """Share of memory that the engine takes. Default: 0.9."""
    kv_cache_memory_bytes: int | None = None
    """Bytes for the KV cache, whatever the memory."""
    num_gpu_blocks_override: int | None = None
    """Exact number of blocks, whatever the memory."""
    swap_space: float = 4.0
    """GiB of host memory that preempted sequences may be swapped to; 0 for none."""
    enable_prefix_caching: bool = True
    """Share the blocks of equal beginnings between requests."""
    max_num_seqs: int | None = None
    """Most sequences in one step. Default: 256, and 512 on a GPU of 60 GiB or more."""
    max_num_batched_tokens: int | None = None
    """Most tokens in one step. Default: 512, and 8,192 on a GPU."""
    long_prefill_token_threshold: int = 0
    """Most tokens that one prompt moves forward by in a step; 0 for no such limit."""
    performance_mode: PerformanceMode | None = None
    """What prompts may take of the time of sequences that stream beside them. Default: balanced."""
    preemption_mode: PreemptionMode | None = None
    """What happens to a sequence that has to make room. Default: whichever is estimated to cost less each time."""

    speculative_config: dict[str, Any] | None = None
    """Who proposes drafts, as quire serve takes it. How often drafts are right is given, by
    "rejection_sample_method": "synthetic" and synthetic_acceptance_length or synthetic_acceptance_rates. A draft model
    or a head is counted in memory and time."""
    cpu_threads: int | None = None
    """Threads that compute, with --gpu cpu. Default: as many as physical cores."""


@dataclass(frozen=True)
class SimulateOptions:
    """Which model, device and load are simulated, and where the result goes."""

    DESCRIPTION: ClassVar[str] = (
        "Serve a load in virtual time: the engine's real scheduler, with steps that take as long as a cost model says. "
        "Prints latencies, throughput and what limits them; --slo searches the highest rate that keeps limits."
    )

    model: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="MODEL")] = None
    """A directory, a config.json, a GGUF file, quill, or a hub id whose config.json is in the local cache."""
    gpu: str = "h200"
    """The device: h200, h100, a100, l40s, l4, 4090, b200 and others; cpu is this machine's processor."""
    slo: str | None = None
    """Limits in milliseconds that requests are to keep, as ttft=500,tpot=40; also itl and e2el. Searches the highest
    request rate at which enough of them do."""
    slo_attainment: float = 99.0
    """How many are enough, in percent."""
    tokenizer: str | None = None
    """Directory or hub id of a tokenizer, for datasets of text. Default: the model's."""
    seed: int = 0
    """Of prompts, lengths and arrivals: the same seed makes the same load, as quire bench serve --seed does."""
    metric_percentiles: str = "50,90,99"
    """Percentiles that are shown, separated by commas."""
    calibrate: bool = False
    """Time steps of the model on this machine's processor first, and a server of it, and go by these: half a minute
    for a small model. For --gpu cpu."""
    step_times: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """With --calibrate, write what was timed to this file; else go by the file."""
    json: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Write all figures to this file."""
    picture: Annotated[str | None, tyro.conf.arg(metavar="FILE.svg")] = None
    """Draw load, throughput and latencies, and with --slo what each rate reached."""
    serving: ServingOptions = field(default_factory=ServingOptions)
    file: TraceFileOptions = field(default_factory=TraceFileOptions)
    dataset: DatasetOptions = field(default_factory=DatasetOptions)
    arrivals: ArrivalOptions = field(default_factory=ArrivalOptions)

    def __post_init__(self) -> None:
        if self.model is None:
            raise ConfigError(
                "Name a model: quire simulate MODEL. 'quire simulate --help' lists the flags.", param="model"
            )
        if not 0 < self.slo_attainment <= 100:
            raise ConfigError(f"--slo-attainment is above 0 and at most 100, not {self.slo_attainment:g}.")
        if (self.calibrate or self.step_times is not None) and self.gpu != "cpu":
            raise ConfigError(
                "--calibrate and --step-times are for the processor: give --gpu cpu. Steps of GPUs come from "
                "the table of cards.",
                param="calibrate",
            )
        if self.serving.cpu_threads is not None and self.gpu != "cpu":
            raise ConfigError("--cpu-threads is for --gpu cpu.", param="cpu_threads")
        if self.file.trace is not None and self.dataset.dataset_path is not None:
            raise ConfigError("Give --trace or --dataset-path, not both.", param="trace")
        if self.file.trace is not None and self.arrivals.ramp_up_strategy is not None:
            raise ConfigError("A trace has its own times: --request-rate stretches them, a ramp cannot.", param="trace")
        if self.slo is not None and self.arrivals.ramp_up_strategy is not None:
            raise ConfigError("--slo searches a steady rate: leave the ramp out.", param="slo")
        if self.slo is not None and self.arrivals.max_concurrency is not None:
            raise ConfigError(
                "--slo searches a rate at which requests come: leave --max-concurrency out, behind which they wait in "
                "their client.",
                param="slo",
            )
