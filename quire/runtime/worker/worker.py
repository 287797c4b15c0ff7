"""One device: loads the model and its KV cache, says how large they are, and launches plans.

Takes a Config that is already resolved: `model` is a directory, and device, dtype and lengths are chosen; the size of
the KV cache as well, but on a GPU, where it is measured. Knows nothing about requests or the scheduler.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import Tensor

from quire.compute.collectives.collectives import Collectives, OneRank
from quire.compute.collectives.delta import NO_LINKS, StageLinks
from quire.compute.collectives.engine_group import EngineGroup
from quire.compute.kernels.cpu.library import library
from quire.compute.mesh import Mesh
from quire.errors import MemoryBudgetError
from quire.foundation.clock import Clock
from quire.foundation.config import Config
from quire.foundation.messages.workers import DeviceLimits, MaskedDrafts, Plan, Result, TokenBitmasks
from quire.models.layers.factory import LayerFactory
from quire.models.lora.loader import DeviceAdapterLoader
from quire.models.lora.updates import AdapterMemory
from quire.models.model import build_model
from quire.models.rank_share import rank_share
from quire.models.spec import ModelSpec, read_spec
from quire.planning.draft_model import draft_model_bytes
from quire.planning.kv_cache_plan import MeasuredMemory, NumBlocks, plan_kv_cache
from quire.runtime.worker.host_memory import trim_heap
from quire.runtime.worker.kv_tensors import block_transfer, transfer_of
from quire.runtime.worker.kv_transfer import BlockTransfer, JoinedTransfer
from quire.runtime.worker.slot_table import SlotTable
from quire.runtime.worker.speculation.adaptive import AdaptiveDrafter
from quire.runtime.worker.speculation.drafters import Drafter, build_drafter
from quire.runtime.worker.speculation.hidden_states import Loan, ModelStates, model_states
from quire.runtime.worker.stage_steps import StageSteps
from quire.runtime.worker.startup import gpu_memory
from quire.runtime.worker.startup.compile_warmup import launch_all_kernels, reduced_model
from quire.runtime.worker.startup.gemm_warmup import gemms_of, start_warmup
from quire.runtime.worker.startup.kv_scales import choose_kv_scales, new_kv_scales
from quire.runtime.worker.startup.packed_weights import packed_weights_for
from quire.runtime.worker.startup.starting_runner import StartingRunner
from quire.runtime.worker.startup.threads import compute_threads
from quire.runtime.worker.step_handle import StepHandle
from quire.runtime.worker.weight_loading import load_weights
from quire.runtime.worker.worker_parts import LoadedModel, WorkerParts

if TYPE_CHECKING:
    from quire.compute.kernels.triton.launching.precompiler import Precompiler

Agree = Callable[[NumBlocks], NumBlocks]
"""From the blocks that a rank has room for to those that all ranks have."""
_log = logging.getLogger(__name__)


class Worker:
    """Owns the device's tensors. `load` comes once, before any `execute`; both in the same thread.

    Args:
        config: Resolved settings.
        clock: For the seconds of the start.
        precompiler: Compiles the kernels while weights are read; None: each is compiled when it is launched first.
        mesh: Its place among the workers that compute one model together.
        collectives: Of those that divide its layers.
        links: To those that have the layers before and after its own.
        rehearsed: What takes the place of `collectives` in a compile warm-up.
        loan: What a draft head is lent by its model; None: the worker is of a model.
        followed: Of a draft model on a device that runs ahead, the slots of the model that it drafts for.
        stages: What other stages of a pipeline are told, where devices run ahead; None: nothing.
        engines: Those with which its engine divides experts, if there are any.

    Attributes:
        adapters: Loads them, once the model is loaded; None: none are served.
    """

    def __init__(
        self,
        config: Config,
        clock: Clock,
        precompiler: Precompiler | None = None,
        mesh: Mesh | None = None,
        collectives: Collectives | None = None,
        links: StageLinks = NO_LINKS,
        rehearsed: Collectives | None = None,
        loan: Loan | None = None,
        followed: SlotTable | None = None,
        stages: StageSteps | None = None,
        engines: EngineGroup | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._precompiler = precompiler
        self._mesh = mesh or Mesh()
        assert (engines is None) == (self._mesh.engines == 1), "they divide experts together"
        self._collectives = collectives or OneRank()
        self._links = links
        self._rehearsed = rehearsed or OneRank()
        self._loan = loan
        self._followed = followed
        self._stages = stages
        self._engines = engines
        self._device = torch.device("cuda:0" if config.device.device == "cuda" else "cpu")
        self._parts = WorkerParts(config, self._device, self._mesh)
        self._startup: dict[str, float] = {}
        self._kv_scales: Tensor | None = None
        self._drafter: AdaptiveDrafter | None = None
        self._runner: StartingRunner
        self._slots: SlotTable
        self._transfer: BlockTransfer | None = None
        self._reported_host_blocks = 0
        self.adapters: DeviceAdapterLoader | None = None

    def load(self, agree: Agree = lambda blocks: blocks) -> DeviceLimits:
        """Run the whole start: `read_weights`, `measure`, plan, `allocate`, `capture_graphs`.

        Args:
            agree: Called once with the blocks of this rank's plan, before any of them is allocated; returns those of
                all ranks.

        Raises:
            CheckpointError: The model's files do not serve.
            MemoryBudgetError: Weights, steps or the KV cache do not fit; the message names the flag to change.
        """
        with self._stage("kernels") if self._device.type == "cpu" else nullcontext():
            self.set_threads()
        with self._precompiler or nullcontext():
            loaded = self.read_weights()
            self._slots = loaded.slots
            measured = self.measure(loaded)
            blocks = agree(plan_kv_cache(self._config, loaded.spec, measured).blocks)
            self.allocate(loaded, blocks)
            self.capture_graphs(loaded)
            load_draft_model = partial(self._load_draft_model, loaded)
            drafter = build_drafter(self._config, loaded.spec, blocks.device, load_draft_model, self._slots_to_follow)
            self._start_drafting(drafter)
            if self._precompiler is not None:
                with self._stage("compile"):
                    self._precompiler.finish()
        if self._transfer is not None:
            self._transfer.prepare_host_pool()
        on_gpu = self._device.type == "cuda"
        sizes = self._parts.graph_shapes().mixed_sizes(self._parts.limits.tokens) if on_gpu else []
        return DeviceLimits(blocks.device, loaded.spec.vocab_size, blocks.host, self._startup, sizes)

    def set_threads(self) -> None:
        """Set how many threads torch and our kernels use. Called by `load`, in the thread that computes."""
        sharing = self._config.parallel.ranks_of_a_node * self._config.parallel.data_parallel_size
        threads = compute_threads(self._config.device.cpu_threads, torch.get_num_threads(), sharing)
        torch.set_num_threads(threads)
        if self._device.type == "cpu" and (kernels := library()):  # before threads that read weights load one each
            kernels.set_threads(torch.get_num_threads())

    # --- the steps of the start ---------------------------------------------------------------------------------------

    def read_weights(self) -> LoadedModel:
        """Build the model and read its weights, while kernels are compiled."""
        if self._device.type == "cuda":
            gpu_memory.use_expandable_segments(self._device)
        spec = read_spec(self._config.model.model, self._config.model.quantization)
        options = self._parts.options
        packed_weights = packed_weights_for(self._config, spec, self._device, self._mesh)
        updates = self._parts.updates()
        factory = LayerFactory(
            replace(options, packed_weights=packed_weights),
            spec.quantization,
            self._mesh,
            self._collectives,
            updates,
            engines=self._engines,
        )
        loan, share = self._loan, rank_share(spec, self._mesh)
        model = build_model(spec, factory, *self._links, None if loan is None else loan.to_model)
        self._kv_scales = new_kv_scales(share, self._config.kv_dtype, self._device)
        gemm_warmup = self._start_gemm_warmup(spec, factory) if self._device.type == "cuda" else None
        kernels_known = False
        if self._precompiler is not None:
            with self._stage("rehearsal"):
                kernels_known = self._warm_up_compilation(spec)
        with self._stage("weights"):
            load_weights(self._config, share, spec, factory, self._clock)
            trim_heap()
        if updates is not None:
            self.adapters = self._parts.adapter_loader(updates, spec, factory)
        if self._kv_scales is not None:
            with self._stage("kv_scales"):
                choose_kv_scales(self._config, share, model, self._kv_scales)
        states = model_states(self._config, spec, options, model.embed)
        if states is not None:
            model.reader = states
        with gpu_memory.room_for("what all sequences hold", "lower --max-num-seqs, or give a smaller model"):
            slots = self._parts.slot_table(share)
        read = states if loan is None else loan.states
        return LoadedModel(share, model, slots, kernels_known, gemm_warmup, updates, read)

    def measure(self, loaded: LoadedModel) -> MeasuredMemory:
        """The memory of a GPU that is left for the KV cache once the largest step has run on a cache of one block.

        What libraries have loaded for their products counts as taken.
        """
        if loaded.gemm_warmup is None:
            return MeasuredMemory(None, library() is not None)
        smaller = "lower --max-num-batched-tokens or --max-num-seqs, or give a smaller model"
        with self._stage("profile"), gpu_memory.room_for("the largest step", smaller):
            loaded.gemm_warmup.result()
            torch.cuda.empty_cache()  # what the start has used and left in segments of its own
            kv_cache = self._parts.kv_cache(loaded.spec, 0)
            self._parts.allocate_states(loaded, 0)
            runner = self._build_runner(loaded, kv_cache)
            runner.run_largest(self._deferred)
            left = gpu_memory.bytes_left(self._device, self._config.cache.memory_share)
            return MeasuredMemory(left - draft_model_bytes(self._config))

    def allocate(self, loaded: LoadedModel, blocks: NumBlocks) -> None:
        """Make the KV cache and the host pool, and the buffers of steps."""
        with self._stage("kv_cache"), gpu_memory.room_for("the buffers of steps", "lower --gpu-memory-utilization"):
            with gpu_memory.in_one_segment(self._device):
                kv_cache = self._parts.kv_cache(loaded.spec, blocks.device)
                states = self._parts.allocate_states(loaded, blocks.device)
            with self._compile_only():
                self._transfer = block_transfer(kv_cache, blocks.host)
                if states is not None:
                    self._transfer = JoinedTransfer(self._transfer, transfer_of(states.blocks, blocks.host))
            self._runner = self._build_runner(loaded, kv_cache, self._transfer)
            if states is not None and self._device.type == "cuda":
                # No compile warm-up has launched those that fuse states.
                launch_all_kernels(self._runner, self._parts.limits)

    def capture_graphs(self, loaded: LoadedModel) -> None:
        """Capture small steps as CUDA graphs; on a CPU, record them."""
        if not (most := self._config.device.max_cudagraph_capture_size):
            is_alone = self._mesh.pp == 1 and self._engines is None  # what comes from elsewhere is no kernel's doing
            if self._device.type == "cpu" and is_alone and not self._config.device.enforce_eager:
                with self._stage("graphs"):
                    self._runner.record_steps()
            return
        warm = loaded.gemm_warmup is None or loaded.gemm_warmup.result()
        precompiled = loaded.kernels_known and loaded.states is None and warm
        fewer = "lower --gpu-memory-utilization or --max-cudagraph-capture-size, or give --enforce-eager"
        with self._stage("graphs"), gpu_memory.room_for("CUDA graphs", fewer):
            self._runner.capture_graphs(most, precompiled=precompiled)

    # --- serving ------------------------------------------------------------------------------------------------------

    def launch(self, plan: Plan) -> StepHandle:
        """Begin one step on a GPU, and find its drafts; see `awaits_results`."""
        return self._runner.launch(plan, None if self._drafter is None else self._drafter.launch(plan))

    def awaits_results(self, plan: Plan) -> bool:
        """Whether this plan gets drafts that need the tokens of all steps before it, so that these must be finished
        before it is launched. Asked once for each plan that allows drafts, in their order, on a GPU."""
        return self._drafter is not None and self._drafter.awaits_results(plan)

    def take_masked_drafts(self) -> MaskedDrafts | None:
        """What was proposed for the masked rows of the step that was launched last, if these may have drafts."""
        return None if self._drafter is None else self._drafter.take_masked()

    def submit_bitmasks(self, masks: TokenBitmasks) -> None:
        """Hand over the bitmasks of the step that was begun last; no other begins before they are there."""
        self._runner.submit_bitmasks(masks)

    def finish(self, step: StepHandle) -> Result:
        """Wait for a step and return its result, which says how many host blocks are ready when more are than
        before."""
        result = step.result()
        if self._drafter is not None:
            result = self._drafter.finish(result)
        if self._transfer is None or self._transfer.ready_host_blocks == self._reported_host_blocks:
            return result
        self._reported_host_blocks = self._transfer.ready_host_blocks
        return msgspec.structs.replace(result, ready_host_blocks=self._reported_host_blocks)

    def execute(
        self,
        plan: Plan,
        masks: Callable[[], TokenBitmasks] | None = None,
        drafted: Callable[[MaskedDrafts], None] | None = None,
    ) -> Result:
        """Run one step on a CPU.

        Args:
            plan: The step.
            masks: Waits for the bitmasks of its masked rows.
            drafted: Told what is proposed for these rows, if they may have drafts.
        """
        drafts = None if self._drafter is None else self._drafter.launch(plan)
        if (proposed := self.take_masked_drafts()) is not None:
            assert drafted is not None, "drafts of masked rows, of which nobody is told"
            drafted(proposed)
        step = self._runner.launch(plan, drafts)
        if plan.masked:
            assert masks is not None, "masked rows without bitmasks"
            self.submit_bitmasks(masks())
        return self.finish(step)

    def learn_tokens(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """Take the tokens that another stage has sampled for these slots, which their next rows read; on a CPU."""
        self._slots.last_token[list(slots)] = torch.tensor(tokens)

    def close(self) -> None:
        """End the worker after its last step: stop compiling, and give back the host pool's memory."""
        if self.adapters is not None:
            self.adapters.close()
        if self._transfer is not None:
            self._transfer.close()
        if self._precompiler is not None:
            self._precompiler.close()

    # --- below --------------------------------------------------------------------------------------------------------

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        """Measure how long a stage of the start takes."""
        began = self._clock.now()
        yield
        self._startup[name] = self._clock.now() - began

    def _compile_only(self) -> AbstractContextManager[None]:
        """A context in which kernels are compiled and do not run, if there is a precompiler."""
        return nullcontext() if self._precompiler is None else self._precompiler.warmup()

    def _deferred(self) -> AbstractContextManager[None]:
        """A context in which kernels are compiled and do not run, if there is a precompiler. It is for those that only
        some requests need: the start does not wait for their compilation."""
        return nullcontext() if self._precompiler is None else self._precompiler.warmup(deferred=True)

    def _warm_up_compilation(self, spec: ModelSpec) -> bool:
        """Let all kernels be compiled or loaded from disk while weights are read. Returns whether there was memory for
        that.

        Args:
            spec: Of the model. A stage launches kernels of any of its layers, which may be few: they are those of the
                whole model.
        """
        mesh = replace(self._mesh, rank=self._mesh.tp_rank, pp=1)
        share = rank_share(spec, mesh)
        try:
            with self._compile_only():
                kv_cache = self._parts.kv_cache(share, 0)
                updates = self._parts.updates()
                model = reduced_model(spec, self._parts.options, updates, mesh, self._rehearsed, self._links)
                if updates is not None:
                    AdapterMemory(updates, self._parts.options.dtype, self._device)
                loaded = LoadedModel(share, model, self._parts.slot_table(share), False, None, updates)
                runner = self._build_runner(loaded, kv_cache)
                launch_all_kernels(runner, self._parts.limits, self._deferred)
        except (torch.OutOfMemoryError, MemoryBudgetError):
            _log.info("kernels     no memory for compile warm-up: they are compiled as they are launched")
            return False
        return True

    def _start_gemm_warmup(self, spec: ModelSpec, factory: LayerFactory) -> Future[bool]:
        """Let a thread run the libraries' products of the layers' shapes once, while weights are read."""
        head = self._mesh.padded_part(spec.vocab_size).count
        gemms = gemms_of(factory.layers, head, spec.hidden, self._parts.limits, self._parts.graph_shapes().all())
        return start_warmup(gemms, factory.options)

    def _start_drafting(self, drafter: Drafter | None) -> None:
        speculation = self._config.speculation.speculation
        if speculation is not None and speculation.synthetic_rates:
            _log.warning("drafts      are accepted at random (rejection_sample_method synthetic): outputs are wrong")
        if drafter is not None:
            ahead = self._runner.runs_ahead
            barred = self._slots.transforms.are_active if ahead else None
            adapts = self._mesh.tp == 1  # ranks would measure different times
            self._drafter = AdaptiveDrafter(drafter, self._clock, waits=ahead, adapts=adapts, barred=barred)

    @property
    def _slots_to_follow(self) -> SlotTable | None:
        """The slots that a draft model follows, on a device that runs ahead of the host."""
        return self._slots if self._runner.runs_ahead else None

    def _load_draft_model(self, loaded: LoadedModel, config: Config) -> StartingRunner:
        """The runner of a draft model or head.

        Args:
            loaded: The model that verifies.
            config: Of the other one.
        """
        loan = loaded.states.loan() if isinstance(loaded.states, ModelStates) else None
        with self._stage("draft_model"):
            worker = Worker(config, self._clock, loan=loan, followed=self._slots_to_follow)
            worker.load()
            if self._device.type == "cuda":
                launch_all_kernels(worker._runner, worker._parts.limits)  # so that each is compiled
        return worker._runner

    def _build_runner(
        self, loaded: LoadedModel, kv_cache: Tensor, transfer: BlockTransfer | None = None
    ) -> StartingRunner:
        """A runner on this KV cache; without `transfer`, it has no host pool."""
        transfer = transfer or block_transfer(kv_cache, 0)
        return self._parts.runner(loaded, kv_cache, self._kv_scales, transfer, self._followed, self._stages)
