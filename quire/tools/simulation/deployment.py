"""A model on devices that need not be present: how memory is divided, and how long steps take.

Uses the arithmetic with which the engine itself starts (`planning/`, `planning/costmodel/`), for a device from a table.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from quire.compute.mesh import Mesh
from quire.errors import ConfigError
from quire.foundation.config import Config
from quire.foundation.messages.workers import DeviceLimits
from quire.models.quantization.formats import Fp8Format, GroupFormat, Int8Format, Quantization, Rule
from quire.models.quantization.parsers import AT_LOAD
from quire.models.rank_spec import check_tensor_parallel_size, rank_share
from quire.models.spec import ModelSpec
from quire.planning.auto_config import batch_limits, resolve_dtype
from quire.planning.costmodel.cards import CPU_SHARES, GPU_SHARES, Card, card
from quire.planning.costmodel.hardware import Hardware, cpu
from quire.planning.costmodel.measured_step_times import MeasuredStepTimes
from quire.planning.costmodel.roofline import Roofline
from quire.planning.costmodel.step_time import Shares, StepTime
from quire.planning.draft_model import drafter_spec, with_draft_model
from quire.planning.kv_cache_plan import KVCachePlan
from quire.planning.machine import Gpu, Machine, this_machine
from quire.planning.memory_budget import KVDemand
from quire.planning.rank_checks import plan_for_all
from quire.planning.state_memory import most_sequences
from quire.planning.step_limits import StepLimits, least_step_tokens
from quire.runtime.worker.graph_shapes import GraphShapes
from quire.tools.simulation.engine import SimulatedDevice

FormatName = Literal["checkpoint", "fp8", "w4a16"]
HOST_BYTES = 128 * 2**30
"""Memory of the host of a GPU, for the swap space."""
REDUCE_MS = {True: 0.010, False: 0.030}
"""Least duration of an all-reduce, by whether there is NVLink: published latencies of NCCL, not measured here."""
LINK_SHARE = 0.75
"""Share of a link's bandwidth that an all-reduce reaches."""


@dataclass(frozen=True)
class Processor:
    """This machine's processor as a device, of which this many cores may be used."""

    cores: int
    machine: Machine

    @property
    def name(self) -> str:
        return f"CPU, {self.cores} cores"


@dataclass(frozen=True)
class Deployment:
    """A model on a device, or divided over several devices of one kind.

    Attributes:
        config: Resolved settings.
        spec: The whole model, in its format there.
        tp: How many devices divide it.
        shares: The shares of the device's limits that steps reach, see StepTime.
        measured: What steps took on this machine, used in place of `shares`; None if nothing was measured.
    """

    config: Config
    spec: ModelSpec
    device: Card | Processor
    tp: int
    plan: KVCachePlan
    shares: Shares
    measured: MeasuredStepTimes | None = None

    @property
    def limits(self) -> StepLimits:
        return StepLimits.of(self.config)

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds, in sequences of full length."""
        return KVDemand.of(self.config, self.spec).cached_tokens(self.plan.num_blocks, self.plan.max_model_len)

    @property
    def hardware(self) -> Hardware:
        found = self.device.hardware if isinstance(self.device, Card) else cpu(self.device.cores)
        return found.at(self.config.model.dtype)

    @cached_property
    def step(self) -> StepTime:
        speedup, extra = 1.0, (0.0, 0.0)
        if isinstance(self.device, Card):
            form = self.spec.quantization.rules[0].format if self.spec.quantization else None
            speedup = self.device.fp8_speedup if isinstance(form, Fp8Format | Int8Format) else 1.0
            extra = _all_reduces(self.spec, self.tp, self.device)
        share = rank_share(self.spec, Mesh(0, self.tp, 1))
        dtype = self.config.model.dtype
        return StepTime(share, dtype, self.hardware, self.config.kv_dtype, self.shares, speedup, extra)

    def prompt_ms(self, tokens: int, cached: int = 0) -> float:
        """Milliseconds of the steps of a lone prompt, after this many cached tokens."""
        most, total = self.limits.tokens, 0.0
        while tokens:
            chunk = min(most, tokens)
            total += self.step.prompt(chunk, cached)
            tokens, cached = tokens - chunk, cached + chunk
        return total

    def new_roofline(self) -> Roofline:
        """The scheduler's cost model as a new engine has it, before it has learned from any step."""
        share = rank_share(self.spec, Mesh(0, self.tp, 1))
        dtype, block_size = self.config.model.dtype, self.config.cache.block_size
        return Roofline(share, dtype, self.hardware, block_size, self.config.kv_dtype)

    def simulated(self, *, server: bool) -> SimulatedDevice:
        """A device for one simulation: with a server between it and clients, or in its client's process."""
        sizes: list[tuple[int, int]] = []
        if isinstance(self.device, Card):
            limits = self.limits
            most = self.config.device.max_cudagraph_capture_size or 0
            sizes = GraphShapes(most, limits.rows, limits.tokens, limits.length).mixed_sizes(limits.tokens)
        blocks, vocab = self.plan.blocks, self.spec.vocab_size
        limits_of_device = DeviceLimits(blocks.device, vocab, blocks.host, {}, sizes, num_states=blocks.states)
        if self.measured is not None:
            step_ms, request_ms = self.measured.step_time(server=server), self.measured.request_ms(server=server)
            arrival_ms = self.measured.arrival_ms(server=server)
            return SimulatedDevice(
                limits_of_device, step_ms, self.new_roofline(), request_ms, arrival_ms, self.draft_step
            )
        request_ms = self.shares.request_ms + server * self.shares.server_ms
        return SimulatedDevice(limits_of_device, self.step, self.new_roofline(), request_ms, draft_ms=self.draft_step)

    @property
    def draft_step(self) -> StepTime | None:
        """The time of a pass of the draft model or head; None if nothing is computed for drafts."""
        draft = drafter_spec(self.config)
        if draft is None:
            return None
        whole = replace(draft, head=None)  # a pass of a head reads the table of logits, whoever owns it
        share, dtype = rank_share(whole, Mesh(0, self.tp, 1)), self.config.model.dtype
        return StepTime(share, dtype, self.hardware, self.config.kv_dtype, self.shares)


