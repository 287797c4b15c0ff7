"""The small steps that are replayed: captured as CUDA graphs, or recorded where the host computes.

Knows which steps these are, and not what they do.
"""

from __future__ import annotations

from torch import Tensor

from quire.models.lora.step_tiles import Adapted
from quire.runtime.worker.adapter_rows import AdapterRows
from quire.runtime.worker.cuda_graphs import CudaGraphs
from quire.runtime.worker.graph_shapes import GraphShape, GraphShapes, ShortSteps
from quire.runtime.worker.host_batch import HostBatch
from quire.runtime.worker.recorded_steps import RecordedSteps
from quire.runtime.worker.slot_table import SlotTable


class CapturedSteps:
    """Holds the steps that can be replayed, and finds the one for a batch. There are none at first.

    Args:
        slots: The slot table.
        adapters: Of its rows; None: there are none.
        short: Which short steps there are.

    Attributes:
        graphs, shapes: Steps on a GPU.
        recorded: Steps on a CPU; None: there are none.
        short: Which short steps there are.
    """

    def __init__(self, slots: SlotTable, adapters: AdapterRows | None, short: ShortSteps) -> None:
        self._slots = slots
        self._adapters = adapters
        self.short = short
        self.graphs = CudaGraphs()
        self.shapes = GraphShapes(0, 0, 0, 0)
        self.recorded: RecordedSteps | None = None

    def shape_for(self, host: HostBatch) -> GraphShape | None:
        """The captured shape that the batch can be padded to, if there is one."""
        sizes = len(host.token_ids), len(host.slots), len(host.sampled_slots), host.decode_rows
        if (
            self.short is ShortSteps.DRAFTING
            and not host.is_decode
            and (short := self.shapes.for_short(*sizes[:3])) is not None
        ):
            return short
        if self.recorded is None:
            return self.shapes.for_step(*sizes)
        if self._adapters is None:
            return self.recorded.for_step(*sizes)
        return self.recorded.for_step(*sizes, adapted=self._adapters.kind_of(self._slots.host.adapters[host.slots]))

    def shape_of_drafts(self, host: HostBatch) -> GraphShape | None:
        """The captured shape that a batch with drafts can be padded to on a GPU, if there is one."""
        sizes = len(host.token_ids), len(host.slots), len(host.sampled_slots)
        short = self.shapes.for_short(*sizes) if sizes[0] == sizes[2] else None
        return self.shape_for(host) if short is None else short

    def replay(self, shape: GraphShape, *, adapted: Adapted) -> Tensor:
        """Replay the staged step; returns [sampled, vocab] logits, valid until the next replay.

        Args:
            shape: The staged step's captured shape.
            adapted: What adapters change.
        """
        return (self.recorded or self.graphs).replay(shape, adapted=adapted)
