"""An executor whose ranks are threads of this process: what MultiRankExecutor does, without its processes."""

from __future__ import annotations

import os
import queue
import threading
from functools import partial
from typing import Any

import torch

from quire.compute.collectives.layout import memory_bytes
from quire.compute.collectives.shared_memory import shared_memory_collectives
from quire.compute.mesh import mesh_of
from quire.foundation.clock import Clock
from quire.foundation.config import Config
from quire.foundation.messages.workers import DeviceLimits, Order, Plan, Result, TokenBitmasks
from quire.foundation.processes.launch import GroupEnds
from quire.foundation.processes.pipe_lines import wait_readable
from quire.foundation.processes.shared_memory import SharedMemory
from quire.models.spec import read_spec
from quire.planning.kv_cache_plan import NumBlocks
from quire.planning.state_memory import smallest_number_of_states
from quire.runtime.executor.cpu_rank import GroupSteps, RankSteps, engine_group, stage_links
from quire.runtime.executor.rank_answers import RankOrders
from quire.runtime.executor.rank_links import StageRings
from quire.runtime.executor.rank_messages import StepDone, Stop, ToRanks, fingerprint
from quire.runtime.worker.worker import Worker


class Messages:
    """What is said to a rank."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[ToRanks] = queue.SimpleQueue()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK)

    def put(self, message: ToRanks) -> None:
        self._queue.put(message)
        os.eventfd_write(self._bell, 1)

    def receive(self) -> ToRanks:
        return self._queue.get()

    def poll(self) -> ToRanks | None:
        try:
            return self._queue.get_nowait()
        except queue.Empty:
            return None

    def wait_beside(self, bell: int) -> None:
        if self._bell in wait_readable(self._bell, bell):
            os.eventfd_read(self._bell)

    def close(self) -> None:
        os.close(self._bell)


class ThreadRanks:
    """Insists that all ranks sample the same tokens in each step. What a rank raises, `start` or `collect` raises, and
    there are no further steps then."""

    def __init__(self, config: Config, clock: Clock, group: GroupEnds | None = None) -> None:
        self._config, self._clock, self._group = config, clock, group
        self._mesh = mesh_of(config.parallel)
        self._ranks = self._mesh.size
        self.max_in_flight = 1 + self._mesh.pp
        self._messages = [Messages() for _ in range(self._ranks)]
        self._masks: list[queue.SimpleQueue[TokenBitmasks]] = [queue.SimpleQueue() for _ in range(self._ranks)]
        self._said: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(self._ranks)]
        self._agree = threading.Barrier(self._ranks)
        self._offers: list[NumBlocks] = []
        self.orders = RankOrders(self._ranks, self._tell_all, lambda: None, "rank {}".format)
        self._rings = StageRings(self._mesh, 1 << 16, config.scheduler.max_num_seqs or 0)
        self._has_failed = False
        # Daemons, since others may wait for ever for a rank that has failed.
        self._threads = [threading.Thread(target=self._run, args=(rank,), daemon=True) for rank in range(self._ranks)]

    def start(self) -> DeviceLimits:
        self._spec = read_spec(self._config.model.model)
        size = memory_bytes(self._mesh, self._spec.vocab_size)
        self._memories = [SharedMemory(size) for _ in range(self._mesh.pp)]
        for thread in self._threads:
            thread.start()
        limits, *_ = [self._hear(rank) for rank in range(self._ranks)]
        assert isinstance(limits, DeviceLimits)
        return limits

    def submit(self, plan: Plan) -> None:
        self._tell_all(plan)

    def submit_bitmasks(self, masks: TokenBitmasks) -> None:
        for each in self._masks:
            each.put(masks)

    def collect(self, timeout: float | None) -> Result | None:
        tp = self._mesh.tp
        try:
            first = self._said[-tp].get(timeout=timeout)
        except queue.Empty:
            return None
        if isinstance(first, BaseException):
            raise first
        assert isinstance(first, Result)
        for rank in range(self._ranks - tp):
            assert self._hear(rank) == StepDone(first.step)
        for rank in range(self._ranks - tp + 1, self._ranks):
            assert self._hear(rank) == StepDone(first.step, fingerprint(first))
        return first

    def check(self) -> None:
        pass

    def close(self) -> None:
        self._tell_all(Stop())
        if self._has_failed:
            return
        for thread, messages in zip(self._threads, self._messages, strict=True):
            if thread.is_alive():
                thread.join()
            messages.close()
        self._rings.close()

    def _tell_all(self, message: ToRanks) -> None:
        for messages in self._messages:
            messages.put(message)

    def _hear(self, rank: int) -> Any:
        said = self._said[rank].get(timeout=60)
        if isinstance(said, BaseException):
            raise said
        return said

    def _run(self, rank: int) -> None:
        try:
            mesh = mesh_of(self._config.parallel, rank, self._group.engine if self._group else 0)
            ends = self._rings.ends_of(rank)
            memory = self._memories[mesh.stage]
            ranks = shared_memory_collectives(memory, mesh, self._spec.vocab_size, spins=0, patience_s=30)
            links = stage_links(ends, self._spec.hidden, torch.float32)
            group = None if self._group is None else engine_group(self._group, mesh, 0, 30)
            worker = Worker(self._config, self._clock, None, mesh, ranks, links, engines=group)
            limits, inbox = worker.load(self._agreed), self._messages[rank]
            steps_of_all = None if group is None else GroupSteps(inbox, ranks, mesh.tp, group)
            if group is not None:
                group.wait_until_all_serve()
            self._said[rank].put(limits)
            steps = RankSteps(worker, mesh, ends)
            worker.orders.report_to(partial(self.orders.take, rank))
            while not isinstance(message := (steps_of_all or inbox).receive(), Stop):
                if isinstance(message, Order):
                    worker.orders.post(message)
                    continue
                assert isinstance(message, Plan)
                said = steps.execute(message, self._masks[rank].get)
                assert ranks.missing is None
                if group is not None:
                    group.check()
                self._said[rank].put(said)
            if steps_of_all is not None:
                steps_of_all.leave()
            worker.close()
        except BaseException as error:
            self._has_failed = True
            for said_by_rank in self._said:  # whichever is listened to
                said_by_rank.put(error)
            self._agree.abort()

    def _agreed(self, blocks: NumBlocks) -> NumBlocks:
        self._offers.append(blocks)
        self._agree.wait(60)
        states = smallest_number_of_states(each.states for each in self._offers)
        return NumBlocks(min(each.device for each in self._offers), min(each.host for each in self._offers), states)
