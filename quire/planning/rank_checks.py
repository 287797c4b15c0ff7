"""A model that ranks divide, on one machine or several: what is refused, how memory is planned, what is reported."""

from __future__ import annotations

from dataclasses import replace

from quire.compute.mesh import Mesh, mesh_of
from quire.errors import ConfigError
from quire.foundation.config import Config
from quire.foundation.config.cache import is_quantized
from quire.foundation.config.parallel import ParallelConfig
from quire.models.rank_spec import check_pipeline_parallel_size, check_tensor_parallel_size, rank_share
from quire.models.spec import ModelSpec
from quire.planning.kv_cache_plan import KVCachePlan, plan_kv_cache
from quire.planning.machine import Gpu, Machine
from quire.planning.state_memory import smallest_number_of_states

MAX_ENGINES = 64
"""Maximum number of engines of one server."""
_LARGEST_PORT = 65_535


def check_ranks(config: Config, spec: ModelSpec, *, on_gpu: bool) -> Mesh:
    """The ranks that the settings ask for. Raises ConfigError if the model cannot be divided so."""
    parallel, kv_dtype = config.parallel, config.cache.kv_cache_dtype
    if parallel.enable_expert_parallel and spec.mixture is None:
        text = f"--enable-expert-parallel: {spec.architecture} has no experts. Leave it out."
        raise ConfigError(text, param="enable_expert_parallel")
    if parallel.engines_share_experts:
        _check_engines_with_experts(config, spec, on_gpu=on_gpu)
    check_tensor_parallel_size(spec, parallel.tensor_parallel_size, whole_experts=parallel.enable_expert_parallel)
    check_pipeline_parallel_size(spec, parallel.pipeline_parallel_size)
    if parallel.pipeline_parallel_size > 1 and is_quantized(kv_dtype):
        raise ConfigError(
            f"--kv-cache-dtype {kv_dtype} is not served with --pipeline-parallel-size yet: its scales are measured on "
            "a whole model. Leave one of them out.",
            param="kv_cache_dtype",
        )
    return mesh_of(parallel)


def _check_engines_with_experts(config: Config, spec: ModelSpec, *, on_gpu: bool) -> None:
    """Refuse what engines that divide experts do not serve yet."""
    parallel = config.parallel
    engines, ranks = parallel.data_parallel_size, parallel.data_parallel_size * parallel.tensor_parallel_size
    both = f"--enable-expert-parallel with --data-parallel-size {engines}"
    count = 0 if spec.mixture is None else spec.mixture.count
    if ranks > count:
        raise ConfigError(
            f"{both}: {ranks} ranks in all would divide {count} experts, and each has one at least. Lower "
            "--data-parallel-size or --tensor-parallel-size.",
            param="data_parallel_size",
        )
    if on_gpu:
        text = f"{both} is not served on GPUs yet. Leave one of them out, or give --device cpu."
        raise ConfigError(text, param="enable_expert_parallel")
    refused = {
        "pipeline_parallel_size": parallel.pipeline_parallel_size > 1,
        "kv_cache_dtype": is_quantized(config.cache.kv_cache_dtype),
        "enable_lora": config.lora.enable_lora,
        "speculative_config": config.speculation.speculation is not None,
    }
    for param in (name for name, is_asked in refused.items() if is_asked):
        text = f"{both} is not served with {_flag(param)} yet. Leave out one of the three."
        raise ConfigError(text, param=param)


def plan_for_all(config: Config, spec: ModelSpec, machine: Machine, mesh: Mesh) -> KVCachePlan:
    """The KV cache plan of `plan_kv_cache` that every rank has room for; `machine` has the memory of one rank."""
    stages = [replace(mesh, rank=stage * mesh.tp) for stage in range(mesh.pp)]
    plans = [plan_kv_cache(config, rank_share(spec, stage), machine) for stage in stages]
    plan = min(plans, key=lambda plan: (plan.max_model_len, plan.num_blocks))
    return replace(plan, num_states=smallest_number_of_states(each.num_states for each in plans))


