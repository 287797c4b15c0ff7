"""The seam between attention layers and whatever computes attention, and the KV cache as it sees it.

Knows nothing about models, requests or plans. A backend may serve long rows in one way and short ones in another; there
are no phases.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor

from quire.compute.attention.metadata import AttentionMetadata, IntArray, PaddedLimits
from quire.compute.kernels.reference.lora import RowUpdate


@dataclass(frozen=True)
class AttentionLayer:
    """What is a layer's own in attention.

    Attributes:
        number: Among the layers that this rank computes.
        scale: What the products of queries and keys are multiplied with.
        cap: A bound c of the scores: c · tanh(score / c), before the softmax.
    """

    number: int
    scale: float
    cap: float | None = None


class QKNormRope(NamedTuple):
    """What is done to queries and keys before attention: an RMS norm of each head, then RoPE; either may be missing.
    Before both, rows of adapters get what is still to be added to them. One is made for each layer of each step, so it
    is a tuple.

    Attributes:
        norm: [heads + kv_heads, head_dim], the norm's weight.
        eps: Added to the mean square.
        cos, sin: [tokens, width / 2], of each token's position.
        update: Of all that was projected; None: nothing is to be added.
    """

    norm: Tensor | None = None
    eps: float = 0.0
    cos: Tensor | None = None
    sin: Tensor | None = None
    update: RowUpdate | None = None


@dataclass(frozen=True)
class KVView:
    """The paged KV cache.

    Attributes:
        keys, values: By layer, [blocks, block_size, kv_heads, head_dim]. Block 0 is the dummy: it belongs to nobody.
            Layers of different groups share tensors: a block belongs to one group at a time.
        groups: By layer, the KV group whose tables it uses.
        windows: By KV group, how many tokens a token sees, itself included; None: all before it. Table entries that
            no token sees any more name blocks of others, or nothing.
        block_size: Tokens a block.
        scales: By layer, [2, kv_heads] fp32: what stored keys and values are multiplied with. None: they are stored as
            they are, in the model's dtype.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    groups: tuple[int, ...]
    windows: tuple[int | None, ...]
    block_size: int
    scales: tuple[Tensor, ...] | None = None

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """A layer's keys, values and scales."""
        return self.keys[layer], self.values[layer], None if self.scales is None else self.scales[layer]


@dataclass(frozen=True)
class StepRows:
    """What a step moves forward, and by how much.

    What the host knows has its shape from the plan; what only the device knows (lengths) has no copy on the host.

    Attributes:
        counts: [rows] int64 on the host: tokens of each row, in batch order.
        row_of_token: [tokens] int64 on the host.
        bounds: [rows] int64 on the host: most tokens that a row has before the step; exactly so many where the row's
            own tokens are known to the host, as a prompt's are.
        slot_of_token: [tokens] int64: each token's line in the tables.
        starts: [rows] int64: each row's length before the step.
        positions: [tokens] int64: each token's position in its sequence.
        slots: [rows] int64: each row's line in the tables.
        tables: By KV group, [slots, blocks of the longest sequence] int64.
        metadata: What `AttentionBackend.build_metadata` made of counts and bounds, around tensors on the device.
        device_counts: [rows] int64: `counts` on the device.
    """

    counts: IntArray
    row_of_token: IntArray
    bounds: IntArray
    slot_of_token: Tensor
    starts: Tensor
    positions: Tensor
    slots: Tensor
    tables: tuple[Tensor, ...]
    metadata: AttentionMetadata[Tensor] = field(default_factory=AttentionMetadata)
    device_counts: Tensor | None = None


class AttentionBackend(Protocol):
    """Computes a step's attention, layer by layer."""

    def build_metadata(
        self, counts: IntArray, bounds: IntArray, limits: PaddedLimits | None = None
    ) -> AttentionMetadata[IntArray]:
        """What `prepare` wants to find on the device, made of the host's part of StepRows. With limits, the lengths of
        its arrays and all that is launched follow from these alone.
        """
        ...

    def prepare(self, rows: StepRows) -> None:
        """Take in a step: whatever its layers share is computed here, once."""
        ...

    def run(self, layer: AttentionLayer, qkv: Tensor, norm_rope: QKNormRope, out: Tensor) -> None:
        """Apply norm and RoPE, store this step's keys and values, then attend, causally within each row.

        Args:
            layer: Which layer.
            qkv: [tokens, heads + 2 · kv_heads, head_dim], as projected: queries, keys, values.
            norm_rope: For the queries and keys.
            out: [tokens, heads, head_dim].
        """
        ...
