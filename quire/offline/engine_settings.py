"""The keyword arguments of `LLM`, `AsyncLLM` and `LLMEngine`, for type checkers and editors.

`.ci/settings` writes this file from Config, which has the defaults, descriptions and checks.

A number may also be text as on the command line ("8k"), and a data type one of torch's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    import torch


class EngineSettings(TypedDict, total=False):
    """Settings of an engine in this process. `quire serve --help` describes them."""

    gguf_file: str | None
    tokenizer: str | None
    skip_tokenizer_init: bool
    dtype: Literal["auto", "bfloat16", "float", "float16", "float32", "half"] | torch.dtype
    quantization: str | None
    model_impl: Literal["auto", "quire", "transformers", "vllm"]
    runner: Literal["auto", "generate", "pooling"]
    convert: Literal["auto", "none", "embed", "classify"]
    pooler_config: Mapping[str, Any]
    language_model_only: bool
    max_model_len: int | str | Literal["auto"] | None
    revision: str | None
    tokenizer_revision: str | None
    hf_overrides: Mapping[str, Any]
    hf_token: str | None
    served_model_name: Sequence[str]
    seed: int | str
    max_logprobs: int | str
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
    logits_processors: Sequence[str] | Sequence[type]
    generation_config: str
    override_generation_config: Mapping[str, Any]
    load_format: Literal["auto", "safetensors", "gguf", "bitsandbytes", "dummy"]
    download_dir: str | None
    use_tqdm_on_load: bool
    block_size: Literal[8, 16, 32, 64, 128]
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"]
    gpu_memory_utilization: float | str | None
    kv_cache_memory_bytes: int | str | None
    enable_prefix_caching: bool
    prompt_cache_share: float | str
    swap_space: float | str
    kv_offloading_size: float | str | None
    kv_disk_path: str | None
    kv_disk_size: float | str
    num_gpu_blocks_override: int | str | None
    mamba_cache_mode: Literal["align", "none"]
    mamba_block_size: int | str | None
    mamba_cache_share: float | str
    num_states_override: int | str | None
    max_num_seqs: int | str | None
    max_num_batched_tokens: int | str | None
    long_prefill_token_threshold: int | str
    scheduling_policy: Literal["fcfs", "priority"]
    performance_mode: Literal["balanced", "interactivity", "throughput"] | None
    max_queued_requests: int | str | None
    max_queued_tokens: int | str | None
    max_queue_time: float | str | None
    overload_queue_time: float | str | None
    preemption_mode: Literal["recompute", "swap"] | None
    device: Literal["auto", "cuda", "cpu"]
    enforce_eager: bool
    max_cudagraph_capture_size: int | str | None
    cpu_threads: int | str | None
    tensor_parallel_size: int | str
    pipeline_parallel_size: int | str
    data_parallel_size: int | str
    enable_expert_parallel: bool
    distributed_timeout_seconds: int | str | None
    distributed_executor_backend: Literal["mp", "uni", "ray"] | None
    nnodes: int | str | None
    node_rank: int | str
    master_addr: str
    master_port: int | str
    node_key_file: str | None
    speculative_config: Mapping[str, Any] | None
    speculative_model: str | None
    num_speculative_tokens: int | str | None
    enable_lora: bool
    lora_modules: Sequence[str]
    lora_dir: str | None
    max_loras: int | str
    max_lora_rank: int | str
    max_cpu_loras: int | str | None
    lora_pinned: Sequence[str]
    limit_mm_per_prompt: Mapping[str, Any]
    mm_processor_kwargs: Mapping[str, Any]
    media_io_kwargs: Mapping[str, Any]
    mm_processor_cache_gb: float | str
    allowed_media_domains: Sequence[str]
    allowed_local_media_path: str | None
    chat_template: str | None
    reasoning_parser: str | None
    log_format: Literal["text", "json"]
    otlp_traces_endpoint: str | None
    custom_histogram_buckets: Mapping[str, Any]


class AsyncEngineSettings(EngineSettings, total=False):
    """Settings of an engine of `AsyncLLM` or `LLMEngine`."""

    disable_log_stats: bool
    enable_log_requests: bool
