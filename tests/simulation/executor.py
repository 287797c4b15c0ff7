"""The fake executor on the virtual clock: steps take time, and go wrong when a fault says so."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from quire.foundation.messages.workers import DeviceLimits, Plan, Result, TokenBitmasks, Vector
from quire.runtime.executor.executor import Orders
from tests.executor.fake import FakeExecutor
from tests.simulation.blocking import BlockingThread
from tests.simulation.model import POISON
from tests.simulation.world import World

NAN = "The logits of this sequence are not finite."


class PlantedFault(Exception):
    """What a simulated step raises."""


class PlantedDeath(BaseException):
    """The process is ended from outside at this point."""


@dataclass
class ExecutorFaults:
    """What is to go wrong, each once.

    Attributes:
        raises: At the next of these points an exception is raised: `submit` or `collect`.
        hangs: The next step never ends.
        slow_s: The next step takes so much longer.
        breaks_row: A row of the next result is not finite.
    """

    raises: str = ""
    hangs: bool = False
    slow_s: float = 0.0
    breaks_row: bool = False


class SimulatedExecutor:
    """An Executor whose steps end some time after they were submitted, one after the other.

    Args:
        fake: Computes them.
        thread: Waits for them.
        world: Gives the time.
        token_s: What a token takes, in seconds.
        effect: Called at every point where the process may be ended.
        faults: What is to go wrong.

    Attributes:
        steps: Those whose results were collected.
        last_result: When that was last.
        excused_until: Until then a planted fault keeps it from bringing any.
    """

    def __init__(
        self,
        fake: FakeExecutor,
        thread: BlockingThread,
        world: World,
        token_s: float,
        effect: Callable[[], None],
        faults: ExecutorFaults,
    ) -> None:
        self._fake = fake
        self._thread = thread
        self._world = world
        self._token_s = token_s
        self._effect = effect
        self.faults = faults
        self.steps = 0
        self.last_result = self.excused_until = world.now()
        self._in_flight: deque[Plan] = deque()
        self._ends: deque[float] = deque()
        self._masks_due: set[int] = set()
        self._random = world.random(f"executor {world.now()}")

    @property
    def max_in_flight(self) -> int:
        return self._fake.max_in_flight

    @property
    def orders(self) -> Orders:
        return self._fake.orders

    def start(self) -> DeviceLimits:
        return self._fake.start()

    def tear(self) -> None:
        """Die with plans in flight, which leave host blocks half written."""
        self._fake.tear()

    def submit(self, plan: Plan) -> None:
        self._raise("submit")
        self._fake.submit(plan)
        if POISON in plan.tokens:
            self._world.say("poison")
            raise PlantedDeath
        seconds = self._token_s * (4 + sum(plan.counts)) * self._random.uniform(0.8, 1.2) + self.faults.slow_s
        begins = max(self._world.now(), self._ends[-1] if self._ends else 0.0)
        end = float("inf") if self.faults.hangs else begins + seconds
        if self.faults.hangs or self.faults.slow_s:
            self.excused_until = end
        self.faults.hangs, self.faults.slow_s = False, 0.0
        self._ends.append(end)
        self._in_flight.append(plan)
        if plan.masked:
            self._masks_due.add(plan.step)
        self._effect()

    def submit_bitmasks(self, masks: TokenBitmasks) -> None:
        self._fake.submit_bitmasks(masks)
        self._masks_due.discard(masks.step)

    def collect(self, timeout: float | None) -> Result | None:
        self._raise("collect")
        assert timeout is not None
        deadline = self._world.now() + timeout
        while (end := self._end()) > self._world.now():
            if self._world.now() >= deadline:
                return None
            self._thread.wait(min(end, deadline) - self._world.now())
        plan, _ = self._in_flight.popleft(), self._ends.popleft()
        result = self._fake.collect(0.0)
        assert result is not None
        self.steps += 1
        self.last_result = self._world.now()
        self._world.say(f"step {plan.step} of {sum(plan.counts)} tokens brings {result.tokens}")
        if self.faults.breaks_row and (rows := len(result.counts) + len(result.vectors)):
            self.faults.breaks_row = False
            result = with_broken_row(result, self._random.randrange(rows))
        self._effect()
        return replace(result, device_ms=1e3 * self._token_s * sum(plan.counts))

    def check(self) -> None:
        self._fake.check()

    def close(self) -> None:
        self._fake.close()

    def _end(self) -> float:
        """When the oldest step has a result."""
        return float("inf") if self._in_flight[0].step in self._masks_due else self._ends[0]

    def _raise(self, point: str) -> None:
        self._effect()
        if self.faults.raises == point:
            self.faults.raises = ""
            raise PlantedFault(f"planted at {point}")


def with_broken_row(result: Result, row: int) -> Result:
    """A result in which one row failed and brought nothing: a sampled one, or one behind them that is pooled."""
    if row >= len(result.counts):
        vectors = list(result.vectors)
        vectors[row - len(result.counts)] = Vector(error=NAN)
        return replace(result, vectors=vectors)
    start = sum(result.counts[:row])
    end = start + result.counts[row]
    counts = [*result.counts[:row], 0, *result.counts[row + 1 :]]
    logprobs = [*result.logprobs[:start], *result.logprobs[end:]] if result.logprobs else []
    tokens = [*result.tokens[:start], *result.tokens[end:]]
    return replace(result, counts=counts, tokens=tokens, logprobs=logprobs, errors=[(row, NAN)])
