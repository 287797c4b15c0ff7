"""A rank with a GPU of its own: it launches the engine's plans ahead, as an engine of one GPU does, and says when each
is done. Its GPU waits for those of other ranks, so nothing here does.
"""

from __future__ import annotations

import time
from typing import Protocol

from quire.clock import SystemClock
from quire.collectives.layout import LINE
from quire.config import Config
from quire.executor.gpu_executor import POLL_S, GpuExecutor, GpuRanks
from quire.executor.rank_messages import Bitmasks, FromRank, LoadAdapter, StepDone, Stop, ToRanks, fingerprint
from quire.mesh import Mesh
from quire.messages import Plan, Result, TokenBitmasks
from quire.planning.kv_cache_plan import NumBlocks
from quire.processes.shared_memory import SharedMemory


class RankChannel(Protocol):
    """An EngineChannel, as GpuRank sees it."""

    def send(self, message: FromRank) -> None:
        """In any thread."""
        ...

    def receive(self) -> ToRanks: ...

    def poll(self) -> ToRanks | None: ...

    def exchange(self, data: bytes) -> list[bytes]: ...

    def agree(self, blocks: NumBlocks) -> NumBlocks: ...


class GpuRank:
    """Runs plans until Stop.

    Args:
        config: Resolved settings.
        mesh: The rank's place.
        channel: To the engine.
        memory: A line for each rank, in which it says to which step it has come: the engine sees who is late.
    """

    def __init__(self, config: Config, mesh: Mesh, channel: RankChannel, memory: SharedMemory) -> None:
        self._mesh = mesh
        self._channel = channel
        self._words = memoryview(memory.view).cast("I")
        self._executor = GpuExecutor(config, SystemClock(), ranks=GpuRanks(mesh, channel.exchange, channel.agree))
        self._in_flight = 0

    def run(self) -> None:
        """Load a part of the model, then run plans. A failed step is the end: the others wait for this rank's part."""
        limits = self._executor.start()
        if (adapters := self._executor.adapters) is not None:
            adapters.report_to(self._channel.send)
        self._channel.send(limits)
        while not isinstance(message := self._next_message(), Stop):
            if message is not None:
                self._take(message)
            elif not self._say_oldest():
                time.sleep(POLL_S)
        self._executor.close()

    def _next_message(self) -> ToRanks | None:
        """Waits only where nothing is left to be said."""
        return self._channel.poll() if self._in_flight else self._channel.receive()

    def _take(self, message: ToRanks) -> None:
        if isinstance(message, Bitmasks):
            self._executor.submit_bitmasks(TokenBitmasks(message.step, message.rows, list(message.bits)))
            return
        if isinstance(message, LoadAdapter):
            adapters = self._executor.adapters
            assert adapters is not None, "--enable-lora was not given"
            adapters.load(message.adapter, message.slot)
            return
        assert isinstance(message, Plan), message
        while self._in_flight == self._executor.max_in_flight:
            self._say_oldest(None)  # the rank that answers was quicker, so all that this step waits for has come
        self._words[self._mesh.tp_rank * LINE // 4] = message.step & 0xFFFFFFFF
        self._executor.submit(message)
        self._in_flight += 1

    def _say_oldest(self, timeout: float | None = 0.0) -> bool:
        """Tell the engine of the oldest step, if it is done."""
        if (result := self._executor.collect(timeout)) is None:
            return False
        assert isinstance(result, Result), "ranks make no drafts"
        self._in_flight -= 1
        self._channel.send(self._said(result))
        return True

    def _said(self, result: Result) -> Result | StepDone:
        """One rank tells all, the others which tokens they have sampled."""
        if self._mesh.tp_rank == 0:
            return result
        return StepDone(result.step, fingerprint(result), result.ready_host_blocks)
