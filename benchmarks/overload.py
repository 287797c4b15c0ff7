"""A server that is offered more than it can do: how much it still does, whom it turns away, and how long others wait.

    quire serve --max-queue-time 2 --api-key flood --api-key light &
    python benchmarks/overload.py http://127.0.0.1:8000 --seconds 120

First its maximum: so many clients in a closed loop that it is never idle. Then a multiple of that as Poisson arrivals
by the key `flood`, and then the same beside a tenth of the maximum by the key `light`, compared with that tenth alone.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx

LIGHT_SHARE = 0.1


@dataclass
class Outcomes:
    """What became of the requests of a run.

    Attributes:
        seconds: How long requests were sent.
        completed: Those that ended within that time.
        ttfts: Seconds to the first token of each that was let in.
        statuses: Of all answers; 0 for a connection that broke.
    """

    seconds: float
    completed: int = 0
    ttfts: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)

    @property
    def rate(self) -> float:
        """Completed requests a second."""
        return self.completed / self.seconds

    @property
    def p99_ttft(self) -> float:
        """Seconds."""
        return sorted(self.ttfts)[int(0.99 * (len(self.ttfts) - 1))] if self.ttfts else 0.0


class Traffic:
    """Requests of one key.

    Args:
        url: The server's.
        key: Its API key.
        output: Tokens of each answer.
        seed: Of prompts and arrivals.
    """

    def __init__(self, url: str, key: str, output: int, seed: int = 0) -> None:
        self._output = output
        self._rng = random.Random(seed)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        headers = {"Authorization": f"Bearer {key}"}
        self._http = httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=120)

    async def close(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    async def closed_loop(self, clients: int, seconds: float) -> Outcomes:
        """Each client sends its next request when the last is answered."""
        outcomes, end = Outcomes(seconds), time.perf_counter() + seconds

        async def client() -> None:
            while time.perf_counter() < end:
                await self._ask(outcomes, end)

        await asyncio.gather(*(client() for _ in range(clients)))
        return outcomes

    async def arrivals(self, rate: float, seconds: float) -> Outcomes:
        """Requests at random times, whatever becomes of earlier ones."""
        outcomes, begin = Outcomes(seconds), time.perf_counter()
        at, asking = 0.0, []
        while (at := at + self._rng.expovariate(rate)) < seconds:
            await asyncio.sleep(begin + at - time.perf_counter())
            asking.append(asyncio.create_task(self._ask(outcomes, begin + seconds)))
        await asyncio.gather(*asking)
        return outcomes

    async def _ask(self, outcomes: Outcomes, end: float) -> None:
        prompt = [self._rng.randrange(10, 90) for _ in range(32)]
        body = {"prompt": prompt, "max_tokens": self._output, "ignore_eos": True, "stream": True}
        begin, first = time.perf_counter(), None
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as answer:
                async for _ in answer.aiter_bytes():
                    first = first or time.perf_counter()
        except httpx.HTTPError:
            outcomes.statuses[0] += 1
            return
        outcomes.statuses[answer.status_code] += 1
        if answer.status_code == 200 and first is not None:
            outcomes.ttfts.append(first - begin)
            outcomes.completed += time.perf_counter() < end


@dataclass(frozen=True)
class Figures:
    """All that is measured, see this module.

    Attributes:
        maximum: Requests a second in a closed loop.
        flood: Beyond it.
        light_alone, light_beside: A light traffic without and beside the flood.
    """

    maximum: float
    flood: Outcomes
    light_alone: Outcomes
    light_beside: Outcomes


async def measure(
    url: str, *, clients: int, seconds: float, factor: float = 3.0, output: int = 32,
    show: Callable[[str], None] = print,
) -> Figures:  # fmt: skip
    """Measure a server whose API keys are `flood` and `light`.

    Args:
        clients: Of the closed loop: more than run at once, and fewer than the queue holds besides.
        seconds: Of the flood; the other runs take a third of it each.
        factor: Of the maximum, what the flood is.
        output: Tokens of each answer.
    """
    flood, light = Traffic(url, "flood", output), Traffic(url, "light", output, seed=1)
    try:
        maximum = (await flood.closed_loop(clients, seconds / 3)).rate
        show(f"closed loop of {clients}: {maximum:.1f} requests/s")
        flooded = await flood.arrivals(factor * maximum, seconds)
        show(_row(f"{factor:g} x as much", flooded, maximum))
        alone = await light.arrivals(LIGHT_SHARE * maximum, seconds / 3)
        show(_row("light alone", alone, LIGHT_SHARE * maximum))
        flooding = asyncio.create_task(flood.arrivals(factor * maximum, seconds / 3 + 2))
        await asyncio.sleep(2)
        beside = await light.arrivals(LIGHT_SHARE * maximum, seconds / 3)
        show(_row("light beside the flood", beside, LIGHT_SHARE * maximum))
        await flooding
    finally:
        await flood.close()
        await light.close()
    return Figures(maximum, flooded, alone, beside)


def _row(name: str, outcomes: Outcomes, of: float) -> str:
    counts = " ".join(f"{status}:{count}" for status, count in sorted(outcomes.statuses.items()))
    share = outcomes.rate / of if of else 0.0
    middle = sorted(outcomes.ttfts)[len(outcomes.ttfts) // 2] if outcomes.ttfts else 0.0
    ttft = f"TTFT p50 {middle:.2f}, p99 {outcomes.p99_ttft:.2f} s"
    return f"{name}: {outcomes.rate:.1f} requests/s ({share:.0%}), {ttft}, answers {counts}"


def main() -> None:
    """Measure the server at an address."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--clients", type=int, default=64, help="of the closed loop")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--output", type=int, default=32, help="tokens of each answer")
    arguments = parser.parse_args()
    asyncio.run(measure(arguments.url, clients=arguments.clients, seconds=arguments.seconds, output=arguments.output))


if __name__ == "__main__":
    main()
