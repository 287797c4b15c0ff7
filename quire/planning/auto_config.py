"""Automatic configuration: open settings are chosen from the model and the machine, with reasons.

Returns a new Config and changes nothing in place. Imports no torch, so the supervisor can call it before a child runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from quire.errors import ConfigError
from quire.foundation.config import Config, DeviceConfig, SchedulerConfig
from quire.foundation.config.cache import is_quantized
from quire.foundation.config.model import LoadFormat, ModelDtype
from quire.models.layer_spec import LatentSpec
from quire.models.quantization.formats import CodebookFormat, Fp8Format, GgufFormat
from quire.models.quantization.held_bytes import HeldWeights
from quire.models.spec import ModelSpec, on_a_gpu, spec_of
from quire.models.weights import hub
from quire.models.weights.config_overrides import overridden
from quire.models.weights.hub import GgufChoice
from quire.planning import rank_checks
from quire.planning.draft_model import with_draft_model
from quire.planning.fallback import check_fallback, fallback_lines, for_device, for_fallback
from quire.planning.footprint import GIB, format_bytes
from quire.planning.images import for_images, memory_of_images
from quire.planning.kv_cache_plan import KVCachePlan, check_host_tier
from quire.planning.machine import Gpu, Machine, this_machine
from quire.planning.memory_budget import KVDemand
from quire.planning.pooling import pooling_lines
from quire.planning.speech import check_speech, speech_lines
from quire.planning.state_memory import check_states, most_sequences
from quire.planning.step_limits import check_length, least_step_tokens, length_reason

DEFAULT_MAX_NUM_SEQS = 256
DEFAULT_MAX_NUM_SEQS_LARGE_GPU = 512
"""The default for GPUs whose memory holds the KV cache of that many sequences beside a model of usual size. More rows
would bring a dense model no more tokens a second, because a step takes longer in proportion."""
LARGE_GPU_BYTES = 60 * GIB
DEFAULT_MAX_NUM_BATCHED_TOKENS_CPU = 512
DEFAULT_MAX_NUM_BATCHED_TOKENS_GPU = 8192
DEFAULT_CUDAGRAPH_CAPTURE_SIZE = 512


@dataclass(frozen=True)
class ResolvedConfig:
    """Settings of which none is open, the model and memory plan behind them, and a line of reason for each choice."""

    config: Config
    spec: ModelSpec
    memory: KVCachePlan
    reasons: tuple[str, ...]


def resolve(config: Config, machine: Machine | None = None, *, replicas: bool = False) -> ResolvedConfig:
    """Resolve every open setting.

    Args:
        machine: Where it runs; None for this machine.
        replicas: Whether it is for a server, which may have several engines, and nodes that Ray starts.

    Raises:
        ModelNotFoundError, CheckpointError: From reading the model's config.
        ConfigError, MemoryBudgetError: Settings that contradict the model or the machine; the message names the flag.
    """
    machine = machine or this_machine()
    model = config.model
    name = model.model
    directory, tokenizer = _resolve_directories(config)
    spec = spec_of(model, directory)
    if spec.head is not None:
        raise ConfigError(
            f'{name} is a head of EAGLE-3, no model: give it in --speculative-config with "method": "eagle3", and the '
            "model that it is for as --model.",
            param="model",
        )
    _check_load_format(config.load.load_format, name, spec, directory)
    device, device_line = _resolve_device(config, machine)
    config, spec = for_device(replace(config, device=device), spec, directory)
    check_fallback(config, spec)
    _check_kv_cache_dtype(config, spec)
    config = for_fallback(config, spec)
    device = config.device
    check_states(config, spec, device.device)
    if device.device == "cuda":
        spec = on_a_gpu(spec)
    gpu = machine.gpu if device.device == "cuda" else None
    rank_checks.check_nodes(config, device.device)
    rank_checks.check_backend(config.parallel, is_server=replicas)
    mesh = rank_checks.check_ranks(config, spec, on_gpu=gpu is not None)
    engines = config.parallel.data_parallel_size
    rank_checks.check_engines(engines, mesh, gpu, replicas=replicas)
    config, spec, image_lines = for_images(config, spec, gpus=0 if gpu is None else mesh.size)
    check_speech(config, spec, mesh)
    config.lora.check(model.names)
    if config.lora.lora_dir and not Path(config.lora.lora_dir).is_dir():  # no request could ever find an adapter in it
        raise ConfigError(f"--lora-dir {config.lora.lora_dir} is no directory.", param="lora_dir")
    config.speculation.check_device(device.device, mesh.tp, mesh.pp)
    config = with_draft_model(config, spec, directory)
    dtype, dtype_reason = resolve_dtype(model.dtype, spec, machine, on_gpu=gpu is not None)
    check_length(config, spec)
    check_host_tier(config, spec)
    _check_not_negative(
        swap_space=config.cache.swap_space, long_prefill_token_threshold=config.scheduler.long_prefill_token_threshold
    )
    own_memory = machine.memory_bytes // (config.parallel.ranks_of_a_node * engines)
    drafts = config.speculation.speculation is not None
    most_seqs = most_sequences(spec, dtype, mesh.tp * (gpu.free_bytes if gpu else own_memory), drafts=drafts)
    least_tokens = least_step_tokens(config, spec)
    scheduler, batch_line = batch_limits(config.scheduler, gpu, mesh.pp, least_tokens, most_seqs)
    resolved = replace(
        config.model,
        model=str(directory),
        tokenizer=str(tokenizer),
        dtype=dtype,
        served_model_name=model.names,
    )
    config = replace(config, model=resolved, scheduler=scheduler, device=_resolve_cudagraph_size(device))
    plan = rank_checks.plan_for_all(config, spec, replace(machine, memory_bytes=own_memory), mesh)
    reasons = (
        f"model       {name} ({spec.architecture}, {spec.num_parameters / 1e6:,.1f}M parameters) from {directory}",
        *fallback_lines(config, spec, model.model_impl),
        device_line,
        f"dtype       {dtype}: {dtype_reason}",
        *_head_lines(spec),
        *pooling_lines(spec),
        *(line + memory_of_images(config, spec) * (line is image_lines[-1]) for line in image_lines),
        *speech_lines(replace(config, model=resolved), spec),
        *_quantization_lines(spec),
        f"context     {plan.max_model_len:,} tokens: {length_reason(config, spec)}",
        batch_line,
        *rank_checks.rank_lines(mesh, spec, config.parallel.ranks_of_a_node, on_gpu=gpu is not None),
        *rank_checks.node_lines(config.parallel),
        *rank_checks.engine_lines(engines, mesh.size, gpu),
        _cache_line(config, plan, spec),
        *_state_lines(config, plan, spec),
        _memory_line(config, plan, gpu.free_bytes if gpu else own_memory),
    )
    return ResolvedConfig(_with_plan(config, plan), spec, plan, reasons)


def batch_limits(
    asked: SchedulerConfig, gpu: Gpu | None, stages: int = 1, least_tokens: int = 1, most_seqs: int | None = None
) -> tuple[SchedulerConfig, str]:
    """Return the limits of a step, of which open ones are chosen, and their line of the report. Steps run on a CPU
    without `gpu`; in a pipeline each step has 1/stages of the sequences, so more of them are worth while on GPUs. A
    step has room for `least_tokens` unless fewer were asked for, and at most `most_seqs` sequences unless more were.
    Raises ConfigError if a limit that was asked for is
    less than 1."""
    default_tokens = DEFAULT_MAX_NUM_BATCHED_TOKENS_CPU if gpu is None else DEFAULT_MAX_NUM_BATCHED_TOKENS_GPU
    is_large = gpu is not None and gpu.memory_bytes >= LARGE_GPU_BYTES
    default_seqs = DEFAULT_MAX_NUM_SEQS_LARGE_GPU if is_large else DEFAULT_MAX_NUM_SEQS
    default_seqs *= 1 if gpu is None else stages
    default_seqs = default_seqs if most_seqs is None else min(default_seqs, most_seqs)
    seqs = default_seqs if asked.max_num_seqs is None else asked.max_num_seqs
    tokens = asked.max_num_batched_tokens
    tokens = max(default_tokens, least_tokens) if tokens is None else tokens
    for flag, value in (("max_num_seqs", seqs), ("max_num_batched_tokens", tokens)):
        if value < 1:
            raise ConfigError(f"--{flag.replace('_', '-')} must be at least 1, got {value}.", param=flag)
    line = f"batch       up to {seqs} sequences and {tokens} tokens a step: {_limits_reason(asked)}"
    return replace(asked, max_num_seqs=seqs, max_num_batched_tokens=tokens), line


def _limits_reason(asked: SchedulerConfig) -> str:
    given = {"sequences": asked.max_num_seqs is not None, "tokens": asked.max_num_batched_tokens is not None}
    if len(set(given.values())) == 1:
        return "as asked" if all(given.values()) else "default"
    return ", ".join(f"{name} {'as asked' if is_asked else 'by default'}" for name, is_asked in given.items())


def _resolve_directories(config: Config) -> tuple[Path, Path]:
    model, download_dir = config.model, config.load.download_dir
    wants_tokenizer = model.tokenizer is None and not model.skip_tokenizer_init
    gguf = GgufChoice(model.gguf_file, wants_tokenizer)
    found = hub.resolve(model.model, model.revision, model.hf_token, download_dir, gguf=gguf)
    directory = overridden(found, model.hf_overrides)
    name, revision = model.tokenizer, model.tokenizer_revision
    if name is None and (revision is None or Path(model.model).expanduser().exists()):
        return directory, directory
    asked = "--tokenizer" if name else "--tokenizer-revision"
    tokenizer = hub.resolve(name or model.model, revision, model.hf_token, download_dir, weights=False, asked=asked)
    return directory, tokenizer


def _check_load_format(asked: LoadFormat, name: str, spec: ModelSpec, directory: Path) -> None:
    """Raise a ConfigError if the checkpoint is not of the format that --load-format asks for."""
    is_gguf = any(directory.glob("*.gguf"))
    method = spec.quantization.method if spec.quantization else None
    advice = {
        "gguf": "" if is_gguf else "it has no GGUF file",
        "safetensors": "it is a GGUF model" if is_gguf else "",
        "bitsandbytes": "" if method == "bitsandbytes" else "add --quantization bitsandbytes",
    }
    if why := advice.get(asked):
        raise ConfigError(f"--load-format {asked} does not suit {name}: {why}, or leave it out.", param="load_format")


def _resolve_device(config: Config, machine: Machine) -> tuple[DeviceConfig, str]:
    asked, gpu = config.device.device, machine.gpu
    if asked == "cuda" and gpu is None:
        raise ConfigError(f"--device cuda: {machine.why_no_gpu}. Leave it out to run on the CPU.", param="device")
    if gpu is None or asked == "cpu":
        why = "as asked" if asked == "cpu" else machine.why_no_gpu
        return replace(config.device, device="cpu"), f"device      CPU: {why}"
    return replace(config.device, device="cuda"), f"device      {gpu.name}, {format_bytes(gpu.memory_bytes)}"


def _resolve_cudagraph_size(device: DeviceConfig) -> DeviceConfig:
    """Return the device's settings with the largest step that is replayed from CUDA graphs."""
    asked = device.max_cudagraph_capture_size
    if asked is not None:
        _check_not_negative(max_cudagraph_capture_size=asked)
    largest = DEFAULT_CUDAGRAPH_CAPTURE_SIZE if asked is None else asked
    if device.enforce_eager or device.device == "cpu":
        largest = 0
    return replace(device, max_cudagraph_capture_size=largest)


