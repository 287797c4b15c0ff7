"""Three times as much as an engine can do, on a clock that its steps move: nothing here depends on the machine."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from quire.engine.build import ModelRuntimeInfo
from quire.engine.core import EngineCore
from quire.errors import OverloadedError
from quire.foundation.messages.from_engine import Deltas, Heartbeat
from quire.foundation.messages.workers import Result
from quire.serving.api.session.queues import AdmissionLimit, EngineQueue, QueueLimits
from tests.engine.harness import add, config
from tests.engine.test_client_liveness import ListPort, ManualClock
from tests.executor.fake import FakeExecutor

SLOTS, PROMPT, OUTPUT = 8, 32, 24
STEP_S, TOKEN_S = 0.02, 0.000_5
QUEUE_S = 2.0


class TimedExecutor(FakeExecutor):
    """A step takes its time on the clock alone."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(num_blocks=512)
        self._clock = clock

    def collect(self, timeout: float | None) -> Result | None:
        self._clock.time += STEP_S + TOKEN_S * sum(self._plans[0].counts)
        return super().collect(timeout)


class Server:
    """An engine behind an admission limit.

    Attributes:
        completed, refused: How many, by tenant.
        ttfts: Seconds until a request had a token, by tenant.
    """

    def __init__(self, queue_s: float = QUEUE_S, overload_seconds: float = QUEUE_S) -> None:
        self.clock, self._port = ManualClock(), ListPort()
        executor = TimedExecutor(self.clock)
        settings = config(max_num_seqs=SLOTS, max_num_batched_tokens=256, max_queue_time=queue_s)
        self._core = EngineCore(
            settings, executor.start(), ModelRuntimeInfo(), executor, self._port, self.clock
        )  # fmt: skip
        self._queue = EngineQueue(SLOTS)
        limits = QueueLimits(None, None, queue_s, overload_seconds, SLOTS)
        self._limit = AdmissionLimit(
            limits, [self._queue], {"requests": 0, "tokens": 0}, self.clock, lambda: len(self._open)
        )
        self._rng = random.Random(3)
        self._last = 0
        self._open: dict[int, tuple[str, float]] = {}
        self._waiting: dict[int, tuple[str, float]] = {}
        self.completed = {"flood": 0, "light": 0}
        self.refused = {"flood": 0, "light": 0}
        self.ttfts: dict[str, list[float]] = {"flood": [], "light": []}

    def send(self, tenant: str, length: int = PROMPT, *, is_retry: bool = False) -> bool:
        """A request arrives; whether it is let in."""
        prompt = [self._rng.randrange(1, 500) for _ in range(length)]
        message = add(self._last + 1, prompt, OUTPUT, arrival=self.clock.time, tenant=tenant, ignore_eos=True)
        try:
            self._limit.refuse_if_full(is_retry=is_retry)
            self._limit.enter([message])
        except OverloadedError:
            self.refused[tenant] += 1
            return False
        self._queue.expect(message)
        self._last = message.id
        self._open[message.id] = tenant, self.clock.time
        self._waiting[message.id] = tenant, self.clock.time
        self._port.inbox.append(message)
        return True

    def turn(self) -> list[str]:
        """A turn of the loop; the tenants whose requests have ended."""
        before = self.clock.time
        self._core.turn(0)
        if self.clock.time == before:
            self.clock.time += 0.001  # nothing to do
        ended = []
        for _, message in self._port.sent:
            if isinstance(message, Deltas | Heartbeat):
                self._queue.observe(message.load, message.last_add)
            if isinstance(message, Deltas):
                self._begun(message.ids)
                ended += [self._open.pop(end.id)[0] for end in message.ends]
        self._port.sent.clear()
        for tenant in ended:
            self.completed[tenant] += 1
        return ended

    def _begun(self, sequences: Iterable[int]) -> None:
        for sequence in sequences:
            if sequence in self._waiting:
                tenant, arrival = self._waiting.pop(sequence)
                self.ttfts[tenant].append(self.clock.time - arrival)

    def run(self, seconds: float, before_turn: Callable[[], None]) -> dict[str, float]:
        """Completed requests a second, by tenant."""
        end, before = self.clock.time + seconds, dict(self.completed)
        while self.clock.time < end:
            before_turn()
            self.turn()
        return {tenant: (count - before[tenant]) / seconds for tenant, count in self.completed.items()}

    def closed_loop(self, clients: int, seconds: float) -> float:
        """What it does for clients that wait for their answers."""

        def refill() -> None:
            while len(self._open) < clients and self.send("flood"):
                pass

        return self.run(seconds, refill)["flood"]

    def arrivals(self, rates: dict[str, float], seconds: float) -> dict[str, float]:
        """What it does for clients that do not."""
        rngs = {tenant: random.Random(tenant) for tenant in rates}
        due = {tenant: self.clock.time + rngs[tenant].expovariate(rate) for tenant, rate in rates.items()}

        def arrive() -> None:
            for tenant, rate in rates.items():
                while due[tenant] <= self.clock.time:
                    self.send(tenant)
                    due[tenant] += rngs[tenant].expovariate(rate)

        return self.run(seconds, arrive)


