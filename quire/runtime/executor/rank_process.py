"""The process of a rank: `python -m quire.runtime.executor.rank_process`, started by the engine.

Runs the engine's plans on its part of the model. All ranks get the same plans and sample the same tokens; the first one
sends results, the others only say what they have sampled. Knows nothing about requests.
"""

from __future__ import annotations

import ctypes
import signal
import socket
import sys
import threading
from collections import deque

import msgspec

from quire.compute.collectives.layout import LINE
from quire.compute.mesh import mesh_of
from quire.errors import EngineDeadError
from quire.foundation.clock import SystemClock
from quire.foundation.config import environment
from quire.foundation.messages.workers import TokenBitmasks
from quire.foundation.processes.child_main import run_child
from quire.foundation.processes.launch import LaunchConfig, RankLaunch, SendReport
from quire.foundation.processes.pipe_lines import wait_readable
from quire.foundation.processes.shared_memory import SharedMemory
from quire.planning.kv_cache_plan import NumBlocks
from quire.runtime.executor.early_loading import begin_loading
from quire.runtime.executor.message_ring import RingReader, ring_bytes
from quire.runtime.executor.nodes.connection import FRAME
from quire.runtime.executor.rank_messages import (
    Bitmasks,
    Blocks,
    FromRank,
    Offer,
    Offers,
    Stop,
    ToRanks,
)

_MANY = 4096
_PR_SET_PDEATHSIG = 1


class EngineChannel:
    """A rank's way to the engine, and back."""

    def __init__(self, launch: RankLaunch) -> None:
        self._socket = socket.socket(fileno=launch.socket_fd)
        self._sending = threading.Lock()
        memory = SharedMemory(ring_bytes(launch.here), launch.ring_fd)
        self._ring = RingReader(memory, launch.here, launch.rank - launch.first, self._wait)
        self._decoder: msgspec.msgpack.Decoder[ToRanks] = msgspec.msgpack.Decoder(ToRanks)
        self._waiting: deque[ToRanks] = deque()  # plans that came before the bitmasks of an earlier one

    def send(self, message: FromRank) -> None:
        """Tell the engine; in any thread."""
        encoded = msgspec.msgpack.encode(message)
        with self._sending:
            self._socket.sendall(FRAME.pack(len(encoded)) + encoded)

    def receive(self) -> ToRanks:
        """Wait for the next message and return it."""
        return self._waiting.popleft() if self._waiting else self._read()

    def poll(self) -> ToRanks | None:
        """The next message, if there is one."""
        return self.receive() if self._waiting or self._ring.has_more else None

    def wait_beside(self, bell: int) -> None:
        """Wait until there may be a message, or this descriptor is readable."""
        if self._socket.fileno() in wait_readable(self._socket.fileno(), bell):
            self._wait()

    def exchange(self, data: bytes) -> list[bytes]:
        """Offer data to all ranks; returns what all of them offer, by rank."""
        self.send(Offer(data))
        offers = self.receive()
        assert isinstance(offers, Offers)
        return offers.data

    def agree(self, blocks: NumBlocks) -> NumBlocks:
        """Say how many KV blocks and states this rank has room for; returns how many all ranks get."""
        self.send(Blocks(*blocks))
        of_all = self.receive()
        assert isinstance(of_all, Blocks)
        return NumBlocks(of_all.device, of_all.host, of_all.states)

    def bitmasks(self) -> TokenBitmasks:
        """Wait for the bitmasks of the step that is running. They come in the order of plans, each once."""
        while not isinstance(message := self._read(), Bitmasks):
            if isinstance(message, Stop):
                raise EngineDeadError("The engine was closed before a step's bitmasks came.")
            self._waiting.append(message)
        return TokenBitmasks(message.step, message.rows, list(message.bits))

    def _read(self) -> ToRanks:
        return self._decoder.decode(self._ring.read())

    def _wait(self) -> None:
        """Wait until there is more in the ring."""
        if not self._socket.recv(_MANY):
            raise EngineDeadError("The engine has closed its connection.")


def main(launch: LaunchConfig, report: SendReport) -> None:
    """Load a part of the model, then run plans until Stop."""
    own = launch.rank
    assert own is not None, "a rank's process"
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the engine says when it is time to end
    if own.ends_with_parent and sys.platform == "linux":  # also when it is stopped, and cannot see the end by itself
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    config, engine = launch.config, 0 if own.group is None else own.group.engine
    mesh = mesh_of(config.parallel, own.rank, engine)
    on_gpu = config.device.device == "cuda"
    if on_gpu:
        environment.show_gpu_of_rank_first(own.rank, mesh.size)
        environment.prepare_nccl()
    begin_loading(meta_kernels=False)
    channel = EngineChannel(own)
    if on_gpu:
        from quire.runtime.executor.gpu_rank import GpuRank

        GpuRank(config, mesh, channel, SharedMemory(LINE * (mesh.tp + 1), own.memory_fd)).run()
        return
    clock = SystemClock()
    began = clock.now()
    environment.limit_openmp_spinning()
    from quire.runtime.executor import cpu_rank  # torch

    cpu_rank.run(config, mesh, own, channel, clock.now() - began)


if __name__ == "__main__":
    run_child(main, "rank")
