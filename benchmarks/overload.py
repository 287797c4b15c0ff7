"""A server that is offered more than it can do: how much it still does, whom it turns away, and how long others wait.

    quire serve --max-queue-time 2 --max-num-seqs 32 --api-key flood light &
    python -m benchmarks.overload http://127.0.0.1:8000 --seconds 120

With default flags (`quire serve` alone) the queue is short only while there is overload, and a burst is let in.

First its maximum: so many clients in a closed loop that it is never idle. Then a multiple of that as Poisson arrivals
by the key `flood`, and the maximum once more: the two are averaged, so that a machine which becomes slower meanwhile
does not tip the scales. Then the flood beside a tenth of the maximum by the key `light`, and that tenth alone. With
`--burst` so many requests at once come last.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from quire.foundation.http_client.http1 import HttpError
from quire.tools.bench.client import Connections

LIGHT_SHARE = 0.1
WARM_UP_S = 3.0
"""What ends in this time of a run does not count: a server that was idle has nothing to finish yet."""
CONNECT_S = 10.0
GOOD_TTFT_S = 2.0
"""A request is a good one if its first token comes within this time."""


@dataclass
class Outcomes:
    """What became of the requests of a run.

    Attributes:
        seconds: How long completed requests were counted.
        completed: Those that ended within that time.
        good: Those of them whose first token came within GOOD_TTFT_S.
        ttfts: Seconds to the first token of each that was let in.
        statuses: Of all answers; 0 for a connection that broke.
    """

    seconds: float
    completed: int = 0
    good: int = 0
    ttfts: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)

    @property
    def rate(self) -> float:
        """Completed requests a second."""
        return self.completed / self.seconds

    @property
    def goodput(self) -> float:
        """Good requests a second."""
        return self.good / self.seconds

    @property
    def p99_ttft(self) -> float:
        """Seconds."""
        return sorted(self.ttfts)[int(0.99 * (len(self.ttfts) - 1))] if self.ttfts else 0.0


class Traffic:
    """Requests of one key. A context.

    Args:
        url: The server's.
        key: Its API key.
        output: Tokens of each answer.
        seed: Of prompts and arrivals.
    """

    def __init__(self, url: str, key: str, output: int, seed: int = 0) -> None:
        self._output = output
        self._rng = random.Random(seed)
        self._connections = Connections(url, CONNECT_S, {"Authorization": f"Bearer {key}"})

    async def __aenter__(self) -> Traffic:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._connections.__aexit__(*error)

    async def closed_loop(self, clients: int, seconds: float) -> Outcomes:
        """Each client sends its next request when the last is answered."""
        run = _Run(seconds)

        async def client() -> None:
            while time.perf_counter() < run.end:
                await self._ask(run)

        await asyncio.gather(*(client() for _ in range(clients)))
        return run.outcomes

    async def arrivals(self, rate: float, seconds: float) -> Outcomes:
        """Requests at random times, whatever becomes of earlier ones."""
        run, at = _Run(seconds), 0.0
        asking: set[asyncio.Task[None]] = set()
        while (at := at + self._rng.expovariate(rate)) < seconds:
            await asyncio.sleep(run.begin + at - time.perf_counter())
            asking.add(task := asyncio.create_task(self._ask(run)))
            task.add_done_callback(asking.discard)
        await asyncio.gather(*asking)
        return run.outcomes

    async def burst(self, requests: int) -> Outcomes:
        """All at once; the answers are counted, whenever they end."""
        run = _Run(WARM_UP_S)
        await asyncio.gather(*(self._ask(run) for _ in range(requests)))
        return run.outcomes

    async def _ask(self, run: _Run) -> None:
        prompt = [self._rng.randrange(10, 90) for _ in range(32)]
        body = {"prompt": prompt, "max_tokens": self._output, "ignore_eos": True, "stream": True}
        begin, first = time.perf_counter(), 0.0

        def on_body(data: bytes) -> None:
            nonlocal first
            first = first or time.perf_counter()

        try:
            status = await self._connections.post("/v1/completions", msgspec.json.encode(body), on_body)
        except HttpError:
            status = 0
        run.ended(status, first - begin)


class _Run:
    """The time of a run, and what became of its requests."""

    def __init__(self, seconds: float) -> None:
        self.begin = time.perf_counter()
        self.end = self.begin + seconds
        self.outcomes = Outcomes(seconds - WARM_UP_S)

    def ended(self, status: int, ttft: float) -> None:
        """A request was answered."""
        outcomes = self.outcomes
        outcomes.statuses[status] += 1
        if status == 200:
            outcomes.ttfts.append(ttft)
            counts = self.begin + WARM_UP_S < time.perf_counter() < self.end
            outcomes.completed += counts
            outcomes.good += counts and ttft <= GOOD_TTFT_S


@dataclass(frozen=True)
class Figures:
    """All that is measured, see this module.

    Attributes:
        closed_loop: The first run, with as many requests as are answered.
        maximum: Requests a second in a closed loop, before and after the flood.
        flood: Beyond it.
        light_alone, light_beside: A light traffic without and beside the flood.
        client_cpu: Share of one core that this process took during the flood.
        burst: Requests at once, if there were to be any.
    """

    closed_loop: Outcomes
    maximum: float
    flood: Outcomes
    light_alone: Outcomes
    light_beside: Outcomes
    client_cpu: float
    burst: Outcomes | None


@dataclass(frozen=True)
class Overload:
    """What is done to a server whose API keys are `flood` and `light`.

    Attributes:
        url: The server's.
        clients: Of the closed loop: more than run at once, and fewer than the queue holds besides.
        seconds: Of the flood.
        other_seconds: Of each other run.
        factor: Of the maximum, what the flood is.
        output: Tokens of each answer.
        burst: How many requests come at once in the end; 0 for none.
    """

    url: str
    clients: int = 48
    seconds: float = 120.0
    other_seconds: float = 30.0
    factor: float = 3.0
    output: int = 32
    burst: int = 0

    async def measure(self, show: Callable[[str], None] = print) -> Figures:
        """All runs, one after the other; each is shown in a line."""
        async with Traffic(self.url, "flood", self.output) as flood:
            before = await flood.closed_loop(self.clients, self.other_seconds)
            cpu = time.process_time()
            flooded = await flood.arrivals(self.factor * before.rate, self.seconds)
            cpu = (time.process_time() - cpu) / self.seconds
            after = await flood.closed_loop(self.clients, self.other_seconds)
            maximum = (before.rate + after.rate) / 2
            loop = f"closed loop of {self.clients}: {before.rate:.1f} and {after.rate:.1f} requests/s"
            show(f"{loop}, answers {_counts(before.statuses + after.statuses)}")
            show(_row(f"{self.factor:g} x as much", flooded, maximum) + f", client {cpu:.2f} cores")
            rate = LIGHT_SHARE * maximum
            flooding = asyncio.create_task(flood.arrivals(self.factor * maximum, self.other_seconds + WARM_UP_S))
            await asyncio.sleep(WARM_UP_S)
            beside = await self._light(rate)
            show(_row("light beside the flood", beside, rate))
            await flooding
        alone = await self._light(rate)
        show(_row("light alone", alone, rate))
        return Figures(before, maximum, flooded, alone, beside, cpu, await self._burst(show))

    async def _burst(self, show: Callable[[str], None]) -> Outcomes | None:
        if not self.burst:
            return None
        async with Traffic(self.url, "flood", self.output, seed=2) as flood:
            found = await flood.burst(self.burst)
        show(f"{self.burst} at once: answers {_counts(found.statuses)}, TTFT p99 {found.p99_ttft:.2f} s")
        return found

    async def _light(self, rate: float) -> Outcomes:
        """The same requests at the same times in each run."""
        async with Traffic(self.url, "light", self.output, seed=1) as light:
            return await light.arrivals(rate, self.other_seconds)


def _row(name: str, outcomes: Outcomes, of: float) -> str:
    share = outcomes.rate / of if of else 0.0
    middle = sorted(outcomes.ttfts)[len(outcomes.ttfts) // 2] if outcomes.ttfts else 0.0
    ttft = f"TTFT p50 {middle:.2f}, p99 {outcomes.p99_ttft:.2f} s"
    good = f"good {outcomes.goodput:.1f} ({outcomes.goodput / of if of else 0.0:.0%})"
    return f"{name}: {outcomes.rate:.1f} requests/s ({share:.0%}), {good}, {ttft}, answers {_counts(outcomes.statuses)}"


def _counts(statuses: Counter[int]) -> str:
    return " ".join(f"{status}:{count}" for status, count in sorted(statuses.items()))


def main() -> None:
    """Measure the server at an address."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--clients", type=int, default=Overload.clients, help="of the closed loop")
    parser.add_argument("--seconds", type=float, default=Overload.seconds, help="of the flood")
    parser.add_argument("--other-seconds", type=float, default=Overload.other_seconds, help="of each other run")
    parser.add_argument("--output", type=int, default=Overload.output, help="tokens of each answer")
    parser.add_argument("--burst", type=int, default=Overload.burst, help="requests at once in the end")
    asyncio.run(Overload(**vars(parser.parse_args())).measure())


if __name__ == "__main__":
    main()
