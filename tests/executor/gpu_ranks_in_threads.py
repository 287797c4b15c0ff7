"""Ranks with GPUs, as threads of this process: CPUs take the places of the cards, and plain torch that of the kernels
by which stages reach one another's memory. All else is what serves on cards: steps are staged and replayed, and each
rank launches plans as they come.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.compute.collectives import card_stage_links
from quire.compute.collectives.cards import Exchange
from quire.compute.collectives.collectives import Norms
from quire.compute.collectives.layout import LINE, memory_bytes
from quire.compute.collectives.shared_memory import shared_memory_collectives
from quire.compute.kernels.triton.ranks import handed_on
from quire.compute.kernels.triton.ranks.stage_window import StageLayout
from quire.compute.mesh import Mesh, mesh_of
from quire.errors import EngineDeadError
from quire.foundation.clock import Clock
from quire.foundation.config import Config
from quire.foundation.processes.launch import GroupEnds
from quire.foundation.processes.shared_memory import SharedMemory
from quire.models.spec import read_spec
from quire.offline import local_engine
from quire.runtime.executor import card_ranks, multi_rank_executor
from quire.runtime.executor.card_ranks import reach_ranks
from quire.runtime.executor.gpu_executor import GpuExecutor
from quire.runtime.executor.gpu_rank import GpuRank
from quire.runtime.executor.multi_rank_executor import MultiRankExecutor
from quire.runtime.executor.rank_messages import FromRank, ToRanks
from quire.runtime.executor.rank_process import EngineChannel
from quire.runtime.worker import buffer_ring, model_runner
from quire.runtime.worker.worker import Worker
from quire.runtime.worker.worker_parts import LoadedModel
from tests.worker.replay_by_running import CountedBufferRing, ReplayByRunning

CAPTURED = 64
"""Tokens of the largest step that is replayed."""
WAIT_S = 60.0


def use_ranks_in_threads(monkeypatch: pytest.MonkeyPatch) -> list[ReplayByRunning]:
    """For executors and LLMs that are made from now on; the steps that their ranks replay."""
    graphs: list[ReplayByRunning] = []

    def capture(self: Worker, loaded: LoadedModel) -> None:
        replay = ReplayByRunning.put_into(self._runner)
        self._runner.capture_graphs(CAPTURED)
        graphs.append(replay)

    def build_worker(self: GpuExecutor, precompiler: object) -> Worker:
        assert self._ranks is not None
        mesh = self._ranks.mesh
        ranks = reach_ranks(self._config, mesh, torch.device("cpu"), self._ranks.exchange)
        return Worker(
            self._config, self._clock, None, mesh, ranks.collectives, ranks.links, ranks.rehearsed, stages=ranks.stages
        )

    windows = Windows()
    monkeypatch.setattr(multi_rank_executor, "start_ranks", RanksInThreads)
    monkeypatch.setattr(local_engine, "build_executor", executor_of)
    monkeypatch.setattr(GpuExecutor, "_build_worker", build_worker)
    monkeypatch.setattr(card_stage_links, "OwnMemory", windows.own)
    monkeypatch.setattr(card_stage_links, "MappedMemory", windows.mapped)
    for name in ("send_stream", "receive_stream", "send_tokens", "take_tokens"):
        monkeypatch.setattr(handed_on, name, getattr(windows, name))
    monkeypatch.setattr(card_ranks, "Cards", CardsByHost)
    monkeypatch.setattr(buffer_ring, "_has_memory", lambda device: True)
    monkeypatch.setattr(model_runner, "BufferRing", CountedBufferRing)
    monkeypatch.setattr(Worker, "capture_graphs", capture)
    return graphs


def executor_of(config: Config, clock: Clock) -> MultiRankExecutor:
    """As on GPUs; the settings are those of a CPU, by which workers find their device."""
    executor = MultiRankExecutor(config, clock)
    executor._on_gpus = True
    return executor


class Channel(EngineChannel):
    """A rank's way to the engine, by queues."""

    def __init__(self, rank: int, said: queue.SimpleQueue[tuple[int, Any]]) -> None:
        self._rank, self._said = rank, said
        self.messages: queue.SimpleQueue[ToRanks | None] = queue.SimpleQueue()

    def send(self, message: FromRank) -> None:
        self._said.put((self._rank, message))

    def receive(self) -> ToRanks:
        message = self.messages.get()
        if message is None:
            raise EngineDeadError("The engine has closed its connection.")
        return message

    def poll(self) -> ToRanks | None:
        return None if self.messages.empty() else self.receive()


