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
from quire.foundation.config.model import LoadFormat, ModelDtype
from quire.models.quantization.formats import CodebookFormat, Fp8Format, GgufFormat
from quire.models.quantization.held_bytes import HeldWeights
from quire.models.spec import ModelSpec, on_a_gpu, read_spec
from quire.models.weights import hub
from quire.models.weights.config_overrides import overridden
from quire.models.weights.hub import GgufChoice
from quire.planning import ranks
from quire.planning.draft_model import with_draft_model
from quire.planning.fallback import check_fallback, fallback_lines, for_fallback
from quire.planning.footprint import GIB, format_bytes
from quire.planning.kv_cache_plan import KVCachePlan
from quire.planning.machine import Gpu, Machine, this_machine
from quire.planning.memory_budget import KVDemand
from quire.planning.step_limits import check_length, length_reason

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
    spec = read_spec(directory, model.quantization, model.model_impl)
    if spec.head is not None:
        raise ConfigError(
            f'{name} is a head of EAGLE-3, no model: give it in --speculative-config with "method": "eagle3", and the '
            "model that it is for as --model.",
            param="model",
        )
    _check_load_format(config.load.load_format, name, spec, directory)
    check_fallback(config, spec)
    config = for_fallback(config, spec)
    device, device_line = _resolve_device(config, machine)
    if device.device == "cuda":
        spec = on_a_gpu(spec)
    gpu = machine.gpu if device.device == "cuda" else None
    ranks.check_nodes(config, device.device)
    ranks.check_backend(config.parallel, is_server=replicas)
    mesh = ranks.check_ranks(config, spec, on_gpu=gpu is not None)
    engines = config.parallel.data_parallel_size
    ranks.check_engines(engines, mesh, gpu, replicas=replicas)
    config.lora.check(model.names)
    if config.lora.lora_dir and not Path(config.lora.lora_dir).is_dir():  # no request could ever find an adapter in it
        raise ConfigError(f"--lora-dir {config.lora.lora_dir} is no directory.", param="lora_dir")
    config.speculation.check_device(device.device, mesh.tp, mesh.pp)
    config = with_draft_model(config, spec, directory)
    dtype, dtype_reason = resolve_dtype(model.dtype, spec, machine, on_gpu=gpu is not None)
    check_length(config, spec)
    _check_not_negative(
        swap_space=config.cache.swap_space, long_prefill_token_threshold=config.scheduler.long_prefill_token_threshold
    )
    scheduler, batch_line = batch_limits(config.scheduler, gpu, mesh.pp)
    model = replace(
        model,
        model=str(directory),
        tokenizer=str(tokenizer),
        dtype=dtype,
        served_model_name=model.names,
    )
    config = replace(config, model=model, scheduler=scheduler, device=_resolve_cudagraph_size(device))
    own_memory = machine.memory_bytes // (config.parallel.ranks_of_a_node * engines)
    plan = ranks.plan_for_all(config, spec, replace(machine, memory_bytes=own_memory), mesh)
    reasons = (
        f"model       {name} ({spec.architecture}, {spec.num_parameters / 1e6:,.1f}M parameters) from {directory}",
        *fallback_lines(config, spec),
        device_line,
        f"dtype       {dtype}: {dtype_reason}",
        *_head_lines(spec),
        *_quantization_lines(spec),
        f"context     {plan.max_model_len:,} tokens: {length_reason(config, spec)}",
        batch_line,
        *ranks.rank_lines(mesh, spec, config.parallel.ranks_of_a_node, on_gpu=gpu is not None),
        *ranks.node_lines(config.parallel),
        *ranks.engine_lines(engines, mesh.size, gpu),
        _cache_line(config, plan, spec),
        _memory_line(config, plan, gpu.free_bytes if gpu else own_memory),
    )
    return ResolvedConfig(_with_plan(config, plan), spec, plan, reasons)


def batch_limits(asked: SchedulerConfig, gpu: Gpu | None, stages: int = 1) -> tuple[SchedulerConfig, str]:
    """Return the limits of a step, of which open ones are chosen, and their line of the report. Steps run on a CPU
    without `gpu`; in a pipeline each step has 1/stages of the sequences, so more of them are worth while on GPUs.
    Raises ConfigError if a limit that was asked for is less than 1."""
    default_tokens = DEFAULT_MAX_NUM_BATCHED_TOKENS_CPU if gpu is None else DEFAULT_MAX_NUM_BATCHED_TOKENS_GPU
    is_large = gpu is not None and gpu.memory_bytes >= LARGE_GPU_BYTES
    default_seqs = DEFAULT_MAX_NUM_SEQS_LARGE_GPU if is_large else DEFAULT_MAX_NUM_SEQS
    default_seqs *= 1 if gpu is None else stages
    seqs = default_seqs if asked.max_num_seqs is None else asked.max_num_seqs
    tokens = default_tokens if asked.max_num_batched_tokens is None else asked.max_num_batched_tokens
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
    cache = replace(config.cache, swap_space=plan.num_host_blocks * block_bytes / GIB)
    if config.device.device == "cpu":  # a GPU's worker measures first
        cache = replace(cache, num_gpu_blocks_override=plan.num_blocks)
    return replace(config, cache=cache, model=replace(config.model, max_model_len=plan.max_model_len))


def _cache_line(config: Config, plan: KVCachePlan, spec: ModelSpec) -> str:
    """The line about the KV cache: how many tokens of sequences of full length it holds; windows keep fewer."""
    tokens = KVDemand.of(config, spec).cached_tokens(plan.num_blocks, plan.max_model_len)
    about = "about " if plan.is_estimate else ""
    kind = "" if config.kv_dtype == config.model.dtype else f" of {config.kv_dtype}"
    blocks = f"{about}{plan.num_blocks:,} blocks of {config.cache.block_size}"
    return f"kv cache    {blocks} = {tokens:,} tokens{kind}: {plan.reason}"


def _memory_line(config: Config, plan: KVCachePlan, available: int) -> str:
    parts, asked = plan.footprint, config.cache.swap_space
    of = f" of {asked:g} GiB asked" if parts.swap_space < int(asked * GIB) else ""
    return (
        f"memory      weights {format_bytes(parts.weights)}, activations up to {format_bytes(parts.activations)}, "
        f"KV cache {format_bytes(parts.kv_cache)}: {format_bytes(parts.total)} of {format_bytes(available)} available; "
        f"swap space up to {format_bytes(parts.swap_space)}{of}"
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


def resolve_dtype(asked: ModelDtype, spec: ModelSpec, machine: Machine, *, on_gpu: bool) -> tuple[Dtype, str]:
    """The dtype and the reason for it. Raises ConfigError if the model overflows in it."""
    wanted = _NAMES[asked]
    if wanted == "float16":
        return _asked_float16(asked, spec, machine, on_gpu=on_gpu)
    if wanted is not None:
        return wanted, "as asked"
    if spec.dtype == "float32":
        return "float32", "the checkpoint's"
    if not on_gpu:
        return _on_a_cpu("the checkpoint's" if spec.dtype == "bfloat16" else f"for {spec.dtype} weights", machine)
    if spec.dtype == "float16" and spec.family.overflows_float16:
        return "bfloat16", f"for float16 weights of {spec.architecture}, whose activations overflow in float16"
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
