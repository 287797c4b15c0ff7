"""What a model takes of a device's memory while it runs: arithmetic from its spec, without torch.

Weights and the KV cache are exact. Activations are the buffers that layers hold at once in the largest step:
whoever changes these changes the figures here. `tests/planning/test_kv_cache_plan.py` measures both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.compute.attention.metadata import gathered_tokens
from quire.foundation.config import Config
from quire.models.spec import DTYPE_BYTES, ExpertsSpec, ModelSpec
from quire.planning.step_limits import StepLimits

GIB = 2**30
_MIB = 2**20
CPU_RUNTIME_BYTES = 20 * 2**20
"""oneDNN's compiled products, their scratch space, and what the allocator keeps between steps, for any model."""
MAPPED_BYTES = 32 * 2**20
"""glibc maps a buffer of at least this size by itself and unmaps it when it is freed; it keeps smaller ones."""
CPU_LOGIT_BYTES = 16
"""Bytes for each sampled logit beside the model's own, for scores in fp32: our sampler takes one row at a time."""
TORCH_LOGIT_BYTES = 24
"""Bytes for each sampled logit beside the model's own where torch samples all rows at once: scores and weights in fp32,
and weights and their sums in fp64."""
GATED_PANELS = 128
"""Outputs in whole multiples of which a product is gated as it is written (`compute/kernels/cpu/linear.py`)."""
GPU_RUNTIME_BYTES = 2**30
"""A GPU's driver and libraries, CUDA graphs and staging buffers."""
GPU_LOGIT_BYTES = 8
"""Bytes for each sampled logit on a GPU, beside the model's own."""
INDEX_BYTES = 8
"""Bytes for each entry of a block table, and for each expert of a token."""
FP32_BYTES = 4
ROUTE_BYTES = 16
"""Bytes for each token and expert where torch routes: logits in fp32, and their softmax with its exponentials."""
PAIR_BYTES = 40
"""Bytes for each token and expert that torch routes it to: the expert's id, its place in the order, and sorting."""
COUNT_BYTES = 4
"""Bytes for each slot and token of the vocabulary: the counts of penalties. A CPU takes a page on the first write."""
_RANKS = 16
"""A slot's ranks are rounded up to a multiple of this (`models/lora/updates.py`)."""


def format_bytes(count: int) -> str:
    """GiB, or MiB where it is less than one GiB."""
    if count >= GIB:
        return f"{count / GIB:.2f} GiB"
    return f"{count / _MIB:,.1f} MiB"


@dataclass(frozen=True)
class Footprint:
    """Bytes that an engine takes.

    Attributes:
        activations: What the largest step holds, with the buffers that steps share.
        kv_cache: All blocks, including the dummy.
        swap_space: Host memory. A CPU takes its pages as they are written, a GPU all of them after the start.
    """

    weights: int
    activations: int
    kv_cache: int
    swap_space: int = 0

    @property
    def total(self) -> int:
        """The sum of all but the swap space."""
        return self.weights + self.activations + self.kv_cache