def device_called(name: str, cores: int | None = None) -> Card | Processor:
    """The device that --gpu names; `cores` of this processor, or all. Raises ConfigError if the device is not known."""
    if name == "cpu":
        return Processor(cores or len(os.sched_getaffinity(0)), this_machine())
    return card(name)


def with_drafts(
    config: Config, spec: ModelSpec, directory: Path, device: Card | Processor, *, needs_rates: bool = True
) -> Config:
    """Return settings in which the draft model or head that they ask for is found, if they do. Nothing reads its
    weights.

    Raises:
        ConfigError: It does not suit the model or the device, or `needs_rates` and nothing says how often drafts are
            right.
    """
    speculation = config.speculation.speculation
    if speculation is None:
        return config
    config.speculation.check_device("cuda" if isinstance(device, Card) else "cpu", config.parallel.tensor_parallel_size)
    if needs_rates and not speculation.synthetic_rates:
        raise ConfigError(
            '--speculative-config: say how often drafts are right, by "rejection_sample_method": "synthetic" and '
            '"synthetic_acceptance_length".',
            param="speculative_config",
        )
    return with_draft_model(config.with_values(load_format="dummy"), spec, directory)


def deploy(config: Config, spec: ModelSpec, device: Card | Processor, tp: int = 1) -> Deployment:
    """Resolve settings as asked for a model in its wanted format on a device, and divide its memory. On a GPU, the
    dtype `auto` is never float32. Raises ConfigError if the model cannot be divided so or a setting is wrong, and
    MemoryBudgetError, which says by how much, if the model does not fit."""
    check_tensor_parallel_size(spec, tp)
    if isinstance(device, Card):
        gpu = Gpu(device.name, device.capability, device.memory_bytes, device.memory_bytes, tp)
        machine = Machine(HOST_BYTES, fast_bfloat16=True, gpu=gpu)
        stored = replace(spec, dtype="bfloat16") if spec.dtype == "float32" else spec
    elif tp > 1:
        raise ConfigError("A processor is planned for as one device: leave --tensor-parallel-size out.", param="tp")
    else:
        gpu, machine, stored = None, device.machine, spec
    dtype, _ = resolve_dtype(config.model.dtype, stored, machine, on_gpu=gpu is not None)
    memory, drafts = machine.memory_bytes if gpu is None else gpu.free_bytes, config.speculation.speculation is not None
    most_seqs = most_sequences(spec, dtype, tp * memory, drafts=drafts)
    least_tokens = least_step_tokens(config, spec)
    scheduler, _ = batch_limits(config.scheduler, gpu, least_tokens=least_tokens, most_seqs=most_seqs)
    config = replace(config, scheduler=scheduler).with_values(
        dtype=dtype, device="cpu" if gpu is None else "cuda", max_cudagraph_capture_size=0 if gpu is None else 512
    )
    plan = plan_for_all(config, spec, machine, Mesh(0, tp, 1))
    config = config.with_values(max_model_len=plan.max_model_len)
    return Deployment(config, spec, device, tp, plan, CPU_SHARES if gpu is None else GPU_SHARES)


def in_format(spec: ModelSpec, name: FormatName) -> ModelSpec:
    """A dense model's spec with its weights in another format; a quantized model stays as it is."""
    if name == "checkpoint" or spec.quantization is not None:
        return spec
    quantization = {
        "fp8": AT_LOAD["fp8"],
        "w4a16": Quantization("gptq", (Rule(("Linear",), GroupFormat("gptq", 4, 128, True)),)),
    }[name]
    return replace(spec, quantization=quantization, held=None)


def _all_reduces(spec: ModelSpec, tp: int, card: Card) -> tuple[float, float]:
    """Milliseconds of the two sums of each layer, over all layers: for a step, and for each token of it."""
    if tp == 1:
        return 0.0, 0.0
    sums, bytes_each = 2 * len(spec.layers), spec.hidden * 2 * 2 * (tp - 1) / tp
    return sums * REDUCE_MS[card.nvlink], 1e3 * sums * bytes_each / (card.link / 2 * LINK_SHARE)
