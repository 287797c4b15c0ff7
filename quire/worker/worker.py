"""One device: loads the model and its KV cache, says how large they are, and launches plans.

Takes a Config that is already resolved: `model` is a directory, and device, dtype and lengths are chosen; the size of
the KV cache as well, but on a GPU, where it is measured. Knows nothing about requests or the scheduler.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.attention.backend import AttentionBackend, KVView
from quire.clock import Clock
from quire.config import Config
from quire.errors import ConfigError, MemoryBudgetError
from quire.layers.factory import LayerFactory
from quire.layers.layer import TensorOptions, load_all_weights, weight_specs_of
from quire.logits_processors import load_processors
from quire.messages import DeviceLimits, Plan, Result
from quire.models.model import Model, build_model
from quire.models.spec import ModelSpec, read_spec
from quire.planning.memory_plan import MeasuredMemory, plan_memory
from quire.planning.step_limits import StepLimits
from quire.weights.checkpoint import Checkpoint, WeightSpec, check, with_known_names
from quire.weights.dummy import DummyCheckpoint
from quire.weights.progress import ReadingProgress
from quire.weights.safetensors import SafetensorsCheckpoint
from quire.worker.graph_shapes import GraphShapes
from quire.worker.kv_tensors import (
    allocate_kv_cache,
    block_transfer,
    kv_view,
)
from quire.worker.kv_transfer import BlockTransfer
from quire.worker.model_runner import ModelRunner
from quire.worker.slot_table import SlotTable
from quire.worker.startup import gpu_memory
from quire.worker.startup.compile_warmup import reduced_model, rehearse
from quire.worker.startup.gemm_warmup import gemms_of, start_warmup
from quire.worker.startup.host_memory import trim_heap
from quire.worker.startup.threads import usable_cores
from quire.worker.step_handle import StepHandle

if TYPE_CHECKING:
    from quire.kernels.triton.launching.precompiler import Precompiler

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float": torch.float32}
_GB = 1e9
_log = logging.getLogger(__name__)


class Worker:
    """Owns the device's tensors. `load` comes once, before any `execute`; both in the same thread.

    Args:
        config: Resolved settings.
        clock: For the seconds of the start.
        precompiler: Compiles the kernels while weights are read; None: each is compiled when it is launched first.
    """

    def __init__(self, config: Config, clock: Clock, precompiler: Precompiler | None = None) -> None:
        self._config = config
        self._clock = clock
        self._precompiler = precompiler
        self._device = torch.device("cuda:0" if config.device.device == "cuda" else "cpu")
        self._startup: dict[str, float] = {}
        self._runner: ModelRunner
        self._transfer: BlockTransfer | None = None

    def load(self) -> DeviceLimits:
        """Read the weights and allocate the KV cache; on a GPU, measure first what the largest step takes, and record
        graphs.

        Raises:
            CheckpointError: The model's files do not serve.
            MemoryBudgetError: Weights, steps or the KV cache do not fit; the message names the flag to change.
        """
        torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))
        with self._precompiler or nullcontext():
            return self._load()

    def _load(self) -> DeviceLimits:
        config, on_gpu = self._config, self._device.type == "cuda"
        if on_gpu:
            gpu_memory.use_expandable_segments(self._device)
        spec, dtype = read_spec(config.model.model), _dtype(config)
        factory = LayerFactory(TensorOptions(self._device, dtype))
        model = build_model(spec, factory)
        in_use = self._start_gemm_warmup(spec, factory) if on_gpu else None
        rehearsed = False
        if self._precompiler is not None:
            with self._stage("rehearsal"):
                rehearsed = self._rehearse(spec)
        with self._stage("weights"):
            self._read_weights(spec, factory)
            trim_heap()
        with _room_for("what all sequences hold", "lower --max-num-seqs, or give a smaller model"):
            slots = self._slot_table(spec)
        left = None
        if in_use is not None:
            smaller = "lower --max-num-batched-tokens or --max-num-seqs, or give a smaller model"
            with self._stage("profile"), _room_for("the largest step", smaller):
                rehearsed = in_use.result() and rehearsed
                left = self._try_largest_step(spec, model, slots)
        with self._stage("kv_cache"), _room_for("the buffers of steps", "lower --gpu-memory-utilization"):
            plan = plan_memory(config, spec, MeasuredMemory(left))
            with gpu_memory.in_one_segment(self._device):
                storage = allocate_kv_cache(spec, plan.num_blocks, config.cache.block_size, dtype, self._device)
            with self._rehearsal():
                transfer = block_transfer(storage, plan.num_host_blocks)
            self._runner = self._build_runner(spec, model, slots, storage, transfer)
            self._transfer = transfer
        if largest := config.device.max_cudagraph_capture_size:
            fewer = "lower --gpu-memory-utilization or --max-cudagraph-capture-size, or give --enforce-eager"
            with self._stage("graphs"), _room_for("recorded steps", fewer):
                self._runner.record(largest, rehearsed=rehearsed)
        if self._precompiler is not None:
            with self._stage("compile"):
                self._precompiler.finish()
        transfer.prepare_host_pool()
        sizes = self._shapes().mixed_sizes(StepLimits.of(self._config).tokens) if on_gpu else []
        return DeviceLimits(plan.num_blocks, spec.vocab_size, plan.num_host_blocks, self._startup, sizes)

    def close(self) -> None:
        """After the last step: nobody compiles any more, and the host pool's memory is given back."""
        if self._transfer is not None:
            self._transfer.close()
        if self._precompiler is not None:
            self._precompiler.close()

    def launch(self, plan: Plan) -> StepHandle:
        """Begin one step; on a CPU it is over then."""
        return self._runner.launch(plan)

    def execute(self, plan: Plan) -> Result:
        """Run one step."""
        return self.launch(plan).result()

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        """Seconds of the start."""
        began = self._clock.now()
        yield
        self._startup[name] = self._clock.now() - began

    def _rehearsal(self) -> AbstractContextManager[None]:
        """What is launched inside is compiled, and does not run, where there is somebody to compile it."""
        return nullcontext() if self._precompiler is None else self._precompiler.rehearsal()

    def _aside(self) -> AbstractContextManager[None]:
        """The same of what only some requests need: the start does not wait for it."""
        return nullcontext() if self._precompiler is None else self._precompiler.rehearsal(later=True)

    def _rehearse(self, spec: ModelSpec) -> bool:
        """Let kernels be compiled, or loaded from Triton's cache, while weights are read. Whether there was room."""
        dtype = _dtype(self._config)
        try:
            with self._rehearsal():
                storage = allocate_kv_cache(spec, 0, self._config.cache.block_size, dtype, self._device)
                model = reduced_model(spec, TensorOptions(self._device, dtype))
                runner = self._build_runner(spec, model, self._slot_table(spec), storage)
                rehearse(runner, StepLimits.of(self._config), self._aside)
        except (torch.OutOfMemoryError, MemoryBudgetError):
            _log.info("kernels     no room to rehearse: they are compiled as they are launched")
            return False
        return True

    def _try_largest_step(self, spec: ModelSpec, model: Model, slots: SlotTable) -> int:
        """Bytes of the device that are left for the KV cache, once the largest step has run on a cache of one block.

        What products have loaded by then counts as taken.
        """
        config = self._config
        torch.cuda.empty_cache()  # what the start needed, in pieces of its own
        storage = allocate_kv_cache(spec, 0, config.cache.block_size, _dtype(config), self._device)
        runner = self._build_runner(spec, model, slots, storage)
        runner.run_largest(self._aside)
        return gpu_memory.bytes_left(self._device, config.cache.memory_share)

    def _start_gemm_warmup(self, spec: ModelSpec, factory: LayerFactory) -> Future[bool]:
        """Let products of the layers' shapes be used, while others compile and read."""
        largest, recorded = StepLimits.of(self._config), self._shapes().all()
        return start_warmup(gemms_of(factory.layers, spec.vocab_size, spec.hidden, largest, recorded), factory.options)

    def _read_weights(self, spec: ModelSpec, factory: LayerFactory) -> None:
        load, name = self._config.load, self._config.model.dtype
        specs = weight_specs_of(factory.layers)
        checkpoint = self._open(specs)
        check(checkpoint, specs, spec.architecture)
        progress = ReadingProgress(spec.weight_bytes(name), self._clock, load.use_tqdm_on_load)
        try:
            load_all_weights(factory.layers, checkpoint, torch.get_num_threads(), progress)
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, RuntimeError) and "allocate" not in str(error):
                raise
            raise MemoryBudgetError(
                f"The weights need {spec.weight_bytes(name) / _GB:.1f} GB as {name}, which this machine cannot give: "
                "use --dtype bfloat16 or a smaller model."
            ) from None
        finally:
            checkpoint.close()
        size = spec.weight_bytes(name) / _GB
        _log.info("weights     %.2f GB in %.1f s, %.2f GB/s", size, progress.seconds, size / (progress.seconds or 1))

    def _open(self, specs: list[WeightSpec]) -> Checkpoint:
        if self._config.load.load_format == "dummy":
            return DummyCheckpoint(specs, self._config.model.seed)
        return with_known_names(SafetensorsCheckpoint(Path(self._config.model.model)))

    def _shapes(self) -> GraphShapes:
        """Of the steps that are recorded."""
        largest, most = StepLimits.of(self._config), self._config.device.max_cudagraph_capture_size or 0
        return GraphShapes(most, largest.rows, largest.tokens, largest.length)

    def _slot_table(self, spec: ModelSpec) -> SlotTable:
        largest, size = StepLimits.of(self._config), self._config.cache.block_size
        processors = load_processors(self._config.model.logits_processors)
        blocks, groups = -(-largest.length // size), len(spec.kv_groups())
        return SlotTable(largest.rows, blocks, groups, spec.vocab_size, self._device, processors)

    def _build_runner(
        self, spec: ModelSpec, model: Model, slots: SlotTable, storage: Tensor, transfer: BlockTransfer | None = None
    ) -> ModelRunner:
        largest = StepLimits.of(self._config)
        return ModelRunner(
            model,
            _attention(kv_view(storage, spec), spec, largest),
            transfer or block_transfer(storage, 0),
            slots,
            largest,
            spec.rope_length_mode is not None,
            self._config.model.logprobs_mode,
            self._config.model.max_logprobs,
        )


@contextmanager
def _room_for(what: str, advice: str) -> Iterator[None]:
    """What does not fit into a GPU's memory is refused with the flag to change."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise MemoryBudgetError(f"The GPU has no room for {what}: {advice}.") from None


def _attention(kv: KVView, spec: ModelSpec, largest: StepLimits) -> AttentionBackend:
    """The backend that serves the device on which the cache lies."""
    if kv.keys[0].device.type == "cpu":
        from quire.attention.cpu import CpuAttention

        return CpuAttention(kv)
    from quire.attention.triton import TritonAttention  # Triton is there only with a GPU's torch

    return TritonAttention(kv, spec.heads, largest.rows, largest.tokens, largest.length)


def _dtype(config: Config) -> torch.dtype:
    if config.model.dtype not in DTYPES:
        raise ConfigError(f"--dtype {config.model.dtype} has not been resolved to one of {', '.join(DTYPES)}.")
    return DTYPES[config.model.dtype]
