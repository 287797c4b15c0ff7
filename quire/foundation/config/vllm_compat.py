"""vLLM's settings that this version does not have: a closed list, for the command line and `LLM(**settings)`.

A neutral value (one that asks for nothing, or a hint that changes no result) is accepted with one warning; any other is
refused by name, with what to do. A setting that gets implemented leaves the list, of which docs/migrating-from-vllm.md
is written. `vllm_checks.py` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ANY = object()
"""A neutral value that stands for every value: the setting has no meaning here."""


@dataclass(frozen=True)
class VllmSetting:
    """A setting of vLLM that Quire does not have.

    Attributes:
        neutral: Values that are accepted without effect, or functions that tell them; None and what is empty are, too.
        advice: Why it has no effect, or what to do instead.
        is_flag: Whether it takes no value on the command line.
        is_list: Whether it takes several.
    """

    neutral: tuple[Any, ...]
    advice: str
    is_flag: bool = False
    is_list: bool = False

    @property
    def is_always_neutral(self) -> bool:
        return self.neutral == (ANY,) or set(self.neutral) == {True, False}


def _group(advice: str, **neutral: Any) -> dict[str, VllmSetting]:
    """Settings with the same advice, each with its neutral value or a tuple of neutral values."""
    return {
        name: VllmSetting(value if isinstance(value, tuple) else (value,), advice, isinstance(value, bool))
        for name, value in neutral.items()
    }


def _flags(advice: str, *names: str) -> dict[str, VllmSetting]:
    """Flags without a value that have no meaning here, whether set or not."""
    return {name: VllmSetting((True, False), advice, is_flag=True) for name in names}


def _hints(advice: str, *names: str) -> dict[str, VllmSetting]:
    """Settings that have no meaning here, whatever their value."""
    return {name: VllmSetting((ANY,), advice) for name in names}


def _lists(advice: str, *names: str, neutral: tuple[Any, ...] = (ANY,)) -> dict[str, VllmSetting]:
    """Settings that take several values."""
    return {name: VllmSetting(neutral, advice, is_list=True) for name in names}


def _only_backend(settings: Any) -> bool:
    """`backend` alone, which chooses who compiles grammars"""
    left = {"backend", "disable_fallback", "enable_in_reasoning"}
    return isinstance(settings, Mapping) and not any(value for name, value in settings.items() if name not in left)


_KERNELS = "kernels are chosen, and steps recorded, by the model and the device"
_TEXT_ONLY = "this version reads text and images, and writes text alone; leave it out"
_NO_CODE = "code from a model's repository is never run"
_ONE_KIND = "ranks are processes, and --tensor-parallel-size says how many; leave it out"
_NO_MEDIA = "images are read in one way"

VLLM_SETTINGS: dict[str, VllmSetting] = {
    # What has no effect here.
    **_hints("steps are always scheduled asynchronously", "num_scheduler_steps", "multi_step_stream_outputs"),
    **_group("no request is held back on purpose", scheduler_delay_factor=(0, 0.0)),
    **_flags("long prompts are always read in chunks", "enable_chunked_prefill"),
    **_hints("as many prompts are read at once as a step has room for",
        "max_num_partial_prefills", "max_long_partial_prefills",
    ),
    **_flags("steps are always scheduled asynchronously", "async_scheduling"),
    **_group("requests are logged only with --enable-log-requests", disable_log_requests=True),
    **_group("the tokenizers library reads every tokenizer", tokenizer_mode=("auto", "hf", "slow", "fast")),
    **_hints("one thread tokenizes; there is no pool",
        "tokenizer_pool_size", "tokenizer_pool_type", "renderer_num_workers",
    ),
    **_group("blocks are named by sha256", prefix_caching_hash_algo=("sha256", "sha256_cbor")),
    **_group("the weights' format is seen from their files", config_format=("auto", "hf")),
    **_hints("adapters never extend the vocabulary", "lora_extra_vocab_size"),
    **_hints("the engine has one generation", "use_v2_block_manager"),
    **_hints("there is no limit below --max-model-len", "max_seq_len_to_capture", "max_context_len_to_capture"),
    **_flags("there is no attention of that kind to switch off", "disable_cascade_attn"),
    **_flags(
        "the KV cache is divided as the model's layers need it", "disable_hybrid_kv_cache_manager",
        "kv_sharing_fast_prefill", "scheduler_reserve_full_isl",
    ),
    **_flags("what there is to say about prompt tokens is always in `usage`", "enable_prompt_tokens_details"),
    **_flags("the server's load is always at /load", "enable_server_load_tracking"),
    **_flags("/docs never needs a network", "enable_offline_docs"),
    **_flags("the API always runs in a process of its own", "disable_frontend_multiprocessing"),
    **_flags("nothing is ever reported to anyone", "disable_usage_stats"),
    **_flags("variables that Quire does not know are never read", "fail_on_environ_validation"),
    **_flags("what fails inside is always logged with its stack", "log_error_stack"),
    **_flags("each engine has its own line in the log", "aggregate_engine_logging"),
    # Devices.
    **_flags("ranks share memory, and nothing else adds their sums", "disable_custom_all_reduce"),
    **_flags(_KERNELS,
        "enable_flashinfer_autotune", "use_fp64_gumbel", "specialize_active_lora", "cudagraph_metrics",
        "enable_cumem_allocator", "disable_nccl_for_dp_synchronization",
    ),
    **_hints(_KERNELS,
        "attention_backend", "attention_config", "compilation_config", "optimization_level", "moe_backend",
        "linear_backend", "kernel_config", "ir_op_priority", "mamba_backend", "gdn_prefill_backend", "dcp_comm_backend",
        "cp_kv_cache_interleave_size", "dcp_kv_cache_interleave_size",
    ),
    **_lists(_KERNELS, "cudagraph_capture_sizes"),
    **_hints("weights are read by threads of one process, as fast as the disk brings them",
        "max_parallel_loading_workers", "safetensors_prefetch_num_threads", "safetensors_prefetch_block_size",
        "model_loader_extra_config", "pt_load_map_location",
    ),
    **_group("weights are read as they are in the files; leave it out",
        safetensors_load_strategy=("lazy", "auto", "eager", "prefetch"),
    ),
    **_lists("only files that are read are downloaded", "ignore_patterns"),
    **_flags("threads are placed by the engine; numactl places the whole server", "numa_bind"),
    **_lists("threads are placed by the engine; numactl places the whole server", "numa_bind_nodes", "numa_bind_cpus"),
    **_group("this version has --tensor-, --pipeline- and --data-parallel-size; leave it out",
        decode_context_parallel_size=1, prefill_context_parallel_size=1, data_parallel_size_local=1,
    ),
    **_group("Ray starts ranks of other machines with --distributed-executor-backend ray; leave it out",
        worker_use_ray=False, ray_workers_use_nsight=False,
    ),
    **_group(_ONE_KIND,
        data_parallel_rank=0, data_parallel_start_rank=0, data_parallel_address=None, data_parallel_backend="mp",
        data_parallel_hybrid_lb=False, data_parallel_external_lb=False, data_parallel_multi_port_external_lb=False,
        enable_eplb=False, eplb_config=None, num_redundant_experts=0, expert_placement_strategy="linear",
        enable_dbo=False, ubatch_size=0, enable_elastic_ep=False, enable_ep_weight_filter=False, worker_cls="auto",
        worker_extension_cls=None,
    ),
    **_hints(_ONE_KIND,
        "data_parallel_rpc_port", "data_parallel_supervisor_port", "dp_supervisor_probe_interval_s",
        "dp_supervisor_probe_timeout_s", "dp_supervisor_probe_failure_threshold", "dbo_decode_token_threshold",
        "dbo_prefill_token_threshold",
    ),
    **_group("--distributed-timeout-seconds is for all ranks; leave it out", cpu_distributed_timeout_seconds=None),
    **_group("ranks gather the rows of all engines and reduce their sums; leave it out",
        all2all_backend="allgather_reducescatter",
    ),
    **_group("weights stay in memory: --quantization fp8, or ranks on more cards, make room; leave it out",
        cpu_offload_gb=(0, 0.0), offload_backend="auto", offload_group_size=0, enable_sleep_mode=False,
    ),
    **_hints("weights stay in memory",
        "cpu_offload_params", "offload_num_in_group", "offload_prefetch_step", "offload_params",
    ),
    # The model.
    **_flags(_NO_CODE, "trust_remote_code"),
    **_hints(_NO_CODE, "code_revision"),
    **_group("leave it out: the checkpoint or --quantization say how weights are quantized",
        quantization_config=None, allow_deprecated_quantization=False,
    ),
    **_lists("all layers have the same type of KV cache; leave it out", "kv_cache_dtype_skip_layers", neutral=()),
    **_flags("scales of a quantized KV cache that the checkpoint does not bring are always calculated",
        "calculate_kv_scales",
    ),
    **_group(_TEXT_ONLY,
        io_processor_plugin=None, enable_mm_embeds=False, enable_prompt_embeds=False,
        mm_encoder_only=False, enable_return_routed_experts=False,
    ),
    **_group("give --runner and --convert in its place", task=("auto", "generate")),
    **_group("give --pooler-config in its place", override_pooler_config=None),
    **_flags(_NO_MEDIA,
        "interleave_mm_strings", "skip_mm_profiling", "disable_chunked_mm_input",
        "enable_tower_connector_lora", "enable_flash_late_interaction",
    ),
    **_hints(_NO_MEDIA,
        "mm_processor_cache_type", "mm_shm_cache_max_object_size_mb", "mm_encoder_tp_mode",
        "mm_encoder_attn_backend", "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path",
        "mm_encoder_fp8_scale_save_path", "mm_encoder_fp8_scale_save_margin", "video_pruning_rate", "mm_tensor_ipc",
    ),
    **_group("write it into --hf-overrides, as JSON with the key of config.json",
        rope_scaling=None, rope_theta=None, hf_config_path=None,
    ),
    **_group("layers have the windows that config.json gives them: change it with --hf-overrides",
        disable_sliding_window=False,
    ),
    **_group("attention computes in --dtype; leave it out", override_attention_dtype=None),
    **_group("processors are named by --logits-processors; leave it out", logits_processor_pattern=None),
    **_group("adapters are of --dtype, change text models alone, and whatever they have is served or refused; leave "
        "it out",
        lora_dtype="auto", fully_sharded_loras=False, default_mm_loras=None, enable_lora_bias=False,
        enable_mixed_moe_lora_format=False,
    ),
    **_lists("an adapter changes what its files name; leave it out", "lora_target_modules", neutral=()),
    **_group("say it in --speculative-config",
        spec_method=None, spec_model=None, spec_tokens=None, ngram_prompt_lookup_max=None, ngram_prompt_lookup_min=None,
    ),
    **_group("ranks divide a draft model like the model", speculative_draft_tensor_parallel_size=1),
    **_group("a draft model follows sequences as far as --max-model-len", speculative_max_model_len=None),
    # The engine.
    **_group("the scheduler is not replaceable: --scheduling-policy and --performance-mode change it; leave it out",
        scheduler_cls=None,
    ),
    **_group("--kv-offloading-size keeps KV blocks in host memory by Quire's own means; leave it out",
        kv_offloading_backend=("native",),
    ),
    **_group("--kv-offloading-size keeps KV blocks in host memory, and no cache leaves the server; leave it out",
        kv_transfer_config=None, kv_events_config=None, ec_transfer_config=None,
    ),
    **_group("POST /admin/model swaps models while the server runs; leave it out", weight_transfer_config=None),
    **_group("Quire reads no settings of plugins; leave it out", additional_config=None),
    **_group("quire bench measures kernels and steps; leave it out", profiler_config=None),
    **_group("--max-queued-requests limits what waits, and not what runs", max_num_queued_reqs=None),
    **_group("--max-queued-tokens limits what waits, with expected outputs", max_num_queued_tokens=None),
    **_group("states have the types that the model was made with; leave it out",
        mamba_cache_dtype="auto", mamba_ssm_cache_dtype="auto", enable_mamba_cache_stochastic_rounding=False,
    ),
    **_hints("states have the types that the model was made with", "mamba_cache_philox_rounds"),
    # The server.
    **_hints("every grammar is compiled by llguidance", "guided_decoding_backend"),
    **_group("send whitespace options with the request, in structured_outputs; --reasoning-parser is a flag of its own",
        structured_outputs_config=_only_backend, guided_decoding_disable_any_whitespace=False,
    ),
    **_group("the formats of tool calls and reasoning that docs/tools.md lists are served; leave it out",
        tool_parser_plugin=None, reasoning_parser_plugin=None,
    ),
    **_group("the client runs tools, the server none; leave it out", tool_server=None),
    **_flags("reasoning is told apart wherever the model's format is known", "enable_reasoning"),
    **_group("the chat template, or --reasoning-parser, tells what begins and ends reasoning; leave it out",
        reasoning_config=None,
    ),
    **_group("answers are never logged: let the client keep them; leave it out", enable_log_outputs=False),
    **_flags("answers are never logged", "enable_log_deltas"),
    **_group("put a proxy in front that listens at a socket file; leave it out", uds=None),
    **_group("POST /inference/v1/generate works on tokens beside the other routes; leave it out", tokens_only=False),
    **_group("the API is HTTP; leave it out", grpc=False),
    **_group("answers have no fingerprint; leave it out", fingerprint_mode="none", fingerprint_value=None),
    **_group("put a proxy in front for more than the other --ssl flags", ssl_ciphers=None, enable_ssl_refresh=False),
    **_hints("probes are never logged", "disable_access_log_for_endpoints"),
    **_hints("--max-request-bytes limits what is read", "h11_max_incomplete_event_size", "h11_max_header_count"),
    **_lists("traces of --otlp-traces-endpoint have the times of queue, prompt and output",
        "collect_detailed_traces",
    ),
    **_hints("metrics are at /metrics", "show_hidden_metrics_for_version", "kv_cache_metrics_sample"),
    **_flags("metrics are at /metrics",
        "kv_cache_metrics", "enable_mfu_metrics", "enable_layerwise_nvtx_tracing", "enable_logging_iteration_details",
    ),
}  # fmt: skip

VLLM_VALUES: dict[str, dict[str, str]] = {
    "load_format": {
        "hf": "auto", "fastsafetensors": "safetensors", "instanttensor": "safetensors", "runai_streamer": "safetensors",
    },
}  # fmt: skip
"""vLLM's values of settings that Quire has, and what they mean here: the result is the same."""
VLLM_REFUSED_VALUES: dict[str, dict[str, str]] = {
    "load_format": dict.fromkeys(
        ("pt", "npcache", "mistral", "tensorizer", "sharded_state", "runai_streamer_sharded", "modelexpress"),
        "convert the checkpoint to safetensors in Hugging Face's layout",
    ),
}
"""vLLM's values of settings that Quire has, which it does not serve, and what to do."""

VLLM_ALIASES: dict[str, str] = {
    "-tp": "tensor_parallel_size", "-pp": "pipeline_parallel_size", "-dp": "data_parallel_size",
    "-ep": "enable_expert_parallel", "-n": "nnodes", "-r": "node_rank", "-q": "quantization",
    "-asc": "api_server_count", "-sc": "speculative_config", "-cc": "compilation_config", "-ac": "attention_config",
    "-O": "optimization_level", "-dcp": "decode_context_parallel_size", "-pcp": "prefill_context_parallel_size",
    "-dpn": "data_parallel_rank", "-dpr": "data_parallel_start_rank", "-dpl": "data_parallel_size_local",
    "-dpa": "data_parallel_address", "-dpp": "data_parallel_rpc_port", "-dpb": "data_parallel_backend",
    "-dph": "data_parallel_hybrid_lb", "-dpe": "data_parallel_external_lb",
    "-dpm": "data_parallel_multi_port_external_lb",
}  # fmt: skip
"""Short forms on the command line."""