def cpu_activation_bytes(
    spec: ModelSpec, dtype: str, block_size: int, limits: StepLimits, own_kernels: bool = True
) -> int:
    """Bytes that the largest step holds at once on a CPU, beside weights and KV cache.

    The hidden states, their norm and the next residual live through a layer. Beside them come the buffers of attention,
    then those of the MLP. Logits come after the last layer, but the allocator keeps what the layers freed; the MLP's
    buffers come beside the small ones of attention for the same reason.

    Our own kernels read the KV cache in place and gate a product as they write it. Where they cannot be compiled
    (not `own_kernels`), torch takes more: the ungated product, and a row's context and mask.
    """
    width = DTYPE_BYTES[dtype]
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    stream = limits.tokens * 3 * spec.hidden * width
    changed = (q + kv) * (1 + spec.family.qk_norm)  # normed, then rotated
    attention = [limits.tokens * each * width for each in (q + 2 * kv, changed, q, q)]  # projected, changed, q, out
    is_fused = own_kernels and 2 * spec.intermediate % GATED_PANELS == 0
    if not own_kernels:
        attention += torch_attention_buffers(spec, width, limits)
    mlp = [limits.tokens * each * width for each in (0 if is_fused else 2 * spec.intermediate, spec.intermediate)]
    if spec.experts is not None:
        buffers = expert_buffers if own_kernels else torch_expert_buffers
        own = buffers(spec.experts, spec.hidden, width, limits.tokens * spec.experts.engines)
        if spec.experts.engines > 1:
            own += gathered_row_buffers(spec.experts, spec.hidden, width, limits.tokens)
        mlp = own if len(spec.experts.layers) == spec.layers else max(mlp, own, key=sum)
    logit = width + (CPU_LOGIT_BYTES if own_kernels else TORCH_LOGIT_BYTES)
    logits = min(limits.rows, limits.tokens) * (spec.hidden * width + spec.vocab_size * logit)
    tables = len(spec.kv_groups()) * (limits.rows + 1) * -(-limits.length // block_size) * INDEX_BYTES
    counts = (limits.rows + 1) * spec.vocab_size * COUNT_BYTES
    layer = max(sum(attention), max(_small(attention), _small(mlp)) + sum(mlp) - _small(mlp))
    return CPU_RUNTIME_BYTES + tables + counts + stream + layer + logits


def expert_buffers(experts: ExpertsSpec, hidden: int, width: int, tokens: int) -> list[int]:
    """The bytes of each buffer of experts on a CPU: the kernel's own (`kernels/cpu/experts.py`), and the routing.
    Experts run one after the other, and at worst all tokens go to the same one; `width` is the bytes of an element."""
    ungated = 0 if 2 * experts.width % GATED_PANELS == 0 else 2 * experts.width
    own = experts.chosen * INDEX_BYTES + hidden * FP32_BYTES + (2 * hidden + experts.width + ungated) * width
    local = experts.chosen * INDEX_BYTES if experts.of_others else 0
    routing = experts.count * width + experts.chosen * (INDEX_BYTES + width) + local
    return [tokens * own, tokens * routing]


def gathered_row_buffers(experts: ExpertsSpec, hidden: int, width: int, tokens: int) -> list[int]:
    """The bytes of the rows gathered from all engines, and of an engine's own sums; layers/divided.py makes them."""
    row = hidden * width + experts.chosen * (2 * INDEX_BYTES + width)
    return [tokens * experts.engines * row, tokens * hidden * width]


def torch_expert_buffers(experts: ExpertsSpec, hidden: int, width: int, tokens: int) -> list[int]:
    """The bytes of each buffer of experts where torch computes: an expert's products, its output, the routing."""
    routing = experts.count * ROUTE_BYTES + experts.chosen * PAIR_BYTES
    return [tokens * each for each in (2 * experts.width * width, experts.width * width, hidden * width, routing)]


def torch_attention_buffers(spec: ModelSpec, width: int, limits: StepLimits) -> list[int]:
    """The bytes of each buffer of attention for its longest row where torch computes it: the gathered keys and values,
    and the mask, with its opposite and as numbers. With a cap, scores and their weights in fp32 as well."""
    context, tokens = limits.length, min(limits.tokens, limits.length)
    scores = 2 * spec.heads * tokens * context * FP32_BYTES if spec.attention_cap is not None else 0
    return [2 * context * spec.kv_heads * spec.head_dim * width, tokens * context * (2 + width), scores]


def _small(buffers: Sequence[int]) -> int:
    """The bytes of the buffers that the allocator keeps when they are freed."""
    return sum(each for each in buffers if each < MAPPED_BYTES)


def gpu_activation_bytes(spec: ModelSpec, dtype: str, block_size: int, limits: StepLimits) -> int:
    """An estimate of the bytes that the largest step and the driver hold on a GPU, beside weights and KV cache. The
    worker measures them before it makes the KV cache. Attention reads the cache in place, except that long rows gather
    their context for dense prefill."""
    width = DTYPE_BYTES[dtype]
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    stream = limits.tokens * 3 * spec.hidden * width
    attention = limits.tokens * ((q + 2 * kv) + 2 * q) * width
    chosen = spec.experts.chosen * (3 * spec.experts.width + spec.hidden) if spec.experts else 0
    mlp = limits.tokens * max(3 * spec.intermediate, chosen) * width
    logits = min(limits.sampled, limits.tokens) * spec.vocab_size * (width + GPU_LOGIT_BYTES)
    counts = (limits.rows + 1) * spec.vocab_size * COUNT_BYTES
    tables = len(spec.kv_groups()) * (limits.rows + 1) * -(-limits.length // block_size) * INDEX_BYTES
    gathered = 2 * kv * width * gathered_tokens(2 * kv * width, limits.tokens, limits.length)
    return GPU_RUNTIME_BYTES + counts + tables + gathered + stream + max(attention, mlp) + logits


def adapter_bytes(config: Config, spec: ModelSpec) -> int:
    """Bytes of all adapter slots of the device; on a CPU, of the adapters kept on the host as well."""
    lora = config.lora
    if not lora.enable_lora:
        return 0
    on_cpu = config.device.device == "cpu"
    number = lora.max_loras + (lora.host_adapters if on_cpu else 0)
    rank = -(-lora.max_lora_rank // _RANKS) * _RANKS
    return number * _elements(spec, rank) * DTYPE_BYTES[config.model.dtype]


def _elements(spec: ModelSpec, rank: int) -> int:
    """Elements of one adapter, or a little more: as if every MLP had a gate, and no projections were stored as one."""
    q, kv, hidden = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.hidden
    low_rank, outputs = spec.layers * (3 * hidden + q + 2 * kv + q + hidden), spec.layers * (q + 2 * kv + hidden)
    experts = spec.experts
    layers_of_experts = 0 if experts is None else len(experts.layers)
    mlps = [(spec.layers - layers_of_experts, spec.intermediate)]
    if experts is not None:
        low_rank, outputs = (each + layers_of_experts * experts.count for each in (low_rank, outputs))  # of routers
        low_rank += layers_of_experts * hidden
        mlps.append((layers_of_experts * experts.own, experts.width))
    for number, width in mlps:
        low_rank += number * (2 * hidden + 2 * width + width + hidden)
        outputs += number * (2 * width + hidden)
    return rank * low_rank + -(-2 * outputs // _RANKS) * _RANKS
