"""The interface between attention layers and the backends that compute attention, and their view of the KV cache.

This module knows nothing about models, requests or plans. A backend may serve long rows and short rows differently, but
there are no phases.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor

from quire.compute.attention.limits import PaddedLimits
from quire.compute.attention.metadata import AttentionMetadata, IntArray
from quire.compute.kernels.reference.attention_inputs import Mask, PagedKV, PagedRows, QKNormRope, Scores


@dataclass(frozen=True)
class AttentionLayer:
    """What distinguishes a layer's attention: its number among the layers that this rank computes, and how products of
    queries and keys become scores."""

    number: int
    scores: Scores


@dataclass(frozen=True)
class KVView:
    """The paged KV cache.

    Attributes:
        layers: Each layer's keys and values. Block 0 is the dummy, which belongs to no sequence. Layers of different
            groups share tensors: a block belongs to one group at a time.
        groups: For each layer, the KV group whose tables it uses.
        masks: For each KV group, what its layers see. Table entries that no token sees any more name blocks of other
            sequences, or are undefined.
        spans_in_windows: Whether tokens of a step's spans see those behind them in layers with a window alone.
    """

    layers: tuple[PagedKV, ...]
    groups: tuple[int, ...]
    masks: tuple[Mask, ...]
    spans_in_windows: bool = False

    @property
    def block_size(self) -> int:
        return self.layers[0].keys.shape[1]


class TwoSidedSpans(NamedTuple):
    """Tokens of a step's rows that see one another, whether before or behind, and all before their span.

    Attributes:
        tokens: [tokens of spans] int64, their places in the batch, span by span.
        slots: [spans] int64, each span's line in the tables.
        starts: [spans] int64, how many tokens of its sequence are before a span.
        counts: [spans] int64, its tokens.
    """

    tokens: Tensor
    slots: Tensor
    starts: Tensor
    counts: Tensor


@dataclass(frozen=True)
class StepRows:
    """The rows that a step moves forward, and by how much.

    What the host knows has its shape from the plan; what only the device knows (lengths) has no copy on the host.

    Attributes:
        counts: [rows] int64 on the host: tokens of each row, in batch order.
        row_of_token: [tokens] int64 on the host.
        bounds: [rows] int64 on the host: the maximum tokens that a row has before the step; the exact number where the
            host knows the row's own tokens, as in a prompt.
        slot_of_token: [tokens] int64: each token's line in the tables.
        starts: [rows] int64: each row's length before the step.
        positions: [tokens] int64: each token's position in its sequence.
        slots: [rows] int64: each row's line in the tables.
        device_counts: [rows] int64: `counts` on the device.
        tables: For each KV group, [slots, blocks of the longest sequence] int64.
        metadata: What `AttentionBackend.build_metadata` made of counts and bounds, on the device.
        spans: Tokens that see those behind them as well, up to the end of their span; None: there are none.
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
    spans: TwoSidedSpans | None = None

    def paged(self, group: int) -> PagedRows:
        """Return the rows as kernels take them for layers of a KV group."""
        return PagedRows(self.tables[group], self.slots, self.starts, self.device_counts)


class AttentionBackend(Protocol):
    """Computes a step's attention, layer by layer."""

    def build_metadata(
        self, counts: IntArray, bounds: IntArray, limits: PaddedLimits | None = None
    ) -> AttentionMetadata:
        """Build, on the host, the metadata that `prepare` needs on the device.

        With limits, they alone decide the lengths of the metadata's columns and everything that is launched.
        """
        ...

    def prepare(self, rows: StepRows) -> None:
        """Compute once what the layers of a step share."""
        ...

    def run(self, layer: AttentionLayer, qkv: Tensor, norm_rope: QKNormRope, out: Tensor) -> None:
        """Apply norm and RoPE, store this step's keys and values, then attend.

        Args:
            layer: The layer to compute.
            qkv: [tokens, heads + 2 · kv_heads, head_dim], as projected: queries, keys, values. Of latents, which are
                keys and values at once, [tokens, heads + 1, d].
            norm_rope: The norm and rotation of queries and keys.
            out: [tokens, heads, head_dim]. Of latents, the part that is rotated is undefined.
        """
        ...


class OtherAttention:
    """An AttentionBackend whose attention another one computes; subclasses add what a step keeps besides.

    Args:
        attention: The other one.
    """

    def __init__(self, attention: AttentionBackend) -> None:
        self._attention = attention

    def build_metadata(
        self, counts: IntArray, bounds: IntArray, limits: PaddedLimits | None = None
    ) -> AttentionMetadata:
        """Build the other backend's metadata."""
        return self._attention.build_metadata(counts, bounds, limits)

    def prepare(self, rows: StepRows) -> None:
        """Compute once what the layers of a step share."""
        self._attention.prepare(rows)

    def run(self, layer: AttentionLayer, qkv: Tensor, norm_rope: QKNormRope, out: Tensor) -> None:
        """Attend to cached tokens, as the other backend does."""
        self._attention.run(layer, qkv, norm_rope, out)