def rank_lines(mesh: Mesh, spec: ModelSpec, sharing: int, *, on_gpu: bool = False) -> list[str]:
    """The report's line about ranks that divide the model, `sharing` of which share memory; no line for one rank."""
    if mesh.size == 1 and mesh.ep == 1:
        return []
    of_layers = f"1/{mesh.tp} of every layer" if mesh.tp > 1 else "every layer"
    if mesh.pp > 1:
        counts = [len(Mesh(stage, pp=mesh.pp).own_layers(len(spec.layers))) for stage in range(mesh.pp)]
        own = f"{' + '.join(map(str, counts))} layers, one stage behind the other"
        of_layers = own if mesh.tp == 1 else f"{of_layers}; {own}"
    if mesh.ep > 1 and spec.mixture is not None:
        ranks = [replace(mesh, rank=number % mesh.tp, engine=number // mesh.tp) for number in range(mesh.ep)]
        owned = " + ".join(str(rank.own_experts(spec.mixture.count).count) for rank in ranks)
        of_layers += f", but {owned} whole experts{' over all engines' if mesh.engines > 1 else ''}"
    memory = f"1/{sharing} of the memory" if sharing > 1 else "a machine's memory"
    memory = "a GPU" if on_gpu else memory
    processes = "1 process" if mesh.size == 1 else f"{mesh.size} processes, each"
    shared = f", and {memory}" if mesh.size > 1 else ""
    return [f"ranks       {processes} with {of_layers}{shared}; sizes are of one"]


def check_nodes(config: Config, device: str = "cpu") -> None:
    """Raise a ConfigError for impossible settings of nodes."""
    parallel, headless = config.parallel, config.server.headless
    nodes, node, by_ray = parallel.nodes, parallel.node_rank, parallel.distributed_executor_backend == "ray"
    if by_ray and (node or headless):
        param, text = "node_rank" if node else "headless", (
            " with --distributed-executor-backend ray: Ray starts the other nodes. Start quire serve once, on the "
            "machine that is to serve."
        )  # fmt: skip
        raise ConfigError(_flag(param) + text, param=param)
    if nodes < 1:
        raise ConfigError(f"--nnodes {nodes}: must be at least 1.", param="nnodes")
    if not 0 <= node < nodes:
        text = f"--node-rank {node}: with --nnodes {nodes} it is 0 to {nodes - 1}, another one on each machine."
        raise ConfigError(text, param="node_rank")
    if node and not headless:
        text = "only the node with rank 0 serves. Start the others by quire serve with --headless."
        raise ConfigError(f"--node-rank {node}: {text}", param="node_rank")
    if headless and not node:
        raise ConfigError(
            "--headless: only a node whose --node-rank is 1 or more can do without a server. Give --nnodes and "
            "--node-rank, or leave it out.",
            param="headless",
        )
    if nodes > 1 and device == "cuda":
        param, asked = "nnodes", f"--nnodes {nodes}"
        if by_ray:
            param, asked = "distributed_executor_backend", "--distributed-executor-backend ray"
        text = f"{asked}: GPUs of several machines are not served yet. Leave it out, or give --device cpu."
        raise ConfigError(text, param=param)
    if nodes > 1:
        _check_several(parallel)


def check_backend(parallel: ParallelConfig, *, is_server: bool) -> None:
    """Raise a ConfigError where nothing can start nodes by Ray."""
    if parallel.distributed_executor_backend == "ray" and not is_server:
        text = "--distributed-executor-backend ray: only quire serve starts nodes by Ray. Leave it out."
        raise ConfigError(text, param="distributed_executor_backend")


def _check_several(parallel: ParallelConfig) -> None:
    nodes = parallel.nodes
    if not 1 <= parallel.master_port <= _LARGEST_PORT:
        raise ConfigError(f"--master-port {parallel.master_port}: must be 1 to {_LARGEST_PORT}.", param="master_port")
    if parallel.pipeline_parallel_size % nodes:
        raise ConfigError(
            f"--nnodes {nodes} with --pipeline-parallel-size {parallel.pipeline_parallel_size}: each machine has some "
            f"stages of the pipeline, and all the same number. Make it a multiple of {nodes}; --tensor-parallel-size "
            "divides layers within a machine only.",
            param="nnodes",
        )
    if parallel.data_parallel_size > 1:
        raise ConfigError(
            f"--nnodes {nodes} with --data-parallel-size {parallel.data_parallel_size} is not served: one engine "
            "starts over several machines. Leave one of them out, and let quire route spread requests over servers.",
            param="data_parallel_size",
        )


def node_lines(parallel: ParallelConfig) -> list[str]:
    """Return the report's line about ranks on several machines; no line if all are on one."""
    if parallel.nodes == 1:
        return []
    each = parallel.ranks_of_a_node
    ranks = f"{each} rank{'s' * (each > 1)}"
    return [
        f"nodes       {parallel.nodes}, each with {ranks}; this is node {parallel.node_rank}, and they meet at "
        f"{parallel.master_addr}:{parallel.master_port}"
    ]


def check_engines(engines: int, mesh: Mesh, gpu: Gpu | None, *, replicas: bool) -> None:
    """Refuse more engines than there can be, or more ranks of each than there are GPUs."""
    ranks, asked = mesh.size, f"--data-parallel-size {engines}"
    flags = [("tensor_parallel_size", mesh.tp), ("pipeline_parallel_size", mesh.pp)]
    given = [(flag, size) for flag, size in flags if size > 1]
    sizes = " and ".join(f"{_flag(flag)} {size}" for flag, size in given)
    problem, param = "", "data_parallel_size"
    if engines < 1:
        problem = "must be at least 1."
    elif engines > MAX_ENGINES:
        problem = f"one server has at most {MAX_ENGINES} engines."
    elif engines > 1 and not replicas:
        problem = (
            "only quire serve runs several engines. Leave it out, or start a program for each engine and divide the "
            "prompts among them."
        )
    elif gpu is not None and ranks > gpu.of:
        asked, param = sizes, given[0][0]
        problem = (
            f"each rank takes a GPU, and {gpu.of} may be used here. Lower it, let CUDA_VISIBLE_DEVICES name more, or "
            "give --device cpu."
        )
    elif gpu is not None and ranks > 1 and engines * ranks > gpu.of:
        problem = (
            f"each engine takes {ranks} GPUs, and {gpu.of} may be used here. Lower it or {sizes}, or let "
            "CUDA_VISIBLE_DEVICES name more."
        )
    elif gpu is not None and engines > gpu.of:
        problem = (
            f"each engine takes a GPU, and {gpu.of} may be used here. Lower it, let CUDA_VISIBLE_DEVICES name more, or "
            "give --device cpu."
        )
    if problem:
        raise ConfigError(f"{asked}: {problem}", param=param)


def engine_lines(engines: int, ranks: int, gpu: Gpu | None) -> list[str]:
    """Return the report's line about several engines behind one address; no line if there is one engine."""
    if engines == 1:
        return []
    gpus = "a GPU" if ranks == 1 else f"{ranks} GPUs"
    share = f"each with 1/{engines} of the cores and of the memory" if gpu is None else f"each on {gpus}"
    return [f"engines     {engines} behind one address, {share}; sizes are those of one"]


def _flag(param: str) -> str:
    return f"--{param.replace('_', '-')}"