def _head_lines(spec: ModelSpec) -> list[str]:
    """A line that says that config.json is wrong about the head."""
    why = "lm_head of the files differs from the embedding: it is used, whatever tie_word_embeddings says"
    return [f"head        {why}"] if spec.untied else []


def _quantization_lines(spec: ModelSpec) -> list[str]:
    if spec.quantization is None:
        return []
    form = spec.quantization.rules[0].format
    if isinstance(form, GgufFormat) and spec.held == HeldWeights(form.gpu_dense, form.coded):
        return [f"weights     quantized: gguf, {form.name}; of 4 bits where the type has up to 4, else of 8"]
    at_load = " at the start" if isinstance(form, (Fp8Format, CodebookFormat)) and form.at_load else ""
    return [f"weights     quantized{at_load}: {spec.quantization.method}, {form.name}"]


def _check_not_negative(**settings: float) -> None:
    for name, value in settings.items():
        if not 0 <= value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 0, and finite; got {value:g}.", param=name)


def _with_plan(config: Config, plan: KVCachePlan) -> Config:
    block_bytes = plan.footprint.kv_cache // (plan.num_blocks + 1)
    on_host = plan.num_host_blocks * block_bytes / GIB
    if config.cache.kv_offloading_size is None:
        cache = replace(config.cache, swap_space=on_host)
    else:
        cache = replace(config.cache, kv_offloading_size=on_host * config.parallel.ranks)
    if config.device.device == "cpu":  # a GPU's worker measures first
        cache = replace(cache, num_gpu_blocks_override=plan.num_blocks, num_states_override=plan.num_states or None)
    return replace(config, cache=cache, model=replace(config.model, max_model_len=plan.max_model_len))


