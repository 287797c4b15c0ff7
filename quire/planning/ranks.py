"""A model that ranks divide: which settings are refused, how memory is planned for all ranks, what the report says."""

from __future__ import annotations

from dataclasses import replace

from quire.compute.mesh import Mesh, mesh_of
from quire.errors import ConfigError
from quire.foundation.config import Config
from quire.foundation.config.kv_cache_dtype import is_quantized
from quire.models.rank_share import check_pipeline_parallel_size, check_tensor_parallel_size, rank_share
from quire.models.spec import ModelSpec
from quire.planning.kv_cache_plan import KVCachePlan, plan_kv_cache
from quire.planning.machine import Machine


def check_ranks(config: Config, spec: ModelSpec, *, on_gpu: bool = False) -> Mesh:
    """The ranks that the settings ask for.

    Raises:
        ConfigError: The model cannot be divided so, or not yet; the message names the flag.
    """
    parallel = config.parallel
    if parallel.enable_expert_parallel:
        _check_expert_parallel(spec)
    if parallel.engines_share_experts:
        _check_engines_with_experts(config, spec, on_gpu=on_gpu)
    check_tensor_parallel_size(spec, parallel.tensor_parallel_size, whole_experts=parallel.enable_expert_parallel)
    check_pipeline_parallel_size(spec, parallel.pipeline_parallel_size)
    if parallel.pipeline_parallel_size > 1 and is_quantized(config.cache.kv_cache_dtype):
        raise ConfigError(
            f"--kv-cache-dtype {config.cache.kv_cache_dtype} is not served with --pipeline-parallel-size yet: its "
            "scales are measured on a whole model. Leave one of them out.",
            param="kv_cache_dtype",
        )
    return mesh_of(parallel)


def _check_expert_parallel(spec: ModelSpec) -> None:
    if spec.experts is None:
        raise ConfigError(
            f"--enable-expert-parallel: {spec.architecture} has no experts. Leave it out.",
            param="enable_expert_parallel",
        )


def _check_engines_with_experts(config: Config, spec: ModelSpec, *, on_gpu: bool) -> None:
    """Refuse what engines that divide experts do not serve yet."""
    parallel = config.parallel
    engines, ranks = parallel.data_parallel_size, parallel.data_parallel_size * parallel.tensor_parallel_size
    both = f"--enable-expert-parallel with --data-parallel-size {engines}"
    count = 0 if spec.experts is None else spec.experts.count
    if ranks > count:
        raise ConfigError(
            f"{both}: {ranks} ranks in all would divide {count} experts, and each has one at least. Lower "
            "--data-parallel-size or --tensor-parallel-size.",
            param="data_parallel_size",
        )
    refused = {
        "pipeline_parallel_size": parallel.pipeline_parallel_size > 1,
        "kv_cache_dtype": is_quantized(config.cache.kv_cache_dtype),
        "enable_lora": config.lora.enable_lora,
        "speculative_config": config.speculation.speculation is not None,
    }
    if on_gpu:
        raise ConfigError(
            f"{both} is not served on GPUs yet. Leave one of them out, or give --device cpu.",
            param="enable_expert_parallel",
        )
    for param in (name for name, is_asked in refused.items() if is_asked):
        flag = f"--{param.replace('_', '-')}"
        raise ConfigError(f"{both} is not served with {flag} yet. Leave out one of the three.", param=param)


def plan_for_all(config: Config, spec: ModelSpec, machine: Machine, mesh: Mesh) -> KVCachePlan:
    """Return a KV cache plan that every rank has room for; `machine` has the memory of one rank.

    Raises:
        ConfigError, MemoryBudgetError: See plan_kv_cache.
    """
    stages = [replace(mesh, rank=stage * mesh.tp) for stage in range(mesh.pp)]
    plans = [plan_kv_cache(config, rank_share(spec, stage), machine) for stage in stages]
    return min(plans, key=lambda plan: (plan.max_model_len, plan.num_blocks))


def rank_lines(mesh: Mesh, spec: ModelSpec, sharing: int, *, on_gpu: bool = False) -> list[str]:
    """Return the report's line about ranks that divide the model; no line if there is one rank.

    Args:
        mesh: The ranks.
        spec: The model.
        sharing: How many ranks share a machine's memory.
        on_gpu: Whether each rank has a GPU.
    """
    if mesh.size == 1 and mesh.ep == 1:
        return []
    of_layers = f"1/{mesh.tp} of every layer" if mesh.tp > 1 else "every layer"
    if mesh.pp > 1:
        counts = [len(Mesh(stage, pp=mesh.pp).own_layers(spec.layers)) for stage in range(mesh.pp)]
        own = f"{' + '.join(map(str, counts))} layers, one stage behind the other"
        of_layers = own if mesh.tp == 1 else f"{of_layers}; {own}"
    if mesh.ep > 1 and spec.experts is not None:
        ranks = [replace(mesh, rank=number % mesh.tp, engine=number // mesh.tp) for number in range(mesh.ep)]
        owned = " + ".join(str(rank.own_experts(spec.experts.count).count) for rank in ranks)
        of_layers += f", but {owned} whole experts{' over all engines' if mesh.engines > 1 else ''}"
    memory = f"1/{sharing} of the memory" if sharing > 1 else "a machine's memory"
    memory = "a GPU" if on_gpu else memory
    processes = "1 process" if mesh.size == 1 else f"{mesh.size} processes, each"
    shared = f", and {memory}" if mesh.size > 1 else ""
    return [f"ranks       {processes} with {of_layers}{shared}; sizes are of one"]
