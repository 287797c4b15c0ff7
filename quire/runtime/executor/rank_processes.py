"""The ranks of one machine: starts their processes, receives their messages, and sees which one dies or hangs.

Each rank that is lost is an EngineDeadError that names it. Knows nothing about what the messages mean.
"""

from __future__ import annotations

import logging
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import msgspec

from quire.compute.collectives.layout import calls_of, memory_bytes
from quire.compute.mesh import mesh_of
from quire.errors import EngineDeadError
from quire.foundation.clock import Clock
from quire.foundation.config import Config
from quire.foundation.processes.child_main import raise_reported_failure
from quire.foundation.processes.child_process import ChildProcess, process_state
from quire.foundation.processes.launch import GroupEnds, LaunchConfig, RankLaunch
from quire.foundation.processes.shared_memory import SharedMemory
from quire.models.spec import spec_of
from quire.planning.step_limits import StepLimits
from quire.runtime.executor.message_ring import RingWriter, ring_bytes
from quire.runtime.executor.nodes.connection import whole_messages
from quire.runtime.executor.rank_links import Crossings, StageRings
from quire.runtime.executor.rank_messages import FromRank, ToRanks
from quire.runtime.worker.startup.threads import usable_cores

PATIENCE_S = 20.0
"""How long ranks wait for one another in a step."""
LATE_S = 2.0
"""How long the others wait for a rank before it is logged that it is late."""
STOPPED_S = 1.5
"""How long a rank may be stopped (SIGSTOP)."""
STOP_TIMEOUT_S = 5.0
"""How long ranks may take to end after they were told to."""
SPINS = 3_000
"""How often a rank looks for another before it sleeps, if all have cores of their own: about 50 µs."""
_LOOK_S = 0.5
_CHUNK = 1 << 16
_log = logging.getLogger(__name__)