class RanksInThreads:
    """In the place of RankProcesses."""

    def __init__(self, config: Config, clock: Clock, group: GroupEnds | None) -> None:
        assert group is None, "these are not a group's"
        mesh = mesh_of(config.parallel)
        self.number = mesh.size
        self._said: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._channels = [Channel(rank, self._said) for rank in range(self.number)]
        memories = [SharedMemory(LINE * (mesh.tp + 1)) for _ in range(mesh.pp)]
        CardsByHost.share(config, mesh)

        def run(rank: int) -> None:
            try:
                place = mesh_of(config.parallel, rank)
                GpuRank(config, place, self._channels[rank], memories[place.stage]).run()
            except BaseException as error:
                self._said.put((rank, error))

        self._threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(self.number)]
        for thread in self._threads:
            thread.start()

    def name(self, rank: int) -> str:
        return f"Rank {rank} of {self.number}"

    def broadcast(self, message: ToRanks) -> None:
        for channel in self._channels:
            channel.messages.put(message)

    def receive(self, wait: float | None) -> list[tuple[int, FromRank]]:
        found: list[tuple[int, FromRank]] = []
        try:
            while True:
                rank, message = (
                    self._said.get(timeout=None if found else wait) if not found else self._said.get_nowait()
                )
                if isinstance(message, BaseException):
                    raise message
                found.append((rank, message))
        except queue.Empty:
            return found

    def close(self, *, at_once: bool) -> None:
        for channel in self._channels:
            channel.messages.put(None)
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive(), "a rank hangs"


class CardsByHost:
    """In the place of Cards: sums through memory of the host."""

    memories: list[SharedMemory]
    vocab_size: int
    norms: Norms | None = None

    @classmethod
    def share(cls, config: Config, mesh: Mesh) -> None:
        cls.vocab_size = read_spec(config.model.model).vocab_size
        cls.memories = [SharedMemory(memory_bytes(mesh, cls.vocab_size)) for _ in range(mesh.pp)]

    def __init__(self, mesh: Mesh, device: torch.device, exchange: Exchange) -> None:
        for _ in range(2):
            assert len(exchange(b"")) == mesh.size
        memory = self.memories[mesh.stage]
        self._ranks = shared_memory_collectives(memory, mesh, self.vocab_size, spins=0, patience_s=WAIT_S)

    def all_reduce(self, x: Tensor) -> None:
        self._ranks.all_reduce(x)

    def gather_columns(self, x: Tensor, out: Tensor) -> None:
        self._ranks.gather_columns(x, out)

    def rehearsed(self) -> CardsByHost:
        return self


class Windows:
    """The windows of all ranks and what kernels do with them, by torch. Insists that nothing is overwritten which has
    not been read; at some steps it dawdles, so that ranks overtake one another."""

    def __init__(self) -> None:
        self._windows: dict[int, Tensor] = {}
        self._unread: dict[tuple[int, int], int] = {}  # by window and place, the step whose stream is there
        self._random = random.Random(0)

    def own(self, size: int) -> Any:
        window = torch.zeros(size, dtype=torch.uint8)
        self._windows[window.data_ptr()] = window
        return type("OwnMemory", (), {"address": window.data_ptr(), "handle": window.data_ptr().to_bytes(8, "big")})

    def mapped(self, handle: bytes) -> Any:
        return type("MappedMemory", (), {"address": int.from_bytes(handle, "big")})

    def send_stream(self, x: Tensor, delta: Tensor, windows: Tensor, step: Tensor, layout: StageLayout) -> None:
        self._dawdle()
        if number := int(step):
            address = int(windows[1])
            place = address, number % layout.steps
            assert place not in self._unread, f"step {number} overwrites step {self._unread[place]}"
            self._unread[place] = number
            for part, own in zip(self._streams(address, layout)[number % layout.steps], (x, delta), strict=True):
                part.fill_(0x7F)
                part[: own.nbytes] = own.view(-1).view(torch.uint8)
            self._word(address, layout.flags)[:] = number

    def receive_stream(self, x: Tensor, delta: Tensor, windows: Tensor, step: Tensor, layout: StageLayout) -> None:
        self._dawdle()
        address, number = int(windows[0]), int(step)
        self._wait_for(address, layout.flags, number)
        for part, own in zip(self._streams(address, layout)[number % layout.steps], (x, delta), strict=True):
            own.view(-1).view(torch.uint8).copy_(part[: own.nbytes])
        if number:
            assert self._unread.pop((address, number % layout.steps)) == number

    def send_tokens(self, last: Tensor, windows: Tensor, step: int, layout: StageLayout) -> None:
        self._dawdle()
        if step:
            address = int(windows[1])
            self._tokens(address, layout, len(last)).copy_(last)
            self._word(address, 0)[:] = step

    def take_tokens(self, last: Tensor, windows: Tensor, step: int, layout: StageLayout) -> None:
        self._dawdle()
        if step:
            address = int(windows[0])
            self._wait_for(address, 0, step)
            last.copy_(self._tokens(address, layout, len(last)))

    def _wait_for(self, address: int, at: int, step: int) -> None:
        deadline = time.monotonic() + WAIT_S
        while int(self._word(address, at)) < step:
            assert time.monotonic() < deadline, f"step {step} does not come"
            time.sleep(1e-4)

    def _word(self, address: int, at: int) -> Tensor:
        return self._windows[address][at : at + 4].view(torch.int32)

    def _streams(self, address: int, layout: StageLayout) -> Tensor:
        return self._windows[address][layout.streams : layout.size].view(layout.steps, 2, 4 * layout.words)

    def _tokens(self, address: int, layout: StageLayout, slots: int) -> Tensor:
        return self._windows[address][layout.tokens : layout.tokens + 8 * slots].view(torch.int64)

    def _dawdle(self) -> None:
        if self._random.random() < 0.05:
            time.sleep(2e-3)
