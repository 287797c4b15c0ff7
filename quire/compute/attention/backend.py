"""The seam between attention layers and whatever computes attention, and the KV cache as it sees it.

Knows nothing about models, requests or plans. A backend may serve long rows in one way and short ones in another; there
are no phases.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from quire.compute.attention.limits import PaddedLimits
from quire.compute.attention.metadata import AttentionMetadata, IntArray
from quire.compute.kernels.reference.attention_inputs import Mask, PagedKV, PagedRows, QKNormRope, Scores


@dataclass(frozen=True)
class AttentionLayer:
    """What is a layer's own in attention.

    Attributes:
        number: Among the layers that this rank computes.
        scores: How its scores are made.
    """

    number: int
    scores: Scores


@dataclass(frozen=True)
class KVView:
    """The paged KV cache.

    Attributes:
        layers: Each layer's keys and values. Block 0 is the dummy: it belongs to nobody. Layers of different groups
            share tensors: a block belongs to one group at a time.
        groups: By layer, the KV group whose tables it uses.
        masks: By KV group, what its layers see. Table entries that no token sees any more name blocks of others, or
            nothing.
    """

    layers: tuple[PagedKV, ...]
    groups: tuple[int, ...]
    masks: tuple[Mask, ...]

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self.layers[0].keys.shape[1]


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
        device_counts: [rows] int64: `counts` on the device.
        tables: By KV group, [slots, blocks of the longest sequence] int64.
        metadata: What `AttentionBackend.build_metadata` made of counts and bounds, on the device.
    """

    counts: IntArray
    row_of_token: IntArray
    bounds: IntArray
    slot_of_token: Tensor
    starts: Tensor
    positions: Tensor
    slots: Tensor
    device_counts: Tensor
    tables: tuple[Tensor, ...]
    metadata: AttentionMetadata = field(default_factory=AttentionMetadata)

    def paged(self, group: int) -> PagedRows:
        """The rows as kernels take them for layers of a KV group."""
        return PagedRows(self.tables[group], self.slots, self.starts, self.device_counts)


class AttentionBackend(Protocol):
    """Computes a step's attention, layer by layer."""

    def build_metadata(
        self, counts: IntArray, bounds: IntArray, limits: PaddedLimits | None = None
    ) -> AttentionMetadata:
        """What `prepare` wants to find on the device, made of the host's part of StepRows. With limits, the lengths of
        its columns and all that is launched follow from these alone.
        """
        ...

    def prepare(self, rows: StepRows) -> None:
        """Take in a step: whatever its layers share is computed here, once."""
        ...

    def run(self, layer: AttentionLayer, qkv: Tensor, norm_rope: QKNormRope, out: Tensor) -> None:
        """Apply norm and RoPE, store this step's keys and values, then attend.

        Args:
            layer: Which layer.
            qkv: [tokens, heads + 2 · kv_heads, head_dim], as projected: queries, keys, values.
            norm_rope: For the queries and keys.
            out: [tokens, heads, head_dim].
        """
        ...