def _cache_line(config: Config, plan: KVCachePlan, spec: ModelSpec) -> str:
    """The line about the KV cache: how many tokens of sequences of full length it holds; windows keep fewer."""
    tokens = KVDemand.of(config, spec).cached_tokens(plan.num_blocks, plan.max_model_len)
    about = "about " if plan.is_estimate else ""
    kind = "" if config.kv_dtype == config.model.dtype else f" of {config.kv_dtype}"
    blocks = f"{about}{plan.num_blocks:,} blocks of {config.cache.block_size}"
    return f"kv cache    {blocks} = {tokens:,} tokens{kind}: {plan.reason}"


def _state_lines(config: Config, plan: KVCachePlan, spec: ModelSpec) -> list[str]:
    """The line about states; none for a model without them."""
    if not plan.num_states:
        return []
    rows, cache, size = config.scheduler.max_num_seqs or 0, config.cache, spec.state_bytes(config.model.dtype)
    about = "about " if plan.is_estimate else ""
    checkpoints = f"{about}{plan.num_states - rows:,} checkpoints"
    if cache.enable_prefix_caching and cache.mamba_cache_mode != "none":
        checkpoints += f", {cache.state_spacing:,} tokens apart and at ends"
    scratch = ", and one each for drafts" if config.speculation.speculation is not None else ""
    return [
        f"states      {format_bytes(size)} a sequence in {len(spec.state_layers)} layers: {rows} sequences and "
        f"{checkpoints}{scratch}, {format_bytes(plan.footprint.states)}"
    ]


