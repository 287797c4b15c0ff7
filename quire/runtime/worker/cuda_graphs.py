"""CUDA graphs of a model's steps, one for each of a few shapes.

A graph replays the same kernels on the same addresses. All that it reads is in persistent buffers, and its kernels read
what varies from step to step (slots, lengths, block tables) from there. What a step does is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.models.lora.step_tiles import Adapted
from quire.runtime.worker.graph_shapes import GraphShape
from quire.runtime.worker.host_memory import unowned_view


class CudaGraphs:
    """Graphs by the shape of their step, and what adapters change in it."""

    def __init__(self) -> None:
        self._graphs: dict[tuple[GraphShape, Adapted], torch.cuda.CUDAGraph] = {}
        self._logits: dict[tuple[GraphShape, Adapted], Tensor] = {}

    def capture(self, shape: GraphShape, step: Callable[[], Tensor], *, adapted: Adapted = Adapted.NOTHING) -> None:
        """Capture what `step` launches; it returns logits. This thread must compile or load no kernel meanwhile.

        All graphs share their memory, also that of their logits, because one replay ends before the next begins. The
        largest shape should be captured first.
        """
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            logits = step()
        self._graphs[shape, adapted] = graph
        self._logits[shape, adapted] = unowned_view(logits, logits.device)  # its memory is the next graph's too

    def replay(self, shape: GraphShape, *, adapted: Adapted = Adapted.NOTHING) -> Tensor:
        """Replay the graph of this shape; returns [sampled, vocab] logits, valid until the next replay."""
        self._graphs[shape, adapted].replay()
        return self._logits[shape, adapted]
