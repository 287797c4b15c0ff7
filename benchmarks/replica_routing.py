"""Replicas behind one address: how many prefix hits are kept, and how evenly work is spread.

    python -m benchmarks.replica_routing [--replicas 8] [--prefixes 512] [--prefix-tokens 1000] [--requests 20000]
        [--blocks 2560]

Requests ask for prefixes by Zipf's law, each with a suffix of its own, and arrive at random. Schedulers, block pools
and the placement are the real ones; the device is a stub whose steps take a time that grows with their tokens, on a
clock of its own. The one engine that they are compared with has the KV cache, the rows and the speed of all replicas.
Prints for each way to choose: prefix hits as a share of the one engine's, and the highest replica's share of requests
and of computed tokens, as multiples of the mean.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from quire.engine.build import ModelRuntimeInfo
from quire.engine.core import EngineCore
from quire.foundation.clock import Clock
from quire.foundation.config import Config
from quire.foundation.config.router import RouterConfig
from quire.foundation.messages.from_engine import Deltas, FromEngine, Heartbeat, Load
from quire.foundation.messages.to_engine import Add, ToEngine
from quire.foundation.messages.workers import DeviceLimits, Plan, Result
from quire.runtime.executor.executor import NoOrders
from quire.sampling_params import SamplingParams
from quire.serving.api.session.queues import EngineQueue, Placement
from quire.serving.router.backend import ScrapedLoad
from quire.serving.router.backend_list import BackendAddress
from quire.serving.router.fleet import Fleet
from quire.serving.router.routed_request import PromptFields, RoutedRequest, prefix_blocks

BLOCK_SIZE = 16
SLOTS = 64
STEP_S, TOKEN_S = 0.005, 50e-6
TURN_S = 0.005
VOCABULARY = 32_000
SCRAPE_S = 5.0
"""How often a router asks for the load of servers."""


@dataclass(frozen=True)
class Trace:
    """What is asked.

    Attributes:
        prefixes, prefix_tokens: How many there are, and their length.
        requests: How many there are.
        rate: Requests a second for each replica.
        exponent: Of Zipf's law.
    """

    prefixes: int = 512
    prefix_tokens: int = 1_000
    requests: int = 20_000
    rate: float = 40.0
    exponent: float = 1.0


@dataclass(frozen=True)
class Outcome:
    """What a way to choose came to.

    Attributes:
        hits: Prompt tokens found in prefix caches.
        queries: Prompt tokens looked up.
        requests, computed: Of each replica; tokens of prompts that were not found, and of outputs.
    """

    hits: int
    queries: int
    requests: list[int]
    computed: list[int]

    @property
    def max_requests(self) -> float:
        """Of one replica, as a multiple of the mean."""
        return max(self.requests) * len(self.requests) / sum(self.requests)

    @property
    def max_computed(self) -> float:
        """The same of tokens."""
        return max(self.computed) * len(self.computed) / sum(self.computed)


class SimulatedClock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time


class TimedExecutor:
    """Samples token 7; its steps take their time one after the other."""

    max_in_flight = 2
    orders = NoOrders()

    def __init__(self, clock: Clock, speed: float) -> None:
        self._clock = clock
        self._speed = speed
        self._plans: deque[tuple[Plan, float]] = deque()
        self._free_at = 0.0

    def check(self) -> None:
        """It never breaks."""

    def submit(self, plan: Plan) -> None:
        self._free_at = max(self._free_at, self._clock.now()) + STEP_S + TOKEN_S / self._speed * sum(plan.counts)
        self._plans.append((plan, self._free_at))

    def collect(self, timeout: float | None) -> Result | None:
        if self._plans[0][1] > self._clock.now():
            return None
        plan, _ = self._plans.popleft()
        return Result(plan.step, [1] * len(plan.sampled_rows), [7] * len(plan.sampled_rows))


class ListPort:
    """A port in this process."""

    def __init__(self) -> None:
        self.inbox: list[ToEngine] = []
        self.sent: list[FromEngine] = []

    def drain(self, wait: float | None) -> list[ToEngine]:
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, client: int, message: FromEngine) -> None:
        self.sent.append(message)


class Replica:
    """A real engine on a stub, and what its clients know of its queue."""

    def __init__(self, clock: Clock, blocks: int, speed: int) -> None:
        config = Config().with_values(
            max_num_seqs=SLOTS * speed, max_num_batched_tokens=2_048 * speed,
            max_model_len=min(4_096, blocks * BLOCK_SIZE), block_size=BLOCK_SIZE,
        )  # fmt: skip
        self._port = ListPort()
        limits = DeviceLimits(num_blocks=blocks * speed, vocab_size=VOCABULARY)
        executor = TimedExecutor(clock, speed)
        self._core = EngineCore(config, limits, ModelRuntimeInfo(), executor, self._port, clock)  # type: ignore[arg-type]
        self.queue = EngineQueue(SLOTS * speed)
        self.requests = self.outputs = self.ended = 0

    def send(self, add: Add) -> None:
        """A request."""
        self.requests += 1
        self._port.inbox.append(add)

    def turn(self) -> None:
        """One turn of the loop, if there is anything to do."""
        if self.requests == self.ended:
            return
        self._core.turn(0.0)
        for message in self._port.sent:
            if isinstance(message, Deltas | Heartbeat):
                self.queue.observe(message.load, message.last_add)
            if isinstance(message, Deltas):
                self.outputs += len(message.tokens)
                self.ended += len(message.ends)
        self._port.sent.clear()

    @property
    def hits(self) -> tuple[int, int]:
        """Prompt tokens that were found, and that were looked up."""
        load = self._core.heartbeat().load
        return load.prefix_hits, load.prefix_queries


Choose = Callable[[Add], int]


def round_robin(replicas: Sequence[Replica], clock: Clock) -> Choose:
    """One after the other."""
    turns = itertools.cycle(range(len(replicas)))

    def choose(add: Add) -> int:
        number = next(turns)
        replicas[number].queue.expect(add)
        return number

    return choose


def least_loaded(replicas: Sequence[Replica], clock: Clock) -> Choose:
    """The one with the fewest sequences."""

    def choose(add: Add) -> int:
        number = min(range(len(replicas)), key=lambda number: replicas[number].queue.open_sequences)
        replicas[number].queue.expect(add)
        return number

    return choose


def consistent_hashing(replicas: Sequence[Replica], clock: Clock) -> Choose:
    """By the first block alone, whatever the load."""
    placement = Placement([replica.queue for replica in replicas], BLOCK_SIZE, clock)

    def choose(add: Add) -> int:
        blocks = placement.blocks(add)
        number = int.from_bytes(blocks[0][:8], "big") % len(replicas)
        replicas[number].queue.expect(add)
        return number

    return choose


def prefix_and_load(replicas: Sequence[Replica], clock: Clock) -> Choose:
    """As a server does it."""
    placement = Placement([replica.queue for replica in replicas], BLOCK_SIZE, clock)
    able = [True] * len(replicas)
    return lambda add: placement.place(add, placement.blocks(add), able)


def router(replicas: Sequence[Replica], clock: Clock) -> Choose:
    """As `quire route` does it, which sees the prompt's text, and the servers' load now and then."""
    fleet = Fleet(RouterConfig(), clock)
    fleet.update([BackendAddress(f"http://server-{number}") for number in range(len(replicas))])
    backends = list(fleet.backends)
    for backend in backends:
        backend.learn_cards({"m": {}})
        backend.complaint = ""
    scraped_at = -SCRAPE_S

    def choose(add: Add) -> int:
        nonlocal scraped_at
        if clock.now() - scraped_at >= SCRAPE_S:
            scraped_at = clock.now()
            for backend, replica in zip(backends, replicas, strict=True):
                backend.load = _scraped(replica.queue.load)
        for backend, replica in zip(backends, replicas, strict=True):
            backend.in_flight = replica.requests - replica.ended
        fields = PromptFields(model="m", prompt=msgspec.Raw("".join(f"{token:04x}" for token in add.tokens).encode()))
        blocks = prefix_blocks(fields)
        request = RoutedRequest(b"", [], b"", "m", blocks, fields.num_tokens, clock.now())
        return backends.index(fleet.choose(request))

    return choose


def _scraped(load: Load) -> ScrapedLoad:
    used = 1 - load.free_blocks / load.num_blocks if load.num_blocks else 0.0
    return ScrapedLoad(load.running, load.waiting, load.num_blocks * BLOCK_SIZE, used)


WAYS = {
    "round robin": round_robin,
    "least loaded": least_loaded,
    "consistent hashing": consistent_hashing,
    "prefix and load": prefix_and_load,
    "quire route": router,
}


def run(
    way: Callable[[Sequence[Replica], Clock], Choose], replicas: int, blocks: int, trace: Trace, speed: int = 1
) -> Outcome:
    """The whole trace.

    Args:
        way: How to choose.
        replicas: How many there are.
        blocks: In the KV cache of each.
        speed: What one replica has of everything: blocks, rows, tokens a second; the trace is for so many more.
    """
    rng, clock = random.Random(0), SimulatedClock()
    prefixes = [[rng.randrange(VOCABULARY) for _ in range(trace.prefix_tokens)] for _ in range(trace.prefixes)]
    weights = list(itertools.accumulate(rank**-trace.exponent for rank in range(1, trace.prefixes + 1)))
    engines = [Replica(clock, blocks, speed) for _ in range(replicas)]
    choose = way(engines, clock)
    arrival = 0.0
    for number in range(1, trace.requests + 1):
        arrival += rng.expovariate(trace.rate * replicas * speed)
        (prefix,) = rng.choices(prefixes, cum_weights=weights)
        prompt = prefix + [rng.randrange(VOCABULARY) for _ in range(rng.randrange(16, 80))]
        params = SamplingParams(max_tokens=rng.randrange(8, 25), temperature=0.0)
        while clock.time < arrival:
            _turn(engines, clock)
        add = Add(number, prompt, len(prompt), params, [], number, arrival)
        engines[choose(add)].send(add)
    while any(engine.requests > engine.ended for engine in engines):
        _turn(engines, clock)
    found = [engine.hits for engine in engines]
    computed = [queries - hits + engine.outputs for (hits, queries), engine in zip(found, engines, strict=True)]
    hits, queries = (sum(values) for values in zip(*found, strict=True))
    return Outcome(hits, queries, [engine.requests for engine in engines], computed)


def _turn(engines: Sequence[Replica], clock: SimulatedClock) -> None:
    clock.time += TURN_S
    for engine in engines:
        engine.turn()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--prefixes", type=int, default=512)
    parser.add_argument("--prefix-tokens", type=int, default=1_000)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--blocks", type=int, default=2_560, help="in the KV cache of each replica")
    options = parser.parse_args()
    trace = Trace(prefixes=options.prefixes, prefix_tokens=options.prefix_tokens, requests=options.requests)
    one = run(round_robin, 1, options.blocks, trace, speed=options.replicas)
    print(f"one engine: {one.hits / one.queries:.1%} of prompt tokens found", flush=True)
    for name, way in WAYS.items():
        outcome = run(way, options.replicas, options.blocks, trace)
        print(
            f"{name:20} {outcome.hits / one.hits:6.1%} of these hits, most requests {outcome.max_requests:.2f}, "
            f"most computed tokens {outcome.max_computed:.2f} times the mean",
            flush=True,
        )


if __name__ == "__main__":
    main()
