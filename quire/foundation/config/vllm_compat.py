"""vLLM's settings that this version does not have: a closed list, for the command line and `LLM(**settings)`.

A neutral value (one that asks for nothing) is accepted with one warning; any other is refused by name. A setting that
gets implemented leaves the list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.errors import ConfigError

ANY = object()
"""A neutral value that stands for every value: the setting has no meaning here."""


@dataclass(frozen=True)
class VllmSetting:
    """A setting of vLLM: its neutral values, which are accepted without effect (None always is); why it has no effect,
    or what to do instead; and whether it takes no value on the command line."""

    neutral: tuple[Any, ...]
    advice: str
    is_flag: bool = False


def _group(advice: str, **neutral: Any) -> dict[str, VllmSetting]:
    """Settings with the same advice, each with its neutral value or a tuple of neutral values."""
    return {
        name: VllmSetting(value if isinstance(value, tuple) else (value,), advice, isinstance(value, bool))
        for name, value in neutral.items()
    }


def _flags(advice: str, *names: str) -> dict[str, VllmSetting]:
    """Flags without a value that have no meaning here, whether set or not."""
    return {name: VllmSetting((True, False), advice, is_flag=True) for name in names}


_LATER = "it comes in a later version; leave it out"

VLLM_SETTINGS: dict[str, VllmSetting] = {
    # What has no effect here.
    **_group("one step is planned while the one before it runs, always", num_scheduler_steps=ANY),
    **_group("no request is held back on purpose", scheduler_delay_factor=(0, 0.0)),
    **_group("long prompts are always read in chunks", enable_chunked_prefill=True),
    **_group("the next step is always planned ahead", async_scheduling=True),
    **_group("requests are logged only with --enable-log-requests", disable_log_requests=True),
    **_group("a stream always brings each token as it is sampled", stream_interval=1),
    **_group("the tokenizers library reads every tokenizer", tokenizer_mode=("auto", "hf", "slow", "fast")),
    **_group("one thread tokenizes; there is no pool", tokenizer_pool_size=ANY, renderer_num_workers=ANY),
    **_group("blocks are named by sha256", prefix_caching_hash_algo=("sha256", "sha256_cbor")),
    **_group("the weights' format is seen from their files", config_format=("auto", "hf")),
    **_group("every model runs on Quire's own code", model_impl=("auto", "vllm")),
    **_group("adapters never extend the vocabulary", lora_extra_vocab_size=ANY),
    **_group("the engine has one generation", use_v2_block_manager=ANY),
    **_group("there is no limit below --max-model-len", max_seq_len_to_capture=ANY, max_context_len_to_capture=ANY),
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
    # Devices.
    **_group("this version has --tensor-, --pipeline- and --data-parallel-size; leave it out",
        decode_context_parallel_size=1, prefill_context_parallel_size=1, data_parallel_size_local=1,
    ),
    **_group("Ray starts ranks of other machines with --distributed-executor-backend ray; leave it out",
        worker_use_ray=False, ray_workers_use_nsight=False,
    ),
    **_group("ranks are processes, and --tensor-parallel-size says how many; leave it out",
        data_parallel_rank=0, data_parallel_start_rank=0, data_parallel_address=None, data_parallel_rpc_port=ANY,
        data_parallel_backend="mp", data_parallel_hybrid_lb=False, data_parallel_external_lb=False, enable_eplb=False,
        eplb_config=None, num_redundant_experts=0, expert_placement_strategy="linear", enable_dbo=False,
        enable_elastic_ep=False, worker_cls="auto", worker_extension_cls=None,
    ),
    **_group("ranks gather the rows of all engines and reduce their sums; leave it out",
        all2all_backend="allgather_reducescatter",
    ),
    **_flags("ranks share memory, and nothing else adds their sums", "disable_custom_all_reduce"),
    **_group("weights are read by one process", max_parallel_loading_workers=ANY),
    **_group("kernels are chosen, and steps recorded, by the model and the device; leave it out",
        attention_backend=None, attention_config=None, cudagraph_capture_sizes=None, compilation_config=None,
        optimization_level=(0, 1, 2, 3), cudagraph_metrics=False, moe_backend="auto", linear_backend="auto",
        kernel_config=None,
    ),
    **_group(_LATER, enable_sleep_mode=False, numa_bind=False),
    **_group("weights stay in memory", cpu_offload_gb=(0, 0.0), offload_backend="auto", offload_group_size=0),
    # The model.
    **_group("code from a model's repository is never run", trust_remote_code=False),
    **_group("leave it out: the checkpoint or --quantization say how weights are quantized",
        quantization_config=None, allow_deprecated_quantization=False,
    ),
    **_group("all layers have the same type of KV cache; leave it out", kv_cache_dtype_skip_layers=None),
    **_flags("scales of a quantized KV cache that the checkpoint does not bring are always calculated",
        "calculate_kv_scales",
    ),
    **_group("this version generates text only; leave it out",
        runner=("auto", "generate"), convert=("auto", "none"), task=("auto", "generate"), pooler_config=None,
        override_pooler_config=None, limit_mm_per_prompt=None, language_model_only=False, media_io_kwargs=None,
        mm_processor_kwargs=None, mm_processor_cache_gb=ANY, enable_mm_embeds=False, enable_prompt_embeds=False,
        allowed_local_media_path="", allowed_media_domains=None, interleave_mm_strings=False, skip_mm_profiling=False,
    ),
    **_group("--revision is used for the tokenizer too", tokenizer_revision=None),
    **_group("code from a model's repository is never run", code_revision=None),
    **_group(_LATER,
        disable_sliding_window=False, hf_config_path=None, hf_overrides=None, rope_scaling=None, rope_theta=None,
        logits_processor_pattern=None, ignore_patterns=None, override_attention_dtype=None,
        model_loader_extra_config=None, safetensors_load_strategy=("lazy", "auto"),
    ),
    **_group("adapters are of --dtype, change text models alone, and whatever they have is served or refused; leave "
        "it out",
        lora_dtype="auto", fully_sharded_loras=False, lora_target_modules=None, default_mm_loras=None,
        enable_lora_bias=False,
    ),
    **_group("say it in --speculative-config",
        spec_method=None, spec_model=None, spec_tokens=None, ngram_prompt_lookup_max=None, ngram_prompt_lookup_min=None,
    ),
    **_group("a draft model runs on one device", speculative_draft_tensor_parallel_size=1),
    **_group("a draft model follows sequences as far as --max-model-len", speculative_max_model_len=None),
    # The engine.
    **_group(_LATER,
        max_num_partial_prefills=1, max_long_partial_prefills=1, scheduler_cls=None, kv_offloading_size=None,
        kv_offloading_backend=None, kv_transfer_config=None, kv_events_config=None, ec_transfer_config=None,
        weight_transfer_config=None, additional_config=None, profiler_config=None,
    ),
    **_group("--max-queued-requests limits what waits, and not what runs", max_num_queued_reqs=None),
    **_group("--max-queued-tokens limits what waits, with expected outputs", max_num_queued_tokens=None),
    **_group("recurrent models come in a later version; leave it out",
        mamba_cache_dtype="auto", mamba_ssm_cache_dtype="auto", mamba_block_size=None, mamba_cache_mode="none",
    ),
    # The server.
    **_group("every grammar is compiled by llguidance", guided_decoding_backend=ANY),
    **_group("send whitespace options with the request, in structured_outputs",
        structured_outputs_config=None, guided_decoding_disable_any_whitespace=False,
    ),
    **_group(_LATER, tool_parser_plugin=None, tool_server=None, reasoning_parser_plugin=None),
    **_flags("reasoning is told apart wherever the model's format is known", "enable_reasoning"),
    **_group("the chat template, or --reasoning-parser, tells what begins and ends reasoning; leave it out",
        reasoning_config=None,
    ),
    **_group(_LATER,
        return_tokens_as_token_ids=False, enable_force_include_usage=False, enable_log_outputs=False,
        log_config_file=None, max_log_len=None, log_error_stack=False, uds=None, middleware=None, tokens_only=False,
        grpc=False, fingerprint_mode="none",
    ),
    **_group("put a proxy in front for more than the other --ssl flags", ssl_ciphers=None, enable_ssl_refresh=False),
    **_group("probes are never logged", disable_access_log_for_endpoints=ANY),
    **_group("--max-request-bytes limits what is read", h11_max_incomplete_event_size=ANY, h11_max_header_count=ANY),
    **_group("metrics are at /metrics",
        collect_detailed_traces=None, show_hidden_metrics_for_version=ANY, kv_cache_metrics=False,
        kv_cache_metrics_sample=ANY, enable_mfu_metrics=False, enable_layerwise_nvtx_tracing=False,
        enable_logging_iteration_details=False,
    ),
}  # fmt: skip

VLLM_ALIASES: dict[str, str] = {
    "-tp": "tensor_parallel_size", "-pp": "pipeline_parallel_size", "-dp": "data_parallel_size",
    "-ep": "enable_expert_parallel", "-n": "nnodes", "-r": "node_rank", "-q": "quantization",
    "-asc": "api_server_count", "-sc": "speculative_config", "-cc": "compilation_config", "-ac": "attention_config",
}  # fmt: skip
"""Short forms on the command line."""


def check_vllm_setting(name: str, value: Any) -> str:
    """The warning about a neutral value of such a setting. Raises ConfigError if the value asks for something."""
    setting = VLLM_SETTINGS[name]
    flag = f"--{name.replace('_', '-')}"
    if value is None or any(neutral is ANY or _same(neutral, value) for neutral in setting.neutral):
        return f"{flag} has no effect: {setting.advice}."
    shown = "" if value is True else f" {value}"
    raise ConfigError(f"{flag}{shown} is not supported: {setting.advice}.", param=name)


def _same(neutral: Any, value: Any) -> bool:
    if isinstance(neutral, bool) or isinstance(value, bool):
        return neutral is value
    return neutral == value or str(neutral) == str(value)
