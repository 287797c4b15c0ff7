"""What the engine learns from all ranks that divide a model: which orders they have done, and how far each is.

The engine tells all ranks in the order of the plans; of an adapter, say, each rank reads the files and keeps its part.
Within a stage, ranks see themselves who keeps them waiting; between stages only the engine does.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from quire.compute.mesh import Mesh
from quire.foundation.clock import Clock
from quire.foundation.messages.workers import AdapterLoaded, BlocksLoaded, BlocksSaved, Order, OrderDone, Plan, Profiled

PATIENCE_S = 60.0
"""How long a stage may take for a step by default."""


class RankOrders:
    """The Orders of ranks that divide one model: an order is done once all of them have done it.

    Args:
        ranks: How many ranks there are.
        broadcast: Sends a message to all of them.
        listen: Takes in what they have said meanwhile; raises if one is lost.
        name: Returns what a rank is called in messages.
    """

    def __init__(
        self,
        ranks: int,
        broadcast: Callable[[Order], None],
        listen: Callable[[], None],
        name: Callable[[int], str],
    ) -> None:
        self._broadcast = broadcast
        self._listen = listen
        self._name = name
        self._answers: defaultdict[type, list[deque[OrderDone]]] = defaultdict(lambda: [deque() for _ in range(ranks)])
        self._owed = 0

    def post(self, order: Order) -> None:
        self._owed += 1
        self._broadcast(order)

    def take(self, rank: int, answer: OrderDone) -> None:
        """Take in a rank's answer. Each rank answers orders of one kind in the order in which it was told."""
        self._answers[type(answer)][rank].append(answer)

    def done(self) -> list[OrderDone]:
        done: list[OrderDone] = []
        if self._owed:
            self._listen()
            for of_ranks in self._answers.values():
                while all(of_ranks):
                    done.append(self._agreed([answers.popleft() for answers in of_ranks]))
            self._owed -= len(done)
        return done

    def _agreed(self, answers: Sequence[OrderDone]) -> OrderDone:
        """Sum up what all ranks say of one order."""
        loaded = [answer for answer in answers if isinstance(answer, AdapterLoaded)]
        if loaded:
            return self._agreed_adapter(loaded)
        if moved := [answer for answer in answers if isinstance(answer, BlocksLoaded | BlocksSaved)]:
            assert len({(type(each), each.number) for each in moved}) == 1, "ranks move blocks in another order"
            failed = sorted({block for each in moved for block in each.failed})
            return type(moved[0])(moved[0].number, failed, max(each.ms for each in moved))
        return Profiled([kernels for answer in answers if isinstance(answer, Profiled) for kernels in answer.kernels])

    def _agreed_adapter(self, answers: Sequence[AdapterLoaded]) -> AdapterLoaded:
        """Sum up what all ranks say of one adapter: it is loaded if it is in all of them, with the same contents."""
        first = answers[0]
        failed = [(rank, answer) for rank, answer in enumerate(answers) if answer.error]
        if failed:
            rank, answer = failed[0]
            return answer if len(failed) == len(answers) else _refused(answer, f"{self._name(rank)}: {answer.error}")
        if any(answer.adapter != first.adapter for answer in answers):
            name, path = first.adapter.name, first.adapter.path
            return _refused(first, f"The files of adapter '{name}' in {path} differ from rank to rank: load it again.")
        return first


def _refused(answer: AdapterLoaded, error: str) -> AdapterLoaded:
    return msgspec.structs.replace(answer, error=error)


class Stuck(NamedTuple):
    """A rank that the others have waited for in a step, and for how long."""

    rank: int
    step: int
    seconds: float


class StageProgress:
    """Follows how far each rank is. A `patience_s` of None means PATIENCE_S."""

    def __init__(self, mesh: Mesh, patience_s: float | None, clock: Clock) -> None:
        self._clock = clock
        self._patience_s = patience_s or PATIENCE_S
        self._is_divided = mesh.pp > 1
        self._done = [0] * mesh.size
        self._submitted = 0
        self._masked: set[int] = set()  # steps that wait for bitmasks
        self._since = clock.now()

    def submitted(self, plan: Plan) -> None:
        """The engine has sent a plan."""
        if min(self._done) == self._submitted:
            self._since = self._clock.now()
        self._submitted = plan.step
        if plan.masked:
            self._masked.add(plan.step)

    def unmasked(self, step: int) -> None:
        """The engine has sent the step's bitmasks."""
        self._masked.discard(step)
        self._since = self._clock.now()

    def done(self, rank: int, step: int) -> None:
        """A rank has done its part of a step."""
        self._done[rank] = step
        self._since = self._clock.now()

    def stuck(self) -> Stuck | None:
        """The rank that all others have waited for too long: the first of those that have done least, which needs
        nothing from any other."""
        least = min(self._done)
        seconds = self._clock.now() - self._since
        if not self._is_divided or least == self._submitted or self._masked or seconds < self._patience_s:
            return None
        return Stuck(self._done.index(least), least + 1, self._patience_s)
