"""Which devices, how many and in which format serve a model: every combination, with what it reaches or why not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

from quire.compute.mesh import Mesh
from quire.errors import ConfigError, QuireError
from quire.foundation.config import Config
from quire.models.rank_spec import rank_share
from quire.models.spec import ModelSpec
from quire.planning import machine
from quire.planning.costmodel.cards import CARDS, card, word_of
from quire.planning.footprint import GIB
from quire.planning.memory_budget import KVDemand
from quire.tools.simulation.deployment import Deployment, FormatName, deploy, device_called, in_format, with_drafts
from quire.tools.simulation.load import find_model
from quire.tools.sizing.options import PlanOptions
from quire.tools.sizing.steady_state import SteadyState, Traffic, steady_state

BATCHES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Numbers of sequences at a time that are tried."""


@dataclass(frozen=True)
class HostPrefixes:
    """What the prefix cache keeps in host memory: how many tokens, and in how many milliseconds a prompt is loaded from
    there, or computed."""

    tokens: int
    load_ms: float
    compute_ms: float


@dataclass(frozen=True)
class Candidate:
    """A combination of devices and format.

    Attributes:
        device: Its word for --gpu.
        tp: How many of it.
        format: Of weights.
        deployment: None if the model does not fit.
        reached: By batch, ascending, as far as sequences fit.
        best: The state with the most tokens a second within the targets; None if there is none.
        reason: Why this state is the best, or why there is none.
        price: Of an hour of all devices; None if not known.
        host: What is kept in host memory; None without --kv-offloading-size, or if the model does not fit.
    """

    device: str
    tp: int
    format: FormatName
    deployment: Deployment | None
    reached: tuple[SteadyState, ...]
    best: SteadyState | None
    reason: str
    price: float | None
    host: HostPrefixes | None = None

    @property
    def cost(self) -> float | None:
        """Price of a million output tokens, prompts included, at the best batch."""
        if self.best is None or self.price is None:
            return None
        return self.price / 3600 / self.best.output_tokens_per_s * 1e6


def survey(options: PlanOptions, spec: ModelSpec, traffic: Traffic, prices: dict[str, float]) -> list[Candidate]:
    """All combinations, first those within the targets: by cost, or else by tokens a second for each device. Raises
    ConfigError if a device or format is not known."""
    found = [
        _candidate(options, spec, device, tp, form, traffic, prices)
        for device in devices(options)
        for tp in sizes(options, device)
        for form in formats(options, spec)
    ]
    return sorted(found, key=_order)


def _order(candidate: Candidate) -> tuple[bool, bool, float]:
    if candidate.best is None:
        return True, candidate.deployment is None, 0.0
    rate = candidate.best.output_tokens_per_s / candidate.tp
    return False, candidate.cost is None, -rate if candidate.cost is None else candidate.cost


def devices(options: PlanOptions) -> list[str]:
    """The devices that --gpu asks for, by their words there. Raises ConfigError if a device is not known."""
    asked = options.gpu or _this_machine()
    names = [*CARDS, "cpu"] if asked == "all" else [name.strip().lower() for name in asked.split(",")]
    for name in names:
        if name != "cpu":
            card(name)
    return names


def _this_machine() -> str:
    """The word of this machine's GPU, or of all devices if it is not in the table; without a GPU the processor's."""
    if (gpu := machine.this_machine().gpu) is None:
        return "cpu"
    return word_of(gpu.name, gpu.memory_bytes) or "all"


def sequences_that_fit(deployment: Deployment, length: int) -> int:
    """How many sequences of this length the KV cache holds at a time; of a model with states, at most as many as have
    one."""
    plan, most = deployment.plan, deployment.limits.rows
    blocks = KVDemand.of(deployment.config, deployment.spec).blocks_for_one_sequence(length)
    fits = plan.num_blocks // blocks if blocks else most
    return min(fits, most) if plan.num_states else fits


def deployed(options: PlanOptions, spec: ModelSpec, device: str, tp: int, length: int) -> Deployment:
    """Return the model on a device, with settings as asked. Raises the errors of `deploy`."""
    config = Config().with_values(
        max_model_len=options.max_model_len or min(length, spec.max_model_len),
        max_num_seqs=options.max_num_seqs,
        kv_cache_dtype=options.kv_cache_dtype,
        gpu_memory_utilization=options.gpu_memory_utilization,
        tensor_parallel_size=tp,
        speculative_config=options.speculative_config,
    )
    where = device_called(device)
    if options.speculative_config is not None:
        assert options.model is not None
        config = with_drafts(config, spec, find_model(options.model), where, needs_rates=False)
    return deploy(config, spec, where, tp)


