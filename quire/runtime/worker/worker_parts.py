"""Builds the parts of a worker: the loaded model, the runner, and whatever holds the tensors of steps. It does not know
the order in which a worker starts."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from quire.compute.attention.backend import AttentionBackend
from quire.compute.attention.selector import attention_backend, latent_attention_backend
from quire.compute.attention.sequence_states import AttentionBesideStates
from quire.compute.attention.sources import AttentionBesideSources
from quire.compute.mesh import Mesh
from quire.errors import ConfigError
from quire.foundation.config import Config
from quire.foundation.messages.workers import AdapterLoaded
from quire.foundation.processes import late_meta_kernels
from quire.logits_processors import load_processors
from quire.models.audio.encoder import SpeechEncoder
from quire.models.fallback.rows_only import RowsOnly
from quire.models.layer_spec import AttentionSpec, LatentSpec
from quire.models.layers.factory import LayerFactory
from quire.models.layers.layer import weight_specs_of
from quire.models.layers.vector_modules import VectorModules
from quire.models.lora.files import read_adapter
from quire.models.lora.loader import DeviceAdapterLoader
from quire.models.lora.sources import AdapterSources
from quire.models.lora.updates import AdapterMemory, HostAdapter, LowRankUpdates
from quire.models.model import Model, Stage
from quire.models.spec import ModelSpec
from quire.models.weights.hub import HubAccess
from quire.models.weights.tensor_options import TensorOptions
from quire.planning.state_memory import scratch_states
from quire.planning.step_limits import StepLimits
from quire.runtime.worker.async_scheduling import MAX_STEPS_IN_FLIGHT
from quire.runtime.worker.graph_shapes import MAX_ROWS, MAX_SHORT_TOKENS, GraphShapes, ShortSteps
from quire.runtime.worker.kv_tensors import DENSE, ELEMENTS, KVCache, allocate_kv_cache, kv_view
from quire.runtime.worker.kv_transfer import BlockTransfer
from quire.runtime.worker.media import MediaEncoder
from quire.runtime.worker.pooling import Pooler
from quire.runtime.worker.slot_table import SlotTable
from quire.runtime.worker.sources import SlotSources, allocate_sources
from quire.runtime.worker.speculation.draft_steps import DeviceTokens, steps_in_flight
from quire.runtime.worker.speculation.hidden_states import HeadStates, ModelStates, StateRows
from quire.runtime.worker.speculation.synthetic_acceptance import SyntheticAcceptance
from quire.runtime.worker.stage_tokens import StageTokens
from quire.runtime.worker.startup import gpu_memory
from quire.runtime.worker.startup.starting_runner import StartingRunner
from quire.runtime.worker.state_tensors import StateTensors
from quire.runtime.worker.weight_loading import open_checkpoint, undivided_layers


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights, and what the start knows about its kernels.

    Attributes:
        spec: Spec of this rank's share of the model.
        kernels_known: Whether the precompiler has compiled, or will compile, all kernels of the model's steps.
        gemm_warmup: Result of `run_gemms`; None on a CPU.
        updates: What adapters change in the model; None without adapters.
        states: For a model, the states that its draft head reads; for a draft head, how it reads them; None without a
            head.
        media: Makes vectors of images; None: the model reads text alone.
        speech: The encoder of sounds; None: there is none.
    """

    spec: ModelSpec
    model: Model
    slots: SlotTable
    kernels_known: bool
    gemm_warmup: Future[bool] | None
    updates: LowRankUpdates | None = None
    states: ModelStates | HeadStates | None = None
    media: MediaEncoder | None = None
    speech: SpeechEncoder | None = None