def _memory_line(config: Config, plan: KVCachePlan, available: int) -> str:
    parts, asked = plan.footprint, config.cache.host_bytes(config.parallel.ranks)
    of = f" of {asked / GIB:g} GiB asked" if parts.swap_space < asked else ""
    states = f", states {format_bytes(parts.states)}" if parts.states else ""
    host = "swap space" if config.cache.kv_offloading_size is None else "prefix cache and swap space on the host"
    states += f", encoders' states {format_bytes(parts.sources)}" if parts.sources else ""
    return (
        f"memory      weights {format_bytes(parts.weights)}, activations up to {format_bytes(parts.activations)}, "
        f"KV cache {format_bytes(parts.kv_cache)}{states}: "
        f"{format_bytes(parts.total)} of {format_bytes(available)} available; "
        f"{host} up to {format_bytes(parts.swap_space)}{of}"
    )


Dtype = Literal["bfloat16", "float16", "float32"]
_NAMES: dict[ModelDtype, Dtype | None] = {
    "auto": None,
    "bfloat16": "bfloat16",
    "float": "float32",
    "float16": "float16",
    "float32": "float32",
    "half": "float16",
}


def _check_kv_cache_dtype(config: Config, spec: ModelSpec) -> None:
    if isinstance(spec.attention, LatentSpec) and is_quantized(config.cache.kv_cache_dtype):
        raise ConfigError(
            f"--kv-cache-dtype {config.cache.kv_cache_dtype} is not served with {spec.architecture}, whose cache has "
            "latents in place of keys and values: leave it out.",
            param="kv_cache_dtype",
        )


def resolve_dtype(asked: ModelDtype, spec: ModelSpec, machine: Machine, *, on_gpu: bool) -> tuple[Dtype, str]:
    """The dtype and the reason for it. Raises ConfigError if the model overflows in it."""
    wanted = _NAMES[asked]
    if wanted == "float16":
        return _asked_float16(asked, spec, machine, on_gpu=on_gpu)
    if wanted is not None:
        return wanted, "as asked"
    if spec.dtype == "float32" and spec.generates:
        return "float32", "the checkpoint's"
    if not on_gpu:
        return _on_a_cpu("the checkpoint's" if spec.dtype == "bfloat16" else f"for {spec.dtype} weights", machine)
    if spec.dtype != "bfloat16" and spec.family.overflows_float16:
        return "bfloat16", f"for {spec.dtype} weights of {spec.architecture}, whose activations overflow in float16"
    if spec.dtype == "float32":
        return "float16", "for float32 weights of a model that makes no tokens"
    return ("float16" if spec.dtype == "float16" else "bfloat16"), "the checkpoint's"


def _asked_float16(asked: str, spec: ModelSpec, machine: Machine, *, on_gpu: bool) -> tuple[Dtype, str]:
    if not on_gpu:
        return _on_a_cpu(f"in place of {asked}, which is slow", machine)
    if spec.family.overflows_float16:
        raise ConfigError(
            f"--dtype {asked}: activations of {spec.architecture} overflow in float16. Leave it out, or give "
            "--dtype bfloat16.",
            param="dtype",
        )
    return "float16", "as asked"


def _on_a_cpu(reason: str, machine: Machine) -> tuple[Dtype, str]:
    """A dtype of 16 bits, where that is no slower."""
    if machine.fast_bfloat16:
        return "bfloat16", reason if reason == "the checkpoint's" else f"{reason} on a CPU"
    return "float32", "this processor has no bfloat16 products, and there are no kernels of our own"