def _candidate(
    options: PlanOptions, spec: ModelSpec, device: str, tp: int, form: FormatName, traffic: Traffic,
    prices: dict[str, float],
) -> Candidate:  # fmt: skip
    price = prices[device] * tp if device in prices else None
    try:
        deployment = deployed(options, in_format(spec, form), device, tp, traffic.longest)
    except QuireError as error:
        return Candidate(device, tp, form, None, (), None, error.message, price)
    most = min(sequences_that_fit(deployment, traffic.length), deployment.config.scheduler.max_num_seqs or 1)
    batches = sorted({*(batch for batch in BATCHES if batch < most), most})
    reached = tuple(_until_too_slow(options, deployment, batches, traffic))
    good = [state for state in reached if _is_good(options, state)]
    best = max(good, key=lambda state: state.output_tokens_per_s, default=None)
    reason, host = _reason(options, reached, best, most), _host_prefixes(options, deployment, traffic)
    return Candidate(device, tp, form, deployment, reached, best, reason, price, host)


def _host_prefixes(options: PlanOptions, deployment: Deployment, traffic: Traffic) -> HostPrefixes | None:
    plan, demand = deployment.plan, KVDemand.of(deployment.config, deployment.spec)
    if options.kv_offloading_size is None or not demand.groups:
        return None
    on_host = int(options.kv_offloading_size * GIB) // deployment.tp // demand.block_bytes
    cost, blocks = deployment.new_roofline(), demand.blocks_for_one_sequence(traffic.prompt)
    tokens = on_host * deployment.kv_tokens // plan.num_blocks
    return HostPrefixes(tokens, cost.swap_ms(blocks) / 2, cost.recompute_ms(traffic.prompt))


def _until_too_slow(
    options: PlanOptions, deployment: Deployment, batches: list[int], traffic: Traffic
) -> Iterator[SteadyState]:
    """The states of all batches, up to the first that is too slow: larger batches are slower for each request."""
    for batch in batches:
        state = steady_state(deployment, batch, traffic)
        yield state
        if not _is_good(options, state):
            return


def _is_good(options: PlanOptions, state: SteadyState) -> bool:
    ttft, tpot = options.target_ttft or float("inf"), options.target_tpot or float("inf")
    return state.ttft_ms <= ttft and state.tpot_ms <= tpot


def _reason(options: PlanOptions, reached: tuple[SteadyState, ...], best: SteadyState | None, most: int) -> str:
    """Why a candidate serves this many at a time, or cannot keep the targets."""
    slow = next((state for state in reached if not _is_good(options, state)), None)
    if slow is None:
        return f"memory or --max-num-seqs end at {most}" if reached and reached[-1] is best else "more bring no more"
    what, took, limit = "TPOT", slow.tpot_ms, options.target_tpot
    if limit is None or took <= limit:
        what, took, limit = "TTFT", slow.ttft_ms, options.target_ttft
    assert limit is not None
    return f"{what} {took:,.1f} ms with {slow.batch}, more than {limit:g}"


def sizes(options: PlanOptions, device: str) -> list[int]:
    """Numbers of devices; a processor is always one. Raises ConfigError if the option is no list of numbers."""
    try:
        numbers = [int(text) for text in options.tensor_parallel_sizes.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise ConfigError(
            f"--tensor-parallel-sizes takes numbers from 1 on, as 1,2,4; not {options.tensor_parallel_sizes}.",
            param="tensor_parallel_sizes",
        )
    return [1] if device == "cpu" else numbers


def formats(options: PlanOptions, spec: ModelSpec) -> list[FormatName]:
    """Formats of weights. Raises ConfigError if a format is not known."""
    known: tuple[FormatName, ...] = get_args(FormatName)
    asked = options.formats.split(",")
    if unknown := [name for name in asked if name not in known]:
        raise ConfigError(f"--formats knows {', '.join(known)}, not '{unknown[0]}'.", param="formats")
    return ["checkpoint"] if spec.quantization is not None else [name for name in known if name in asked]


LENGTHS = (2_048, 8_192, 32_768, 131_072)


@dataclass(frozen=True)
class MemoryRow:
    """A device's memory with a model in one format, in bytes of one device; 0 if the weights do not fit. `kv_cache` has
    states besides. `fits` has the
    sequences at a time by their length, for lengths up to the model's limit; 0 if none fits."""

    device: str
    tp: int
    format: FormatName
    weights: int
    activations: int
    kv_cache: int
    kv_bytes_per_token: int
    fits: dict[int, int]


def memory_row(options: PlanOptions, spec: ModelSpec, device: str, tp: int, form: FormatName) -> MemoryRow:
    """What fits on a device. Each length is planned for by itself, as `quire serve --max-model-len` would. Raises
    ConfigError if the model cannot be divided so."""
    spec, fits = in_format(spec, form), {}
    lengths = [length for length in LENGTHS if length < spec.max_model_len] + [spec.max_model_len]
    weights = activations = kv_cache = per_token = 0
    for length in lengths:
        try:
            found = deployed(options, spec, device, tp, length)
        except QuireError:
            fits[length] = 0
            continue
        fits[length] = sequences_that_fit(found, length)
        if not weights:
            parts = found.plan.footprint
            weights, activations, kv_cache = parts.weights, parts.activations, parts.kv_cache + parts.states
            per_token = rank_share(spec, Mesh(tp=tp)).kv_bytes_per_token(found.config.kv_dtype)
    return MemoryRow(device, tp, form, weights, activations, kv_cache, per_token, fits)