class RankProcesses:
    """The processes of one engine's ranks on this machine.

    Args:
        config: Resolved settings.
        clock: For who is late.
        crossings: This machine's links to others; None: all ranks are here.
        where: What messages say of a rank besides its process.
        group: What the ranks share with ranks of other engines; None: nothing.

    Attributes:
        number: How many ranks the engine has, on all machines.
    """

    def __init__(
        self,
        config: Config,
        clock: Clock,
        crossings: Crossings | None = None,
        where: str = "",
        group: GroupEnds | None = None,
    ) -> None:
        self._clock = clock
        self._where = where
        self._group = group
        self._mesh = mesh_of(config.parallel)
        self.number = self._mesh.size
        self._here = range(self.number) if crossings is None else crossings.ranks
        self._sharing = len(self._here) * config.parallel.data_parallel_size  # ranks of all engines, on one machine
        self._patience_s = float(config.parallel.distributed_timeout_seconds or PATIENCE_S)
        spec = spec_of(config.model)
        size = memory_bytes(self._mesh, spec.vocab_size)
        self._memories = [SharedMemory(size) for _ in self._here[:: self._mesh.tp]]  # a stage's ranks share one
        self._words = [memoryview(memory.view).cast("I") for memory in self._memories]
        rows = config.scheduler.max_num_seqs or 0
        rings = StageRings(self._mesh, stream_bytes(config, spec.hidden), rows, crossings)
        ring = SharedMemory(ring_bytes(len(self._here)))
        self._ring = RingWriter(ring, len(self._here), self._ring_bells, self._wait_for_readers)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
        self._unread = [bytearray() for _ in self._here]
        self._selector = selectors.EpollSelector()
        self._sockets: list[socket.socket] = []
        self._children: list[ChildProcess] = []
        self._last_look = clock.now()
        self._progress: tuple[int, ...] = ()
        self._still_s = self._stopped_s = 0.0
        self._is_late = False
        self._on_gpus = config.device.device == "cuda"
        for rank in self._here:
            self._start(config, rank, ring, rings)
        for memory in (ring, *self._memories):
            memory.close_descriptor()
        rings.close()

    def name(self, rank: int) -> str:
        """What a rank is called in messages."""
        return f"Rank {rank} of {self.number} (process {self._children[self._index(rank)].pid}{self._where})"

    @property
    def pids(self) -> list[int]:
        """The process ids of the ranks on this machine, in their order."""
        return [child.pid for child in self._children]

    def fileno(self) -> int:
        """A descriptor for selectors, readable when a rank has said something."""
        return self._selector.fileno()

    def broadcast(self, message: ToRanks) -> None:
        """Send a message to all ranks."""
        self.broadcast_encoded(self._encoder.encode(message))

    def broadcast_encoded(self, message: bytes) -> None:
        """Send a message to all ranks, encoded as they read it."""
        self._ring.write(message)

    def receive(self, wait: float | None) -> list[tuple[int, FromRank]]:
        """What ranks have said, each with its number; empty after `wait` seconds.

        Raises:
            SetupError: A rank's start has failed.
            EngineDeadError: A rank is gone, or stuck.
        """
        step = _LOOK_S if wait is None else min(wait, _LOOK_S)
        while True:
            received = [found for key, _ in self._selector.select(step) for found in self._read(key.data)]
            self._look()
            if received or wait is not None:
                return received

    def close(self, *, at_once: bool) -> None:
        """End all ranks: in order, after Stop was broadcast, or at once."""
        deadline = self._clock.now() + STOP_TIMEOUT_S
        for child, end in zip(self._children, self._sockets, strict=True):
            if not at_once:
                end.settimeout(max(0.01, deadline - self._clock.now()))
                with suppress(OSError):
                    while end.recv(_CHUNK):
                        pass
            child.signal(signal.SIGKILL)
            child.cause_of_death()
            child.close()
            end.close()
        self._selector.close()
        self._children.clear()
        self._sockets.clear()

    # --- below --------------------------------------------------------------------------------------------------------

    def _index(self, rank: int) -> int:
        return rank - self._here[0]

    def _start(self, config: Config, rank: int, ring: SharedMemory, rings: StageRings) -> None:
        own, theirs = socket.socketpair()
        launch = RankLaunch(
            rank=rank,
            first=self._here[0],
            here=len(self._here),
            socket_fd=theirs.fileno(),
            ring_fd=ring.descriptor,
            memory_fd=self._memories[self._index(rank) // self._mesh.tp].descriptor,
            spins=SPINS if self._sharing < usable_cores() else 0,
            patience_s=self._patience_s,
            ends_with_parent=threading.current_thread() is threading.main_thread(),
            stage=rings.ends_of(rank),
            group=self._group,
        )
        self._children.append(
            ChildProcess(f"rank {rank}", "quire.runtime.executor.rank_process", LaunchConfig(config, "", rank=launch))
        )
        theirs.close()
        own.setblocking(False)
        self._sockets.append(own)
        self._selector.register(own, selectors.EVENT_READ, rank)

    def _ring_bells(self) -> None:
        for end in self._sockets:
            with suppress(OSError):  # it has many to hear already, or it is gone, which is seen elsewhere
                end.send(b"\0")

    def _wait_for_readers(self) -> None:
        """Give the ranks time to read from the ring, which is full."""
        time.sleep(1e-3)
        for rank, child in zip(self._here, self._children, strict=True):
            if child.exit_code() is not None:
                raise self._death(rank)
        self._look()

    def _read(self, rank: int) -> Iterator[tuple[int, FromRank]]:
        """The messages of a rank that are there as a whole."""
        unread = self._unread[self._index(rank)]
        with suppress(BlockingIOError):
            while chunk := self._receive(rank):
                unread += chunk
            raise self._death(rank)
        for message in whole_messages(unread, sys.maxsize):
            yield rank, self._decoder.decode(message)

    def _receive(self, rank: int) -> bytes:
        """Some bytes of a rank's messages; empty if the rank is gone."""
        with suppress(ConnectionResetError):  # it had not read all that it was sent
            return self._sockets[self._index(rank)].recv(_CHUNK)
        return b""

    def _death(self, rank: int) -> Exception:
        child = self._children[self._index(rank)]
        cause = child.cause_of_death()
        if (failure := child.failure) is not None and failure.error:
            raise_reported_failure(failure)
        if cause.startswith("Rank "):  # this rank has waited for another in vain
            return EngineDeadError(f"{cause}.")
        return EngineDeadError(f"{self.name(rank)} died: {cause}.")

    def _look(self) -> None:
        """Look whether a rank keeps the others waiting, and log it.

        Raises:
            EngineDeadError: A rank is stopped, or is too late on GPUs, where ranks cannot see that they wait.
        """
        now = self._clock.now()
        passed = now - self._last_look
        if passed < _LOOK_S:
            return
        self._last_look = now
        passed = min(passed, 2 * _LOOK_S)  # if this process or the machine stood still, no rank is to blame
        stopped = next(
            (rank for rank, pid in zip(self._here, self.pids, strict=True) if process_state(pid) == "T"), None
        )
        self._stopped_s = 0.0 if stopped is None else self._stopped_s + passed
        if stopped is not None and self._stopped_s >= STOPPED_S:
            raise EngineDeadError(f"{self.name(stopped)} was stopped by SIGSTOP.")
        tp = self._mesh.tp
        calls = tuple(calls_of(self._words[index // tp], index % tp) for index in range(len(self._here)))
        apart = [rank for i, rank in enumerate(self._here) if calls[i] < max(calls[i // tp * tp :][:tp])]
        self._still_s = self._still_s + passed if calls == self._progress and apart else 0.0
        self._progress = calls
        if self._still_s < LATE_S:
            self._is_late = False
        elif not self._is_late:
            self._is_late = True
            late = apart[0]
            _log.warning("%s is late: in a step the others have waited %.0f s for it", self.name(late), self._still_s)
        elif self._on_gpus and self._still_s >= self._patience_s:
            raise EngineDeadError(
                f"{self.name(apart[0])} was stuck: in step {calls[self._index(apart[0])] + 1} the others waited "
                f"{self._patience_s:g} s for it."
            )


def stream_bytes(config: Config, hidden: int) -> int:
    """The bytes that a stage sends the next one in the largest step."""
    return 2 * 4 * StepLimits.of(config).tokens * hidden
