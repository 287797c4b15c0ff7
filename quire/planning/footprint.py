"""What a model takes of a device's memory while it runs: plain arithmetic from its spec, no torch.

Weights and keys and values are exact. Activations are what the largest step holds at once, by the layers' own buffers;
whoever changes these changes the figures here, and `tests/planning/test_memory_plan.py` measures both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.attention.gathered_kv import gathered_tokens
from quire.models.spec import DTYPE_BYTES, ExpertsSpec, ModelSpec
from quire.planning.step_limits import StepLimits

RUNTIME_BYTES = 20 * 2**20
"""Compiled products and their scratch space, and what the allocator holds between steps, whatever the model."""
MAPPED_BYTES = 32 * 2**20
"""glibc maps a buffer of this size or more apart, and gives it back when it is freed; it keeps smaller ones."""
LOGIT_BYTES = 24
"""Of each logit drawn from, beside the model's own: scores and weights in fp32, these and their sums in fp64."""
MASK_BYTES = 1
"""Of each pair of positions in a mask, beside the mask itself."""
GPU_RUNTIME_BYTES = 2**30
"""What a GPU's driver and libraries take, graphs and staging buffers included."""
GPU_LOGIT_BYTES = 8
"""Of each logit drawn from on a GPU, beside the model's own."""
INDEX_BYTES = 8
"""Of an entry of a block table."""
COUNT_BYTES = 4
"""Of a slot and token of the vocabulary, for penalties: held by all slots, on a CPU taken up as they are asked for."""
ROUTE_BYTES = 16
"""Of each token and expert: the router's logits in fp32, and their softmax beside its exponentials."""
PAIR_BYTES = 40
"""Of each token and expert that it goes to: its number, its place in their order, and what sorting takes."""


@dataclass(frozen=True)
class Footprint:
    """Bytes that an engine takes.

    Attributes:
        weights: Of the model.
        activations: Of the largest step, and of the buffers that steps share.
        kv_cache: Keys and values, the dummy block included.
        swap_space: On the host, taken up as it is used.
    """

    weights: int
    activations: int
    kv_cache: int
    swap_space: int = 0

    @property
    def total(self) -> int:
        """All but the swap space."""
        return self.weights + self.activations + self.kv_cache


def activation_bytes(spec: ModelSpec, dtype: str, block_size: int, limits: StepLimits, blocks: int) -> int:
    """What the largest step holds at once beside the weights and the cache, in which it may see all `blocks`.

    The stream, its norm and its next addend live through a layer; beside them stand the buffers of attention, then
    those of the MLP. The logits come after the last layer, but the allocator does not give back what the layers freed:
    for the MLP, it still holds the small buffers of attention.
    """
    width = DTYPE_BYTES[dtype]
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    stream = limits.tokens * 3 * spec.hidden * width
    changed = (q + kv) * (1 + spec.family.qk_norm)  # normed, then rotated
    attention = [limits.tokens * each * width for each in (q + 2 * kv, changed, q, q)]  # projected, changed, q, out
    mlp = [limits.tokens * each * width for each in (2 * spec.intermediate, spec.intermediate)]
    if spec.experts is not None:
        own = expert_buffers(spec.experts, spec.hidden, width, limits.tokens)
        mlp = own if len(spec.experts.layers) == spec.layers else max(mlp, own, key=sum)
    masks = limits.tokens * limits.length * (width + MASK_BYTES)
    logits = min(limits.rows, limits.tokens) * (spec.hidden * width + spec.vocab_size * (width + LOGIT_BYTES))
    tables = len(spec.kv_groups()) * (limits.rows + 1) * -(-limits.length // block_size) * INDEX_BYTES
    counts = (limits.rows + 1) * spec.vocab_size * COUNT_BYTES
    layers = max(len(group.layers) for group in spec.kv_groups())
    gathered = blocks * spec.kv_block_bytes(dtype, block_size) // layers  # keys and values, layer by layer
    layer = max(sum(attention) + gathered, max(_small(attention), _small(mlp)) + sum(mlp) - _small(mlp))
    return RUNTIME_BYTES + tables + counts + stream + masks + layer + logits


def expert_buffers(experts: ExpertsSpec, hidden: int, width: int, tokens: int) -> list[int]:
    """Bytes of what a mixture of experts holds at once on a CPU, where experts compute one after the other: at worst
    all tokens go to the same one. Its products, its output, and the routing.

    Args:
        width: Bytes an element.
    """
    routing = experts.count * ROUTE_BYTES + experts.chosen * PAIR_BYTES
    return [tokens * each for each in (2 * experts.width * width, experts.width * width, hidden * width, routing)]


def _small(buffers: Sequence[int]) -> int:
    """Bytes of those that the allocator keeps when they are freed."""
    return sum(each for each in buffers if each < MAPPED_BYTES)


def gpu_activation_bytes(spec: ModelSpec, dtype: str, block_size: int, limits: StepLimits) -> int:
    """The same on a GPU, where attention reads the cache in place and the driver holds memory of its own: an estimate,
    to be measured before the KV cache is made.
    """
    width = DTYPE_BYTES[dtype]
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    stream = limits.tokens * 3 * spec.hidden * width
    attention = limits.tokens * ((q + 2 * kv) + 2 * q) * width
    chosen = spec.experts.chosen * (3 * spec.experts.width + spec.hidden) if spec.experts else 0
    mlp = limits.tokens * max(3 * spec.intermediate, chosen) * width
    logits = min(limits.rows, limits.tokens) * spec.vocab_size * (width + GPU_LOGIT_BYTES)
    counts = (limits.rows + 1) * spec.vocab_size * COUNT_BYTES
    tables = len(spec.kv_groups()) * (limits.rows + 1) * -(-limits.length // block_size) * INDEX_BYTES
    gathered = 2 * kv * width * gathered_tokens(2 * kv * width, limits.tokens, limits.length)
    return GPU_RUNTIME_BYTES + counts + tables + gathered + stream + max(attention, mlp) + logits