class WorkerParts:
    """Builds the parts of one worker from its settings and device."""

    def __init__(self, config: Config, device: torch.device, mesh: Mesh) -> None:
        self._config = config
        self._device = device
        self._mesh = mesh

    @property
    def limits(self) -> StepLimits:
        return StepLimits.of(self._config)

    @property
    def options(self) -> TensorOptions:
        return TensorOptions(self._device, _dtype(self._config))

    def graph_shapes(self) -> GraphShapes:
        limits, most = self.limits, self._config.device.max_cudagraph_capture_size or 0
        short = ShortSteps.VERIFYING if limits.drafts else ShortSteps.NONE
        return GraphShapes(most, limits.rows, limits.tokens, limits.length, limits.sampled, short)

    def kv_cache(self, spec: ModelSpec, num_blocks: int) -> KVCache:
        """Allocate a KV cache of `num_blocks` blocks and the dummy block."""
        dtype = ELEMENTS[self._config.kv_dtype]
        if spec.keeps_own_cache:  # blocks only count what sequences keep
            assert isinstance(spec.attention, AttentionSpec)
            mixer = replace(spec.attention, kv_heads=1, head_dim=1)
            spec = replace(spec, layers=tuple(replace(layer, mixer=mixer) for layer in spec.layers))
        return allocate_kv_cache(spec, num_blocks, self._config.cache.block_size, dtype, self._device)

    def allocate_states(self, loaded: LoadedModel, num_blocks: int) -> StateRows | None:
        """Allocate the states that a draft head reads; returns None if there is no head."""
        if not isinstance(loaded.states, ModelStates):
            return None
        loaded.states.allocate(num_blocks, self._config.cache.block_size, self.limits.rows + 1)
        return loaded.states.states

    def recurrent(self, spec: ModelSpec, num_states: int) -> StateTensors | None:
        """Allocate the states of sequences, and the dummy; None if no layer of this rank keeps any."""
        if not spec.state_layers:
            return None
        return StateTensors(spec, num_states, self.options.dtype, self._device, scratch_states(self.limits))

    def slot_table(self, spec: ModelSpec) -> SlotTable:
        """Make a slot table for all sequences that may run at a time."""
        limits, size = self.limits, self._config.cache.block_size
        if self._config.model.logits_processors:
            late_meta_kernels.load()
        processors = load_processors(self._config.model.logits_processors)
        blocks, groups = -(-limits.length // size), len(spec.kv_groups())
        return SlotTable(
            limits.rows, blocks, groups, spec.vocab_size, self._device, processors, limits.drafts, spec.block_entries
        )

    def updates(self) -> LowRankUpdates | None:
        """Return an empty record of what adapters may change in a model that is built next; None without adapters."""
        lora = self._config.lora
        return LowRankUpdates(lora.max_loras, lora.max_lora_rank, self._device.type) if lora.enable_lora else None

    def adapter_loader(
        self,
        updates: LowRankUpdates,
        spec: ModelSpec,
        factory: LayerFactory,
        report: Callable[[AdapterLoaded], None],
    ) -> DeviceAdapterLoader:
        """Make the slots of adapters, and a loader that reads adapters from a directory or the hub, and reports each.
        `spec` is the whole model's, while `updates` and `factory` belong to this rank's part."""
        with gpu_memory.room_for(
            "the slots of adapters", "lower --max-loras or --max-lora-rank, or give a smaller model"
        ):
            memory = AdapterMemory(updates, self.options.dtype, self._device)
        layers, everything = factory.layers, self.updates()
        if everything is not None and (self._mesh.pp > 1 or self._mesh.ep > 1):  # some modules are other ranks' alone
            layers = undivided_layers(spec, self.options, everything)
            updates.note_others(everything)
        config = self._config
        open_base = partial(open_checkpoint, config, spec, weight_specs_of(layers))
        sources = AdapterSources(HubAccess(config.model.hf_token, config.load.download_dir))

        def read(path: str) -> HostAdapter:
            with sources.directory(path) as directory:
                return read_adapter(directory, updates, self.options.dtype, open_base, spec.family.modules.older)

        return DeviceAdapterLoader(read, memory, config.lora.host_adapters, report)

    def runner(
        self,
        loaded: LoadedModel,
        kv_cache: KVCache,
        kv_scales: Tensor | None,
        transfer: BlockTransfer,
        followed: SlotTable | None,
        stages: StageTokens | None,
        num_states: int = 0,
    ) -> StartingRunner:
        """Build a runner of the model. `kv_scales` are the scales of a quantized KV cache; `followed` and `stages` are
        those of Worker; states of sequences are allocated here."""
        limits, spec, tokens, depth = self.limits, loaded.spec, None, MAX_STEPS_IN_FLIGHT
        if followed is not None:
            tokens = DeviceTokens(loaded.slots, followed, is_head=spec.head is not None)
            depth = steps_in_flight(followed.drafts.shape[1])
        attention, recurrent = self.attention(kv_cache, spec, kv_scales), self.recurrent(spec, num_states)
        if recurrent is not None:
            attention = AttentionBesideStates(attention, recurrent.by_layer)
        sources = None
        if loaded.speech is not None:
            slots, most = limits.rows + 1, max(limits.rows, MAX_ROWS, limits.tokens)
            cache = allocate_sources(spec, slots, most, self.options.dtype, self._device)
            attention = AttentionBesideSources(attention, cache)
            sources = SlotSources(loaded.speech, cache, loaded.slots)
        return StartingRunner(
            loaded.model,
            attention,
            transfer,
            loaded.slots,
            limits,
            by_length=spec.rope_length_mode is not None,
            logprobs_mode=self._config.model.logprobs_mode,
            max_logprobs=self._config.model.max_logprobs,
            updates=loaded.updates,
            states=loaded.states,
            stages=stages,
            synthetic=self._synthetic_acceptance(spec),
            device_tokens=tokens,
            in_flight=depth,
            pooler=self._pooler(loaded),
            generates=spec.pooler.generates,
            recurrent=recurrent,
            media=loaded.media,
            shifts_positions=spec.shifts_positions,
            sources=sources,
        )

    def _pooler(self, loaded: LoadedModel) -> Pooler | None:
        """Return what makes vectors and values of texts; None if nothing does, or a later pipeline stage."""
        spec, options = loaded.spec, self.options
        if not spec.pooler.tasks or not loaded.model.has_logits:
            return None
        is_dummy = self._config.load.load_format == "dummy"
        directory = None if is_dummy else Path(self._config.model.model)
        modules = VectorModules(spec.pooler.modules, directory, self._device)
        slots = self.limits.rows + 1
        return Pooler(spec.pooler, loaded.model, modules, spec.hidden, slots, spec.vocab_size, options)

    def attention(self, kv_cache: KVCache, spec: ModelSpec, kv_scales: Tensor | None) -> AttentionBackend:
        """Make the attention backend over a KV cache. `kv_scales` are the scales of a quantized one."""
        if spec.keeps_own_cache or not kv_cache.tensors:
            return RowsOnly(self._config.cache.block_size)
        kv, limits = kv_view(kv_cache, spec, kv_scales), self.limits
        rows = max(limits.rows, MAX_SHORT_TOKENS)  # a short step's tokens are rows of attention
        mixer, dtype = spec.attention, self.options.dtype
        if isinstance(mixer, LatentSpec):
            return latent_attention_backend(kv, mixer.rotated, mixer.heads, rows, limits.tokens, dtype)
        heads = [each.heads if isinstance(each, AttentionSpec) else mixer.heads for each in spec.mixers]
        return attention_backend(kv, heads, rows, limits.tokens, limits.length, dtype, bool(mixer.slopes))

    def check_fallback(self, spec: ModelSpec, model: Stage, factory: LayerFactory) -> None:
        """Raise a CheckpointError if a model of transformers' modules differs from the one with its own attention."""
        from quire.models.fallback.load_check import check, num_blocks  # imports transformers

        block_size = self._config.cache.block_size
        attention = self.attention(self.kv_cache(spec, num_blocks(spec, block_size)), spec, None)
        check(model, factory.layers, attention, spec, block_size, self._device)

    def _synthetic_acceptance(self, spec: ModelSpec) -> SyntheticAcceptance | None:
        """Return what replaces the model in accepting drafts, in benchmarks; None in normal use."""
        speculation = self._config.speculation.speculation
        if speculation is None or not speculation.synthetic_rates:
            return None
        return SyntheticAcceptance(speculation.synthetic_rates, spec.vocab_size, self._device)


def _dtype(config: Config) -> torch.dtype:
    if config.model.dtype not in DENSE:
        raise ConfigError(f"--dtype {config.model.dtype} has not been resolved to one of {', '.join(DENSE)}.")
    return DENSE[config.model.dtype]
