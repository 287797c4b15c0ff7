"""The stand-in for an attention backend where a model attends by itself. Does not import transformers."""

from __future__ import annotations

from torch import Tensor

from quire.compute.attention.backend import AttentionLayer, StepRows
from quire.compute.attention.limits import PaddedLimits
from quire.compute.attention.metadata import AttentionMetadata, IntArray
from quire.compute.kernels.reference.attention_inputs import QKNormRope


class RowsOnly:
    """An AttentionBackend that hands a step's rows to a model that attends by itself."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.rows: StepRows | None = None

    def build_metadata(
        self, counts: IntArray, bounds: IntArray, limits: PaddedLimits | None = None
    ) -> AttentionMetadata:
        return AttentionMetadata()

    def prepare(self, rows: StepRows) -> None:
        self.rows = rows

    def run(self, layer: AttentionLayer, qkv: Tensor, norm_rope: QKNormRope, out: Tensor) -> None:
        raise AssertionError("the model attends by itself")
