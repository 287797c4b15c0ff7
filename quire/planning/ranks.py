"""A model that ranks divide: which settings are refused, how memory is planned for all ranks, what the report says."""

from __future__ import annotations

from dataclasses import replace

from quire.config import Config
from quire.config.kv_cache_dtype import QUANTIZED
from quire.config.parallel import ParallelConfig
from quire.errors import ConfigError
from quire.mesh import Mesh, mesh_of
from quire.models.rank_share import check_pipeline_parallel_size, check_tensor_parallel_size, rank_share
from quire.models.spec import ModelSpec
from quire.planning.kv_cache_plan import KVCachePlan, plan_kv_cache
from quire.planning.machine import Machine


def check_ranks(config: Config, spec: ModelSpec) -> Mesh:
    """The ranks that the settings ask for.

    Raises:
        ConfigError: The model cannot be divided so, or not yet; the message names the flag.
    """
    parallel = config.parallel
    if parallel.enable_expert_parallel:
        _check_expert_parallel(spec, parallel)
    check_tensor_parallel_size(spec, parallel.tensor_parallel_size, whole_experts=parallel.enable_expert_parallel)
    check_pipeline_parallel_size(spec, parallel.pipeline_parallel_size)
    if parallel.pipeline_parallel_size > 1 and config.cache.kv_cache_dtype in QUANTIZED:
        raise ConfigError(
            f"--kv-cache-dtype {config.cache.kv_cache_dtype} is not served with --pipeline-parallel-size yet: its "
            "scales are measured on a whole model. Leave one of them out.",
            param="kv_cache_dtype",
        )
    return mesh_of(parallel)


def _check_expert_parallel(spec: ModelSpec, parallel: ParallelConfig) -> None:
    if spec.experts is None:
        raise ConfigError(
            f"--enable-expert-parallel: {spec.architecture} has no experts. Leave it out.",
            param="enable_expert_parallel",
        )
    if parallel.data_parallel_size > 1:
        raise ConfigError(
            f"--enable-expert-parallel is not served with --data-parallel-size {parallel.data_parallel_size}, whose "
            "engines would have to share their experts. Leave one of them out: with --tensor-parallel-size the ranks "
            "of one engine share them.",
            param="enable_expert_parallel",
        )


def plan_for_all(config: Config, spec: ModelSpec, machine: Machine, mesh: Mesh) -> KVCachePlan:
    """A plan that every rank has room for; `machine` has the memory of one.

    Raises:
        ConfigError, MemoryBudgetError: See plan_kv_cache.
    """
    stages = [replace(mesh, rank=stage * mesh.tp) for stage in range(mesh.pp)]
    plans = [plan_kv_cache(config, rank_share(spec, stage), machine) for stage in stages]
    return min(plans, key=lambda plan: (plan.max_model_len, plan.num_blocks))


def rank_lines(mesh: Mesh, spec: ModelSpec, sharing: int, *, on_gpu: bool = False) -> list[str]:
    """That several ranks divide the model, and so many of them a machine's memory."""
    if mesh.size == 1 and mesh.ep == 1:
        return []
    of_layers = f"1/{mesh.tp} of every layer"
    if mesh.pp > 1:
        counts = [len(Mesh(stage, pp=mesh.pp).own_layers(spec.layers)) for stage in range(mesh.pp)]
        own = f"{' + '.join(map(str, counts))} layers, one stage behind the other"
        of_layers = own if mesh.tp == 1 else f"{of_layers}; {own}"
    if mesh.ep > 1 and spec.experts is not None:
        ranks = [replace(mesh, rank=number % mesh.tp, engine=number // mesh.tp) for number in range(mesh.ep)]
        counts = " + ".join(str(rank.own_experts(spec.experts.count).count) for rank in ranks)
        of_layers += f", but {counts} whole experts{' over all engines' if mesh.engines > 1 else ''}"
    memory = f"1/{sharing} of the memory" if sharing > 1 else "a machine's memory"
    memory = "a GPU" if on_gpu else memory
    return [f"ranks       {mesh.size} processes, each with {of_layers}, and {memory}; sizes are of one"]
