"""One device's worker: loads the model, allocates its KV cache, and runs plans, without knowing requests."""

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
from quire.foundation.messages.to_engine import MediumKind
from quire.foundation.messages.workers import (
    DeviceLimits,
    LoadAdapter,
    LoadBlocks,
    MaskedDrafts,
    Plan,
    ReadBlocks,
    Result,
    SaveBlocks,
    StoreBlocks,
    TokenBitmasks,
)
from quire.models.audio.audio_spec import SpeechSpec
from quire.models.audio.encoder import UNBIASED, SpeechEncoder
from quire.models.audio.hearing_spec import HearingSpec
from quire.models.layers.factory import LayerFactory
from quire.models.lora.loader import DeviceAdapterLoader
from quire.models.lora.updates import AdapterMemory
from quire.models.model import Stage, build_model
from quire.models.rank_spec import rank_share
from quire.models.spec import ModelSpec, spec_of
from quire.models.vision.tower import Tower
from quire.models.vision.towers import build_tower, check_tower, kinds_of
from quire.models.vision.vision_spec import VisionSpec
from quire.models.weights.tensor_options import PackedAtStart
from quire.planning.draft_model import draft_bytes
from quire.planning.images import largest_size
from quire.planning.kv_cache_plan import MeasuredMemory, NumBlocks, plan_kv_cache
from quire.runtime.worker.block_orders import BlockOrders
from quire.runtime.worker.host_memory import trim_heap
from quire.runtime.worker.kv_tensors import KVCache, cache_transfer
from quire.runtime.worker.kv_transfer import BlockTransfer
from quire.runtime.worker.media import MediaEncoder
from quire.runtime.worker.orders import WorkerOrders
from quire.runtime.worker.slot_table import SlotTable
from quire.runtime.worker.speculation.adaptive import AdaptiveDrafter
from quire.runtime.worker.speculation.hidden_states import HeadStates, Loan, ModelStates, model_states
from quire.runtime.worker.speculation.lookup_drafter import Drafter, build_drafter
from quire.runtime.worker.stage_tokens import StageTokens
from quire.runtime.worker.startup import gpu_memory
from quire.runtime.worker.startup.compile_warmup import launch_all_kernels, reduced_model
from quire.runtime.worker.startup.disk_tier import open_disk_store
from quire.runtime.worker.startup.gemm_warmup import gemms_of, start_warmup
from quire.runtime.worker.startup.kv_scales import choose_kv_scales, new_kv_scales
from quire.runtime.worker.startup.packed_weights import packed_weights_for
from quire.runtime.worker.startup.starting_runner import StartingRunner
from quire.runtime.worker.startup.threads import compute_threads
from quire.runtime.worker.step_handle import StepHandle
from quire.runtime.worker.weight_loading import load_encoder, load_tower, load_weights
from quire.runtime.worker.worker_parts import LoadedModel, WorkerParts

if TYPE_CHECKING:
    from quire.compute.kernels.triton.launching.precompiler import Precompiler

Agree = Callable[[NumBlocks], NumBlocks]
"""Takes the number of blocks that fit on this rank, and returns the number that all ranks have."""
_log = logging.getLogger(__name__)


