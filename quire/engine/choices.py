"""Zero configuration: what the user left open is chosen from the model and the machine, each with its reason.

Returns a new Config; changes nothing in place. Imports no torch, so the supervisor can choose before any child starts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from quire.config import Config
from quire.errors import ConfigError, MemoryBudgetError
from quire.models.spec import ModelSpec, read_spec
from quire.weights import hub

Dtype = Literal["bfloat16", "float32"]

GIB = 2**30
DEFAULT_SEQS = 256
DEFAULT_TOKENS_CPU = 512
KV_CEILING = 4 * GIB
KV_SHARE = 0.4
"""Of the memory that is left beside the weights."""


@dataclass(frozen=True)
class Machine:
    """What the choices look at: bytes of memory that can be used, and whether bfloat16 products are native."""

    memory_bytes: int
    native_bfloat16: bool


@dataclass(frozen=True)
class Choices:
    """Resolved settings, the model's spec, and a line of reasons for each automatic choice."""

    config: Config
    spec: ModelSpec
    reasons: tuple[str, ...]


def this_machine() -> Machine:
    """Memory that is available (also under a cgroup's limit) and the processor's flags, from /proc and /sys."""
    available = _meminfo("MemAvailable") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _read("/sys/fs/cgroup/memory.max")
    if limit.isdigit():
        used = _read("/sys/fs/cgroup/memory.current")
        available = min(available, int(limit) - int(used or 0))
    flags = next((line for line in _read("/proc/cpuinfo").splitlines() if line.startswith(("flags", "Features"))), "")
    return Machine(available, any(flag in flags.split() for flag in ("avx512_bf16", "amx_bf16", "bf16")))


def choose(config: Config, machine: Machine | None = None) -> Choices:
    """Resolve every open setting.

    Raises:
        ModelNotFoundError, CheckpointError: From reading the model's config.
        ConfigError, MemoryBudgetError: Settings that contradict the model or the machine; the message names the flag.
    """
    machine = machine or this_machine()
    model = config.model
    name = model.model
    directory = hub.resolve(model.model, model.revision, model.hf_token, config.load.download_dir)
    tokenizer = directory
    if model.tokenizer is not None:
        tokenizer = hub.resolve(model.tokenizer, None, model.hf_token, config.load.download_dir)
    spec = read_spec(directory)
    dtype, dtype_reason = _dtype(config, spec, machine)
    length, length_reason = _max_model_len(config, spec)
    asked = config.scheduler
    seqs = DEFAULT_SEQS if asked.max_num_seqs is None else asked.max_num_seqs
    tokens = DEFAULT_TOKENS_CPU if asked.max_num_batched_tokens is None else asked.max_num_batched_tokens
    for flag, value in (("max_num_seqs", seqs), ("max_num_batched_tokens", tokens)):
        if value < 1:
            raise ConfigError(f"--{flag.replace('_', '-')} must be at least 1, got {value}.", param=flag)
    model = replace(
        model,
        model=str(directory),
        tokenizer=str(tokenizer),
        dtype=dtype,
        max_model_len=length,
        served_model_name=model.served_model_name or (name,),
    )
    scheduler = replace(asked, max_num_seqs=seqs, max_num_batched_tokens=tokens)
    config = replace(config, model=model, scheduler=scheduler)
    config, cache_reason = _cache(config, spec, machine)
    reasons = (
        f"model       {name} ({spec.architecture}, {spec.num_parameters / 1e6:,.1f}M parameters) from {directory}",
        f"dtype       {dtype}: {dtype_reason}",
        f"context     {length:,} tokens: {length_reason}",
        f"batch       up to {seqs} sequences and {tokens} tokens a step: "
        + ("as asked" if asked.max_num_seqs and asked.max_num_batched_tokens else "default"),
        cache_reason,
    )
    return Choices(config, spec, reasons)


def _dtype(config: Config, spec: ModelSpec, machine: Machine) -> tuple[Dtype, str]:
    asked = config.model.dtype
    if asked == "bfloat16":
        return "bfloat16", "as asked"
    if asked in ("float", "float32"):
        return "float32", "as asked"
    if spec.dtype == "float32":
        return "float32", "the checkpoint's"
    if machine.native_bfloat16:
        return "bfloat16", "the checkpoint's" if spec.dtype == "bfloat16" else f"for {spec.dtype} weights on a CPU"
    return "float32", "this processor has no bfloat16 products"


def _max_model_len(config: Config, spec: ModelSpec) -> tuple[int, str]:
    asked = config.model.max_model_len
    if asked is None:
        return spec.max_model_len, "the model's limit"
    if not 1 < asked <= spec.max_model_len:
        raise ConfigError(
            f"--max-model-len {asked} is outside 2..{spec.max_model_len}, which is what the model was made for.",
            param="max_model_len",
        )
    return asked, "as asked"


def _cache(config: Config, spec: ModelSpec, machine: Machine) -> tuple[Config, str]:
    """The number of KV blocks, from what was asked, what all sequences could use, and the memory there is."""
    cache, length, seqs = config.cache, config.model.max_model_len or 0, config.scheduler.max_num_seqs or 0
    block_bytes = cache.block_size * spec.kv_bytes_per_token(config.model.dtype)
    per_sequence = -(-length // cache.block_size)
    if cache.num_gpu_blocks_override is not None:
        blocks, reason = cache.num_gpu_blocks_override, "as asked"
        if blocks < 1:
            raise ConfigError("--num-gpu-blocks-override must be at least 1.", param="num_gpu_blocks_override")
    elif cache.kv_cache_memory_bytes is not None:
        blocks, reason = cache.kv_cache_memory_bytes // block_bytes, "as asked"
        if blocks < 1:
            raise MemoryBudgetError(
                f"--kv-cache-memory-bytes {cache.kv_cache_memory_bytes} holds no block of {block_bytes} bytes: raise it"
            )
    else:
        left = machine.memory_bytes - spec.weight_bytes(config.model.dtype)
        budget = int(min(KV_CEILING, left * KV_SHARE))
        wanted = per_sequence * seqs
        blocks = min(wanted, max(0, budget) // block_bytes)
        share = f"{KV_SHARE:.0%} of the memory left, at most {KV_CEILING // GIB} GiB"
        reason = "all sequences at full length" if blocks == wanted else share
        if blocks < per_sequence:
            raise MemoryBudgetError(
                f"One sequence of {length:,} tokens needs {per_sequence * block_bytes / GIB:.2f} GiB of KV cache; "
                f"{max(0, left) / GIB:.2f} GiB are left beside the weights: lower --max-model-len or free memory."
            )
    text = (
        f"kv cache    {blocks:,} blocks of {cache.block_size} = {blocks * cache.block_size:,} tokens, "
        f"{blocks * block_bytes / GIB:.2f} GiB: {reason}"
    )
    return replace(config, cache=replace(cache, num_gpu_blocks_override=blocks)), text


def _meminfo(key: str) -> int:
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
