"""What a model that transformers' modules compute asks of the settings, and what it cannot do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from quire.errors import ConfigError
from quire.foundation.config import Config
from quire.foundation.config.cache import is_quantized
from quire.models.spec import DTYPE_BYTES, ModelSpec, spec_of


def check_fallback(config: Config, spec: ModelSpec) -> None:
    """Refuse settings that the model cannot have.

    Raises:
        ConfigError: The message names the setting, and what to do instead.
    """
    if spec.fallback is None:
        return
    parallel, of_engines = config.parallel, "--data-parallel-size runs several engines"
    one_rank = f"its layers are not divided. Leave it out; {of_engines}"
    refused = {
        "tensor_parallel_size": (parallel.tensor_parallel_size > 1, one_rank),
        "pipeline_parallel_size": (parallel.pipeline_parallel_size > 1, one_rank),
        "enable_expert_parallel": (parallel.enable_expert_parallel, "its experts are not divided. Leave it out"),
        "enable_lora": (config.lora.enable_lora, "adapters change Quire's own layers. Merge them into the weights"),
        "speculative_config": (config.speculation.speculation is not None, "nothing is drafted for it. Leave it out"),
        "kv_cache_dtype": (
            is_quantized(config.cache.kv_cache_dtype),
            "its keys and values have its own type. Leave it out",
        ),
    }
    if spec.fallback.tier != "paged":
        swaps = config.scheduler.preemption_mode == "swap"
        refused["preemption_mode"] = (swaps, "its own cache cannot be moved. Give recompute, or leave it out")
    for param, (is_asked, advice) in refused.items():
        if is_asked:
            flag = f"--{param.replace('_', '-')}"
            raise ConfigError(
                f"{flag} is not served where transformers' modules compute a model ({spec.architecture}): {advice}.",
                param=param,
            )


def for_device(config: Config, spec: ModelSpec, directory: Path) -> tuple[Config, ModelSpec]:
    """Return the settings and the spec of what computes the model on its device: if nothing else is asked for,
    transformers' modules where Quire's own layers run on a CPU alone.

    Raises:
        ConfigError: transformers is not installed.
        CheckpointError: transformers cannot serve the model either.
    """
    if config.device.device == "cpu" or not spec.on_cpus_alone or config.model.model_impl != "auto":
        return config, spec
    model = replace(config.model, model_impl="transformers")
    return replace(config, model=model), spec_of(model, directory)


def for_fallback(config: Config, spec: ModelSpec) -> Config:
    """Return the settings as such a model needs them: nothing is recorded or captured, as its modules are no kernels of
    Quire's; and where it keeps its own cache, nothing of it is shared, moved or kept."""
    if spec.fallback is None:
        return config
    device = replace(config.device, enforce_eager=True, max_cudagraph_capture_size=0)
    if spec.fallback.tier == "paged":
        return replace(config, device=device)
    cache = replace(config.cache, enable_prefix_caching=False, swap_space=0.0)
    return replace(config, device=device, cache=cache, scheduler=replace(config.scheduler, preemption_mode="recompute"))


def sequence_bytes(config: Config, spec: ModelSpec) -> int:
    """Bytes that all sequences keep whatever their lengths, in caches of the model's own."""
    if spec.fallback is None or not config.scheduler.max_num_seqs:
        return 0
    return config.scheduler.max_num_seqs * spec.fallback.sequence_elements * DTYPE_BYTES[config.model.dtype]


def fallback_lines(config: Config, spec: ModelSpec, asked: str) -> list[str]:
    """A line that says what computes the model, and why; `asked` is what the user gave as --model-impl."""
    found = spec.fallback
    if found is None:
        return [] if asked == "auto" else ["model impl  Quire's own layers: as asked"]
    why = "Quire has no layers of its own for it"
    if config.model.model_impl == "transformers":
        why = "as asked" if asked == "transformers" else "some of Quire's own layers for it run on a CPU alone so far"
    how = {
        "paged": "with Quire's paged attention",
        "own": "each sequence by itself, with a cache of its own (slow)",
        "whole": "texts of similar lengths in one batch",
    }[found.tier]
    return [f"model impl  transformers {found.version}: {why}; {how}, since {found.reason}"]
