"""What a model takes of a device's memory while it runs: arithmetic from its spec, without torch.

Weights and the KV cache are exact. Activations are the buffers that layers hold at once in the largest step:
whoever changes these changes the figures here. `tests/planning/test_kv_cache_plan.py` measures both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.compute.attention.limits import gathered_tokens
from quire.foundation.config import Config
from quire.models.layer_spec import AttentionSpec, LayerSpec, Mixer, MixtureSpec, MlpSpec
from quire.models.spec import DTYPE_BYTES, ModelSpec
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
        states: All states of sequences, including the dummy; 0 in models without states.
        sources: Keys and values of an encoder's states for all sequences; 0 in models without an encoder.
    """

    weights: int
    activations: int
    kv_cache: int
    swap_space: int = 0
    states: int = 0
    sources: int = 0

    @property
    def total(self) -> int:
        """The sum of all but the swap space."""
        return self.weights + self.activations + self.kv_cache + self.states + self.sources


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
    stream = limits.tokens * 3 * spec.hidden * width
    layer = max(_cpu_layer_bytes(each, width, limits, own_kernels) for each in {layer.kind for layer in spec.layers})
    logit = width + (CPU_LOGIT_BYTES if own_kernels else TORCH_LOGIT_BYTES)
    logits = min(limits.rows, limits.tokens) * (spec.hidden * width + spec.vocab_size * logit)
    tables = len(spec.kv_groups()) * (limits.rows + 1) * -(-limits.length // block_size) * INDEX_BYTES
    counts = (limits.rows + 1) * spec.vocab_size * COUNT_BYTES
    return CPU_RUNTIME_BYTES + tables + counts + stream + layer + logits


def _cpu_layer_bytes(layer: LayerSpec, width: int, limits: StepLimits, own_kernels: bool) -> int:
    """Bytes of the buffers of a layer's attention, or of its MLP beside what the allocator keeps of attention's."""
    own, tokens = layer.mixer, limits.tokens
    attention = [tokens * each * width for each in own.buffers]
    if not own_kernels:
        attention += torch_attention_buffers(own, width, limits)
    mlp = _mlp_buffers(layer.mlp, width, tokens, own_kernels)
    return max(sum(attention), max(_small(attention), _small(mlp)) + sum(mlp) - _small(mlp))


def _mlp_buffers(mlp: MlpSpec | MixtureSpec, width: int, tokens: int, own_kernels: bool) -> list[int]:
    if isinstance(mlp, MlpSpec):
        is_fused = own_kernels and 2 * mlp.width % GATED_PANELS == 0
        return [tokens * each * width for each in (0 if is_fused else 2 * mlp.width, mlp.width)]
    buffers = (expert_buffers if own_kernels else torch_expert_buffers)(mlp, width, tokens * mlp.engines)
    if mlp.engines > 1:
        buffers += gathered_row_buffers(mlp, width, tokens)
    if mlp.shared is None:
        return buffers
    sums = [tokens * mlp.hidden * width] * 2  # of experts, and of the shared one, whose buffers come behind theirs
    return max(buffers, sums + _mlp_buffers(mlp.shared.mlp, width, tokens, own_kernels), key=sum)


def expert_buffers(experts: MixtureSpec, width: int, tokens: int) -> list[int]:
    """The bytes of each buffer of experts on a CPU: the kernel's own (`kernels/cpu/experts.py`), and the routing.
    Experts run one after the other, and at worst all tokens go to the same one; `width` is the bytes of an element."""
    is_fused = 2 * experts.width % GATED_PANELS == 0 and experts.activation.products == 2
    ungated = 0 if is_fused else 2 * experts.width
    hidden = experts.expert_inputs
    own = experts.chosen * INDEX_BYTES + hidden * FP32_BYTES + (2 * hidden + experts.width + ungated) * width
    own += 2 * experts.latent * width
    local = experts.chosen * INDEX_BYTES if experts.of_others else 0
    routing = experts.count * width + experts.chosen * (INDEX_BYTES + width) + local
    return [tokens * own, tokens * routing]


def gathered_row_buffers(experts: MixtureSpec, width: int, tokens: int) -> list[int]:
    """The bytes of the rows gathered from all engines, and of an engine's own sums; layers/divided.py makes them."""
    row = experts.hidden * width + experts.chosen * (2 * INDEX_BYTES + width)
    return [tokens * experts.engines * row, tokens * experts.hidden * width]


def torch_expert_buffers(experts: MixtureSpec, width: int, tokens: int) -> list[int]:
    """The bytes of each buffer of experts where torch computes: an expert's products, its output, the routing."""
    routing = experts.count * ROUTE_BYTES + experts.chosen * PAIR_BYTES
    return [
        tokens * each for each in (2 * experts.width * width, experts.width * width, experts.hidden * width, routing)
    ]


def torch_attention_buffers(attention: Mixer, width: int, limits: StepLimits) -> list[int]:
    """The bytes of each buffer of attention for its longest row where torch computes it: the gathered keys and values,
    and the mask, with its opposite and as numbers. With a cap, scores and their weights in fp32 as well."""
    context, tokens = limits.length, min(limits.tokens, limits.length)
    scores = 2 * attention.heads * tokens * context * FP32_BYTES if attention.cap is not None else 0
    return [context * attention.read_width * width, tokens * context * (2 + width), scores]


def _small(buffers: Sequence[int]) -> int:
    """The bytes of the buffers that the allocator keeps when they are freed."""
    return sum(each for each in buffers if each < MAPPED_BYTES)


def gpu_activation_bytes(spec: ModelSpec, dtype: str, block_size: int, limits: StepLimits) -> int:
    """An estimate of the bytes that the largest step and the driver hold on a GPU, beside weights and KV cache. The
    worker measures them before it makes the KV cache. Attention reads the cache in place, except that long rows gather
    their context for dense prefill."""
    width = DTYPE_BYTES[dtype]
    stream = limits.tokens * 3 * spec.hidden * width
    layer = limits.tokens * width * max(map(_gpu_layer_elements, spec.layers))
    logits = min(limits.sampled, limits.tokens) * spec.vocab_size * (width + GPU_LOGIT_BYTES)
    counts = (limits.rows + 1) * spec.vocab_size * COUNT_BYTES
    tables = len(spec.kv_groups()) * (limits.rows + 1) * -(-limits.length // block_size) * INDEX_BYTES
    of_heads = [layer.mixer.read_width for layer in spec.layers if isinstance(layer.mixer, AttentionSpec)]
    cached = max(of_heads, default=0) * width
    gathered = 0 if not cached else cached * gathered_tokens(cached, limits.tokens, limits.length)
    return GPU_RUNTIME_BYTES + counts + tables + gathered + stream + layer + logits


def _gpu_layer_elements(layer: LayerSpec) -> int:
    """Elements that a token takes in a layer's attention, or in its MLP, whichever takes more."""
    own, mlp = layer.mixer, layer.mlp
    wide = 3 * mlp.width if isinstance(mlp, MlpSpec) else mlp.chosen * (3 * mlp.width + mlp.hidden)
    if isinstance(mlp, MixtureSpec) and mlp.shared is not None:
        wide = max(wide, 3 * mlp.shared.mlp.width + mlp.hidden)
    return max(own.gpu_elements, wide)


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
    widths = [_adapted_widths(layer) for layer in spec.layers]
    outputs = sum(each for _, each in widths)
    return rank * sum(each for each, _ in widths) + -(-2 * outputs // _RANKS) * _RANKS


def _adapted_widths(layer: LayerSpec) -> tuple[int, int]:
    """Inputs and outputs of all projections of a layer together, and the outputs alone."""
    own, mlp = layer.mixer, layer.mlp
    inputs, outputs = map(sum, zip(*own.adapted_projections, strict=True))
    number = 1 if isinstance(mlp, MlpSpec) else mlp.own
    outputs += number * (2 * mlp.width + mlp.hidden)
    inputs += number * (2 * mlp.hidden + mlp.width)
    if isinstance(mlp, MixtureSpec):  # the router
        outputs, inputs = outputs + mlp.count, inputs + mlp.hidden
        if (shared := mlp.shared) is not None:  # with its gate
            outputs += 2 * shared.mlp.width + mlp.hidden + shared.gated
            inputs += 2 * mlp.hidden + shared.mlp.width + shared.gated * mlp.hidden
    return inputs + outputs, outputs
