"""An executor of ranks that divide one model, each in a process of its own.

Plans go to all ranks at once through shared memory; one rank sends results, the others say what they have sampled. This
process loads no torch. Knows nothing about requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from quire.compute.mesh import Mesh, mesh_of
from quire.errors import EngineDeadError
from quire.foundation.clock import Clock
from quire.foundation.config import Config
from quire.foundation.messages.workers import DeviceLimits, OrderDone, Plan, Profile, Profiled, Result, TokenBitmasks
from quire.foundation.processes.launch import GroupEnds
from quire.planning.state_memory import smallest_number_of_states
from quire.runtime.executor.executor import FaultHook, no_faults
from quire.runtime.executor.nodes.head_ranks import Ranks, start_ranks
from quire.runtime.executor.rank_answers import RankOrders, StageProgress
from quire.runtime.executor.rank_messages import (
    Bitmasks,
    Blocks,
    FromRank,
    Offer,
    Offers,
    StepDone,
    Stop,
    ToRanks,
    fingerprint,
)
from quire.runtime.worker.async_scheduling import max_in_flight

T = TypeVar("T")
_LOOK_S = 0.5
FIRST_PATIENCE_S = 3600.0
"""How long the first rank may take to come to a point of the start."""
START_PATIENCE_S = 300.0
"""How long the first rank then waits for the last one."""


def exchanges_of(mesh: Mesh) -> int:
    """The number of rounds in which ranks on GPUs say how to reach their memory: two for ranks that divide layers
    (compute/collectives/cards.py), and two for stages (card_stage_links.py)."""
    return 2 * (mesh.tp > 1) + 2 * (mesh.pp > 1)


class MultiRankExecutor:
    """Workers in several processes. When a rank dies or hangs, or a step raises in one, `collect` raises that from then
    on. The ranks share `group` with ranks of other engines, if there are any."""

    def __init__(
        self, config: Config, clock: Clock, fault: FaultHook = no_faults, group: GroupEnds | None = None
    ) -> None:
        self._config = config
        self._clock = clock
        self._fault = fault
        self._group = group
        self._ranks: Ranks | None = None
        self._failure: BaseException | None = None
        self._results: deque[Result] = deque()
        self._sampled: dict[int, int] = {}  # by step, the fingerprint of what was sampled
        self._mesh = mesh_of(config.parallel)
        self._on_gpus = config.device.device == "cuda"
        self._ready_host_blocks = [0] * self._mesh.size
        self._reported_host_blocks = 0
        self._stages = StageProgress(self._mesh, config.parallel.distributed_timeout_seconds, clock)
        self.orders = RankOrders(self._mesh.size, self._broadcast, self.check, self._name)

    @property
    def max_in_flight(self) -> int:
        """A step in each stage, and one that waits."""
        return max_in_flight(self._mesh.pp)

    def start(self) -> DeviceLimits:
        """Start all ranks; they take the smallest number of blocks that any of them has room for.

        Raises:
            SetupError: The model cannot be served.
            EngineDeadError: A rank died, or came too late; the message says which.
        """
        try:
            self._ranks = start_ranks(self._config, self._clock, self._group)
            for _ in range(exchanges_of(self._mesh) if self._on_gpus else 0):
                self._ranks.broadcast(Offers([offer.data for offer in self._from_all(Offer, "reach its GPU")]))
            blocks = self._from_all(Blocks, "read its weights")
            states = smallest_number_of_states(each.states for each in blocks)
            of_all = Blocks(min(each.device for each in blocks), min(each.host for each in blocks), states)
            self._ranks.broadcast(of_all)
            limits = self._from_all(DeviceLimits, "become ready")[0]
            return msgspec.structs.replace(limits, masked_drafts=False)  # nobody passes on what ranks propose
        except BaseException as error:
            self._failure = error
            self.close()
            raise

    def submit(self, plan: Plan) -> None:
        self._fault("submit", plan.step)
        self._stages.submitted(plan)
        self._broadcast(plan)

    def submit_bitmasks(self, masks: TokenBitmasks) -> None:
        self._stages.unmasked(masks.step)
        self._broadcast(Bitmasks(masks.step, masks.rows, [bytes(each) for each in masks.bits]))

    def collect(self, timeout: float | None) -> Result | None:
        deadline = None if timeout is None else self._clock.now() + timeout
        while not self._results:
            if self._failure is not None:
                raise self._failure
            wait_s = None if deadline is None else max(0.0, deadline - self._clock.now())
            self._listen(self._until_look(wait_s))
            if not self._results and wait_s is not None and wait_s <= 0.0:
                return None
        result = self._results.popleft()
        self._fault("collect", result.step)
        return result

    def check(self) -> None:
        """Raise if a rank is gone while nobody waits for it."""
        if self._failure is not None:
            raise self._failure
        self._listen(0.0)

    def profile_kernels(self, run: Callable[[], object]) -> list[dict[str, tuple[float, int]]]:
        """Return by rank what `KernelProfile` counts while `run` submits plans and collects all their results in this
        thread."""
        assert self._on_gpus and self._ranks is not None, "ranks on GPUs are profiled, once they have started"
        self._profile(begins=True)
        run()
        return self._profile(begins=False)

    def _profile(self, *, begins: bool) -> list[dict[str, tuple[float, int]]]:
        """Order a profile of all ranks, and wait for what they say."""
        assert self._ranks is not None
        self.orders.post(Profile(begins))
        while not (done := self.orders.done()):
            self._take(self._ranks.receive(_LOOK_S))
        (profiled,) = done
        assert isinstance(profiled, Profiled), "adapters are loaded meanwhile"
        return profiled.kernels

    def close(self) -> None:
        """Wait for what is running, unless there was a failure, and end all ranks."""
        ranks, self._ranks = self._ranks, None
        if ranks is None:
            return
        if self._failure is None:
            try:
                ranks.broadcast(Stop())
            except EngineDeadError as error:
                self._failure = error
        ranks.close(at_once=self._failure is not None)

    def _listen(self, wait_s: float | None) -> None:
        """Take what ranks say within this time. If a rank is lost or stuck, raise that now and from then on."""
        try:
            assert self._ranks is not None, "not started, or closed"
            self._take(self._ranks.receive(wait_s))
            self._raise_if_stuck()
        except Exception as error:
            self._failure = error
            raise

    def _until_look(self, wait_s: float | None) -> float | None:
        """Return how long to wait for messages at a time: among several stages, this process looks for a stuck one."""
        if self._mesh.pp == 1:
            return wait_s
        return _LOOK_S if wait_s is None else min(_LOOK_S, wait_s)

    def _name(self, rank: int) -> str:
        assert self._ranks is not None, "not started, or closed"
        return self._ranks.name(rank)

    def _broadcast(self, message: ToRanks) -> None:
        if self._failure is not None:
            return  # `collect` raises it
        assert self._ranks is not None, "not started, or closed"
        try:
            self._ranks.broadcast(message)
        except EngineDeadError as error:
            self._failure = error

    def _take(self, received: Iterable[tuple[int, FromRank]]) -> None:
        """Take in results, what other ranks have sampled in the same steps, and orders that are done.

        Raises:
            EngineDeadError: Ranks have sampled different tokens.
        """
        assert self._ranks is not None
        for rank, message in received:
            if isinstance(message, OrderDone):
                self.orders.take(rank, message)
                continue
            if isinstance(message, Result):
                self._results.append(self._with_blocks_of_all(rank, message))
                message = StepDone(message.step, fingerprint(message), message.ready_host_blocks)
            assert isinstance(message, StepDone), message
            if message.ready_host_blocks:
                self._ready_host_blocks[rank] = message.ready_host_blocks
            self._stages.done(rank, message.step)
            if rank < self._mesh.size - self._mesh.tp:
                continue  # it samples nothing
            if self._sampled.setdefault(message.step, message.tokens) != message.tokens:
                raise EngineDeadError(
                    f"{self._ranks.name(rank)} sampled other tokens than another rank in step {message.step}. Logits "
                    "processors must compute the same in every rank."
                )
            self._sampled.pop(message.step - 2 * self.max_in_flight, None)

    def _with_blocks_of_all(self, rank: int, result: Result) -> Result:
        """A rank's result with the host blocks that are ready in all ranks: on GPUs, each rank makes its own ready in
        its own time."""
        if not self._on_gpus:
            return result
        self._ready_host_blocks[rank] = result.ready_host_blocks or self._ready_host_blocks[rank]
        ready = min(self._ready_host_blocks)
        said = ready if ready != self._reported_host_blocks else 0
        self._reported_host_blocks = ready
        return msgspec.structs.replace(result, ready_host_blocks=said)

    def _raise_if_stuck(self) -> None:
        assert self._ranks is not None
        if (stuck := self._stages.stuck()) is not None:
            raise EngineDeadError(
                f"{self._ranks.name(stuck.rank)} was stuck: in step {stuck.step} the other stages waited "
                f"{stuck.seconds:g} s for it."
            )

    def _from_all(self, kind: type[T], what: str) -> list[T]:
        """Return the next message of every rank, by which it says that it has come to this point of its start."""
        assert self._ranks is not None
        asked = self._config.parallel.distributed_timeout_seconds
        patience = asked or FIRST_PATIENCE_S
        deadline = self._clock.now() + patience
        found: dict[int, T] = {}
        while len(found) < self._ranks.number:
            received = self._ranks.receive(_LOOK_S)
            now = self._clock.now()
            if received and not found and asked is None:
                patience = START_PATIENCE_S
                deadline = now + patience
            for rank, message in received:
                assert isinstance(message, kind), message
                found[rank] = message
            missing = [rank for rank in range(self._ranks.number) if rank not in found]
            if missing and now > deadline:
                names = ", ".join(map(self._ranks.name, missing))
                raise EngineDeadError(
                    f"{names} did not {what} within {patience:g} s: see what keeps it (its disk, its processor, a "
                    "signal), or give it more time by --distributed-timeout-seconds."
                )
        return [found[rank] for rank in range(self._ranks.number)]