class Worker:
    """Owns the device's tensors. Call `load` once before any `execute`, both in the same thread.

    Args:
        config: Resolved settings: `model` is a directory; device, dtype and lengths are chosen. On a CPU the size of
            the KV cache is chosen too; on a GPU the worker measures it.
        precompiler: Compiles kernels while weights are read; None: each kernel is compiled at its first launch.
        mesh: The worker's place among the workers that compute one model together; None: it is alone.
        collectives: Collectives of the ranks that divide each layer.
        links: Links to the ranks with the layers before and after this rank's.
        rehearsed: Replaces `collectives` in the compile warm-up.
        loan: What the main model lends to a draft head's worker; None for any other worker.
        followed: Slots of the main model, for a draft model on a device that runs ahead; otherwise None.
        stages: Coordinates pipeline stages where devices run ahead; otherwise None.
        engines: The engines that divide experts with this one; None if there are no others.

    Attributes:
        orders: Does work beside the steps, once the model is loaded.
        host_memory: What host blocks lie in, on a CPU; None: memory of this process.
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
        stages: StageTokens | None = None,
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
        self.orders = WorkerOrders()
        self.host_memory: memoryview | None = None
        self._adapters: DeviceAdapterLoader | None = None
        self._block_orders: BlockOrders | None = None
        self._launched: Callable[[int], None] = lambda step: None

    def load(self, agree: Agree = lambda blocks: blocks) -> DeviceLimits:
        """Load the model and make the device ready to serve.

        Args:
            agree: Called once with this rank's number of blocks, before any block is allocated.

        Raises:
            CheckpointError: The model's files are broken or do not fit the model.
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
        load_block_ms, on_disk = 0.0, None
        if self._transfer is not None:
            self._transfer.prepare_host_pool()
            if self._config.cache.kv_offloading_size is not None:
                with gpu_memory.room_for("the buffer of loads", "lower --gpu-memory-utilization"):
                    self._transfer.prepare_loads()
                load_block_ms = self._transfer.measure_load_ms()
                disk = None
                if self._config.cache.kv_disk_path is not None:
                    with self._stage("disk_tier"):
                        disk, on_disk = open_disk_store(
                            self._config, self._runner, self._transfer, len(loaded.spec.kv_groups()), self._kv_scales
                        )
                self._block_orders = BlockOrders(self._transfer, self.orders.report, disk)
                self.orders.serve(LoadBlocks, self._block_orders.load)
                self.orders.serve(SaveBlocks, self._block_orders.save)
                self.orders.serve(ReadBlocks, self._block_orders.read)
                self.orders.serve(StoreBlocks, self._block_orders.store)
                self._launched = self._block_orders.launched
        on_gpu = self._device.type == "cuda"
        sizes = self._parts.graph_shapes().mixed_sizes(self._parts.limits.tokens) if on_gpu else []
        return DeviceLimits(
            num_blocks=blocks.device,
            vocab_size=loaded.spec.vocab_size,
            num_host_blocks=blocks.host,
            load_block_ms=load_block_ms,
            startup=self._startup,
            step_sizes=sizes,
            num_states=blocks.states,
            disk=on_disk,
            ready_host_blocks=0 if self._transfer is None else self._transfer.ready_host_blocks,
        )

    def set_threads(self) -> None:
        """Set how many threads torch and Quire's kernels use. `load` calls this in the thread that computes."""
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
        loan = self._loan
        spec = spec_of(self._config.model) if loan is None else loan.spec
        options = self._parts.options
        packed_weights = packed_weights_for(self._config, spec, self._device, self._mesh)
        many_rows = self._device.type == "cpu" and not spec.pooler.generates
        updates = self._parts.updates()
        factory = LayerFactory(
            replace(options, packed_weights=packed_weights, many_rows=many_rows),
            spec.quantization,
            self._mesh,
            self._collectives,
            updates,
            engines=self._engines,
        )
        share = rank_share(spec, self._mesh)
        model = build_model(spec, factory, *self._links, lent=loan)
        self._kv_scales = new_kv_scales(share, self._config.kv_dtype, self._device)
        gemm_warmup = self._start_gemm_warmup(spec, factory) if self._device.type == "cuda" else None
        kernels_known = False
        if self._precompiler is not None and spec.fallback is None:
            with self._stage("rehearsal"):
                kernels_known = self._warm_up_compilation(spec)
        with self._stage("weights"):
            load_weights(self._config, share, spec, factory, self._clock)
            trim_heap()
        if spec.fallback is not None:
            with self._stage("load_check"):
                self._parts.check_fallback(share, model, factory)
        if updates is not None:
            self._adapters = self._parts.adapter_loader(updates, spec, factory, self.orders.report)
            self.orders.serve(LoadAdapter, self._adapters.load)
        if self._kv_scales is not None:
            with self._stage("kv_scales"):
                choose_kv_scales(self._config, share, model, self._kv_scales)
        states = model_states(self._config, spec, options)
        if states is not None:
            model.reader = states
        with gpu_memory.room_for("what all sequences hold", "lower --max-num-seqs, or give a smaller model"):
            slots = self._parts.slot_table(share)
        read = states if loan is None else loan.states
        media = self._load_towers(share.towers) if share.towers and share.has_tower else None
        speech = None if spec.speech is None else self._load_speech(spec, spec.speech)
        return LoadedModel(share, model, slots, kernels_known, gemm_warmup, updates, read, media, speech)

    def measure(self, loaded: LoadedModel) -> MeasuredMemory:
        """Measure how much GPU memory is left for the KV cache, after the largest step has run on a cache of one block.
        Memory that libraries have taken for their kernels counts as used."""
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
            if loaded.media is not None and loaded.spec.vision is not None:
                with torch.inference_mode():
                    loaded.media.warm_up(largest_size(self._config, loaded.spec, loaded.spec.vision))
            left = gpu_memory.bytes_left(self._device, self._config.cache.memory_share)
            drafts = draft_bytes(self._config)
            return MeasuredMemory(left - drafts.weights - drafts.activations)

    def allocate(self, loaded: LoadedModel, blocks: NumBlocks) -> None:
        """Allocate the KV cache, the host pool and the buffers of steps."""
        with self._stage("kv_cache"), gpu_memory.room_for("the buffers of steps", "lower --gpu-memory-utilization"):
            with gpu_memory.in_one_segment(self._device):
                kv_cache = self._parts.kv_cache(loaded.spec, blocks.device)
                states = self._parts.allocate_states(loaded, blocks.device)
            with self._compile_only():
                others = () if states is None else (states.blocks,)
                self._transfer = cache_transfer(kv_cache, blocks.host, *others, memory=self.host_memory)
            self._runner = self._build_runner(loaded, kv_cache, self._transfer, blocks.states)
            if (states is not None or loaded.spec.fallback is not None) and self._device.type == "cuda":
                # No compile warm-up has launched those that fuse states, or transformers' modules.
                launch_all_kernels(self._runner, self._parts.limits)

    def capture_graphs(self, loaded: LoadedModel) -> None:
        """Capture small steps as CUDA graphs; on a CPU, record them. Steps that pool texts are neither."""
        if not loaded.spec.pooler.generates:
            return
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
        """Find the plan's drafts and launch its step on a GPU. Ask `awaits_results` first if the plan allows drafts."""
        step = self._runner.launch(plan, None if self._drafter is None else self._drafter.launch(plan))
        self._launched(plan.step)
        return step

    def awaits_results(self, plan: Plan) -> bool:
        """Return whether the plan gets drafts that need the tokens of all earlier steps, so that these must be finished
        first. On a GPU, ask once for each plan that allows drafts, in order."""
        return self._drafter is not None and self._drafter.awaits_results(plan)

    def take_masked_drafts(self) -> MaskedDrafts | None:
        """Return the drafts for the masked rows of the last launched step; None if those rows may not have drafts."""
        return None if self._drafter is None else self._drafter.take_masked()

    def submit_bitmasks(self, masks: TokenBitmasks) -> None:
        """Hand over the bitmasks of the last launched step. No other step may be launched before."""
        self._runner.submit_bitmasks(masks)

    def finish(self, step: StepHandle) -> Result:
        """Wait for a step and return its result, which also reports the number of ready host blocks if it has grown."""
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
            masks: Waits for the bitmasks of the plan's masked rows.
            drafted: Receives the drafts of these rows, if they may have any.
        """
        drafts = None if self._drafter is None else self._drafter.launch(plan)
        if (proposed := self.take_masked_drafts()) is not None:
            assert drafted is not None, "drafts of masked rows, of which nobody is told"
            drafted(proposed)
        step = self._runner.launch(plan, drafts)
        self._launched(plan.step)
        if plan.masked:
            assert masks is not None, "masked rows without bitmasks"
            self.submit_bitmasks(masks())
        return self.finish(step)

    def learn_tokens(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """On a CPU, set the tokens that the last pipeline stage sampled for these slots; their next rows read them."""
        self._slots.last_token[list(slots)] = torch.tensor(tokens)

    def close(self) -> None:
        """Stop compiling and release the host pool's memory. Call this after the last step."""
        if self._adapters is not None:
            self._adapters.close()
        if self._block_orders is not None:
            self._block_orders.close()
        if self._transfer is not None:
            self._transfer.close()
        if self._precompiler is not None:
            self._precompiler.close()

    def _load_towers(self, specs: Sequence[VisionSpec | HearingSpec]) -> MediaEncoder:
        towers = dict[MediumKind, Tower]()
        with self._stage("tower"):
            for spec in specs:
                factory = LayerFactory(replace(self._parts.options, packed_weights=PackedAtStart()))
                tower = build_tower(spec, factory)
                load_tower(self._config, spec, factory)
                check_tower(spec, tower)
                towers |= dict.fromkeys(kinds_of(spec), tower)
            return MediaEncoder(towers, self._device)

    def _load_speech(self, spec: ModelSpec, speech: SpeechSpec) -> SpeechEncoder:
        with self._stage("encoder"):
            factory = LayerFactory(replace(self._parts.options, packed_weights=PackedAtStart()))
            encoder = SpeechEncoder(speech, spec, factory)
            load_encoder(self._config, factory, UNBIASED)
            return encoder

    # --- below --------------------------------------------------------------------------------------------------------

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        began = self._clock.now()
        yield
        self._startup[name] = self._clock.now() - began

    def _compile_only(self, *, deferred: bool = False) -> AbstractContextManager[None]:
        """Return a context that compiles kernels without running them, if there is a precompiler."""
        return nullcontext() if self._precompiler is None else self._precompiler.warmup(deferred=deferred)

    def _deferred(self) -> AbstractContextManager[None]:
        """Return a context for kernels that the start does not wait for, because only some requests need them."""
        return self._compile_only(deferred=True)

    def _warm_up_compilation(self, spec: ModelSpec) -> bool:
        """Compile all kernels, or load them from disk, while weights are read. Returns False if memory was missing.
        `spec` is the whole model's, so a pipeline stage warms up the kernels of all layers."""
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
        """Run the products of the layers' shapes once in a thread, while weights are read."""
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
        """Return the slots that a draft model follows; None unless the device runs ahead of the host."""
        return self._slots if self._runner.runs_ahead else None

    def _load_draft_model(self, loaded: LoadedModel, config: Config, spec: ModelSpec) -> StartingRunner:
        """Load a draft model or head with its own `config` and `spec`, and return its runner. `loaded` is the model
        that verifies."""
        loan = None
        if isinstance(loaded.states, ModelStates):
            assert isinstance(loaded.model, Stage), "a model lends its embedding"
            loan = Loan(loaded.model.embed, loaded.model.logits, HeadStates(loaded.states.states), spec)
        with self._stage("draft_model"):
            worker = Worker(
                config, self._clock, None, self._mesh, self._collectives, loan=loan, followed=self._slots_to_follow
            )
            worker.load()
            if self._device.type == "cuda":
                launch_all_kernels(worker._runner, worker._parts.limits)  # so that each is compiled
        return worker._runner

    def _build_runner(
        self, loaded: LoadedModel, kv_cache: KVCache, transfer: BlockTransfer | None = None, num_states: int = 0
    ) -> StartingRunner:
        transfer, scales = transfer or cache_transfer(kv_cache, 0), self._kv_scales
        return self._parts.runner(loaded, kv_cache, scales, transfer, self._followed, self._stages, num_states)
