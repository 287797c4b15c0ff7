"""Links between pipeline stages whose ranks have a card each on one host.

Each rank writes into the memory of one other card, which has its place in the next stage; the last stage writes into
the memory of the first. What arrives is awaited on the device; the host has no part in it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.compute.collectives.cards import Exchange
from quire.compute.collectives.cuda_ipc import MappedMemory, OwnMemory, PeerMemoryError
from quire.compute.collectives.delta import StageLinks, Stream
from quire.compute.mesh import Mesh
from quire.errors import ConfigError


class StreamSize(NamedTuple):
    """The sizes that windows are made for.

    Attributes:
        tokens, hidden, dtype: The shape and dtype of the largest stream.
        slots: The slots of the slot table, with the dummy.
        steps: How many steps may be in all stages at the same time.
    """

    tokens: int
    hidden: int
    dtype: torch.dtype
    slots: int
    steps: int


class CardStageLinks:
    """This rank's links to other stages, as source and sink of streams and of sampled tokens (StageTokens). The device
    is the current one, and `exchange`, which exchanges messages with all ranks, is called twice. Raises ConfigError if
    the cards cannot map one another's memory."""

    def __init__(self, mesh: Mesh, device: torch.device, exchange: Exchange, size: StreamSize) -> None:
        from quire.compute.kernels.triton.ranks import (  # Triton is there only with a GPU's torch
            handed_on,
            stage_window,
        )

        torch.empty(1, device=device)  # the context
        self._kernels = handed_on
        self._mesh = mesh
        self._size = size
        stream_bytes = size.tokens * size.hidden * size.dtype.itemsize
        self._to_first = stage_window.layout_of(size.slots, size.steps, 0)
        self._to_next = stage_window.layout_of(size.slots, size.steps, stream_bytes)
        own = (self._to_first if mesh.is_first else self._to_next).size
        addresses = _map(mesh, exchange, own)
        self._windows = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._device = device
        self._step = torch.zeros(1, dtype=torch.int64, device=device)

    @property
    def ends(self) -> StageLinks:
        """The links by which the model receives and sends streams."""
        return StageLinks(None if self._mesh.is_first else self, None if self._mesh.is_last else self)

    def begin(self, step: Tensor) -> None:
        self._step = step

    def receive(self, tokens: int) -> Stream:
        shape = (2, tokens, self._size.hidden)
        x, delta = torch.empty(shape, dtype=self._size.dtype, device=self._device).unbind()
        self._kernels.receive_stream(x, delta, self._windows, self._step, self._to_next)
        return Stream(x, delta)

    def send(self, stream: Stream) -> None:
        x, delta = stream.tensors()
        assert delta is not None, "a stage without blocks"
        self._kernels.send_stream(x, delta, self._windows, self._step, self._to_next)

    def send_tokens(self, last: Tensor, step: int) -> None:
        self._kernels.send_tokens(last, self._windows, step, self._to_first)

    def take_tokens(self, last: Tensor, step: int) -> None:
        self._kernels.take_tokens(last, self._windows, step, self._to_first)


def _map(mesh: Mesh, exchange: Exchange, size: int) -> tuple[int, int]:
    """Return the addresses of this rank's window and of the window that it writes to."""
    own: OwnMemory | None = None
    other = 0
    why_not = "another rank failed"
    try:
        own = OwnMemory(size)
    except PeerMemoryError as error:
        why_not = str(error)
    handles = exchange(b"" if own is None else own.handle)
    try:
        if own is not None and (handle := handles[(mesh.rank + mesh.tp) % mesh.size]):
            other = MappedMemory(handle).address
    except PeerMemoryError as error:
        why_not = str(error)
    succeeded = exchange(bytes([bool(other)]))
    if own is None or not all(map(any, succeeded)):
        raise ConfigError(
            f"--pipeline-parallel-size {mesh.pp}: the GPUs cannot map one another's memory ({why_not}). Give "
            "--tensor-parallel-size in its place, which works by NCCL then.",
            param="pipeline_parallel_size",
        )
    return own.address, other