def test_what_is_offered_beyond_the_maximum_is_turned_away_and_the_rest_served_as_ever() -> None:
    server = Server()
    server.closed_loop(2 * SLOTS, 4)
    refused = server.refused["flood"]  # at most a few, while the server does not know its speed
    maximum = server.closed_loop(2 * SLOTS, 20)
    assert maximum > 0.5 * SLOTS / (OUTPUT * STEP_S)
    assert server.refused["flood"] == refused
    server.arrivals({"flood": 3 * maximum}, 4)
    server.ttfts["flood"].clear()
    rate = server.arrivals({"flood": 3 * maximum}, 40)["flood"]
    assert rate >= 0.97 * maximum
    assert server.refused["flood"] > 1.8 * maximum * 40
    assert 0.5 * QUEUE_S < p99(server, "flood") <= 2 * QUEUE_S, "the queue is used, and no longer than asked for"


def test_of_a_light_tenant_what_is_let_in_does_not_wait_behind_a_flood() -> None:
    server = Server()
    server.closed_loop(2 * SLOTS, 4)
    maximum = server.closed_loop(2 * SLOTS, 10)
    server.arrivals({"flood": 3 * maximum}, 6)
    rates = server.arrivals({"flood": 3 * maximum, "light": 0.1 * maximum}, 60)
    assert len(server.ttfts["light"]) >= 10
    assert p99(server, "light") < 0.5 * p99(server, "flood")
    assert rates["flood"] >= 0.8 * maximum


def test_by_default_the_queue_is_short_under_overload() -> None:
    server = Server(queue_s=30.0, overload_seconds=1.0)
    server.closed_loop(2 * SLOTS, 4)
    maximum = server.closed_loop(2 * SLOTS, 20)
    server.ttfts["flood"].clear()
    rate = server.arrivals({"flood": 3 * maximum}, 120)["flood"]
    ttfts = server.ttfts["flood"]
    assert rate >= 0.97 * maximum
    assert sum(each <= 2 for each in ttfts) / 120 >= 0.9 * maximum
    assert p99(server, "flood") <= 3


def test_a_burst_is_let_in_and_so_is_who_comes_behind_it() -> None:
    server = Server(queue_s=120.0, overload_seconds=1.0)
    server.closed_loop(2 * SLOTS, 4)
    server.arrivals({"flood": 500.0}, 2.0)
    assert server.refused == {"flood": 0, "light": 0}
    server.arrivals({"light": 5.0}, 10)
    assert server.refused == {"flood": 0, "light": 0}


def test_clients_that_wait_for_their_answers_are_no_overload() -> None:
    server = Server(queue_s=120.0, overload_seconds=1.0)
    server.closed_loop(20 * SLOTS, 30)
    assert sorted(server.ttfts["flood"])[-50] > 5
    assert server.refused["flood"] == 0


def test_clients_whose_answers_end_together_are_no_overload() -> None:
    server = Server(queue_s=120.0, overload_seconds=1.0)
    server.closed_loop(2 * SLOTS, 4)
    server.arrivals({"light": 80.0}, 1.0)
    for _ in range(4):
        server.run(10.0, lambda: None)  # all have ended
        server.arrivals({"light": 40.0}, 2.0)  # and come again, one after the other
    assert server.refused == {"flood": 0, "light": 0}


def test_large_requests_are_let_in_under_overload_too() -> None:
    server = Server(queue_s=120.0, overload_seconds=1.0)
    server.closed_loop(2 * SLOTS, 4)
    maximum = server.closed_loop(2 * SLOTS, 8)
    server.arrivals({"flood": 3 * maximum}, 10)
    let_in = 0
    for _ in range(40):
        server.arrivals({"flood": 3 * maximum}, 0.5)
        let_in += server.send("light", length=700)  # alone more than the queue may have
    assert 2 <= let_in < 40
    assert server.refused["flood"]


def test_overload_ends_when_the_flood_ends() -> None:
    server = Server(queue_s=120.0, overload_seconds=1.0)
    server.closed_loop(2 * SLOTS, 4)
    maximum = server.closed_loop(2 * SLOTS, 8)
    server.arrivals({"flood": 3 * maximum}, 10)
    refused = server.refused["flood"]
    assert refused
    server.arrivals({"light": 0.1 * maximum}, 6)
    server.arrivals({"flood": 500.0}, 2.0)
    assert server.refused == {"flood": refused, "light": 0}


def test_clients_that_come_back_do_not_prolong_an_overload() -> None:
    server = Server(queue_s=120.0, overload_seconds=1.0)
    server.closed_loop(2 * SLOTS, 4)
    maximum = server.closed_loop(2 * SLOTS, 8)
    server.arrivals({"flood": 3 * maximum}, 8)
    away = server.refused["flood"]
    assert away > 100
    due = [server.clock.time + place / away for place in range(away)]

    def again() -> None:
        while due and due[0] <= server.clock.time:
            if not server.send("light", is_retry=True):
                due.append(due[0] + 1.0)
            del due[0]

    server.run(5.0, again)
    assert due == [], "all are let in as a burst is"


def p99(server: Server, tenant: str) -> float:
    ttfts = sorted(server.ttfts[tenant])
    return ttfts[int(0.99 * len(ttfts))]
