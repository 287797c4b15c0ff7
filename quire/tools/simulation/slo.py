"""The highest rate of requests at which enough of them keep limits of latency, by bisection.

Every rate is simulated with the same requests, whose gaps are stretched, so the answer is always the same. A rate is
sustained if the number of open requests does not grow from the second quarter of the load to the last. Without this
condition, an endless queue would keep limits on tokens after the first at any rate, and a load that ends before the
engine is full would seem to go on for ever.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from quire.errors import ConfigError
from quire.tools.bench.serving_figures import is_good
from quire.tools.simulation.engine import Served, SimulatedRun

LIMITED = ("ttft", "tpot", "itl", "e2el")
PRECISION = 1.01
"""The highest rate that keeps the limits and the lowest that does not are at least as close as this."""
SPAN = 2**8
"""Rates are searched from the first one divided by this up to the first one times this."""
STEADY, FEW = 1.5, 3
"""Open requests grow if they are more than STEADY times as many as before, and FEW more, which may be chance."""


@dataclass(frozen=True)
class TriedRate:
    """A rate in requests a second that was simulated: the share of requests that kept all limits, the shares that broke
    each limit (a request may break several), and whether the rate is sustained, because open requests did not grow."""

    rate: float
    attainment: float
    broken: dict[str, float]
    sustained: bool
    run: SimulatedRun

    def keeps(self, wanted: float) -> bool:
        """Whether enough requests kept the limits, and would keep them for longer than this load lasted."""
        return self.sustained and self.attainment >= wanted


@dataclass(frozen=True)
class Search:
    """The result of a search for the rate at which a share `wanted` of the requests keeps the limits, in milliseconds
    by metric: the highest rate that keeps them, the lowest that does not, each None if there is none, and all rates
    that were tried, ascending."""

    limits: dict[str, float]
    wanted: float
    best: TriedRate | None
    over: TriedRate | None
    tried: tuple[TriedRate, ...]

    def reason(self) -> str:
        """Why the best rate is not higher."""
        over = self.over
        if over is None:
            return "no rate breaks anything: the load is too short, see --num-prompts"
        at = f"at {over.rate:,.4g} requests/s"
        if not over.sustained:
            return f"{at} open requests grow: more come than are served, or --num-prompts are too few to tell"
        worst = max(over.broken, key=lambda name: over.broken[name])
        return (
            f"{at} {over.attainment:.2%} keep the limits: {over.broken[worst]:.2%} of the requests have "
            f"{worst.upper()} above {self.limits[worst]:g} ms"
        )


def read_limits(text: str) -> dict[str, float]:
    """Milliseconds by metric, from text like `ttft=500,tpot=40`. Raises ConfigError if the text says something else."""
    limits = {}
    for pair in text.split(","):
        name, _, value = pair.strip().partition("=")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = 0.0
        if name not in LIMITED or not 0 < limits[name] < float("inf"):
            raise ConfigError(
                f"--slo takes limits in milliseconds for {', '.join(LIMITED)}, as ttft=500,tpot=40; not '{pair}'.",
                param="slo",
            )
    return limits


def search(
    simulated: Callable[[float], SimulatedRun], first_rate: float, limits: dict[str, float], wanted: float
) -> Search:
    """Bisect for the highest rate at which the share `wanted` of the requests keeps the limits, in milliseconds by
    metric. `simulated` simulates the load at a rate in requests a second. The nearer `first_rate` is to the result, the
    fewer rates are tried."""
    tried: list[TriedRate] = []

    def keeps(rate: float) -> bool:
        tried.append(tried_rate(rate, simulated(rate), limits))
        return tried[-1].keeps(wanted)

    low, high = _bracket(keeps, first_rate)
    while low and high and high / low > PRECISION:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if keeps(middle) else (low, middle)
    by_rate = {each.rate: each for each in tried}
    ordered = tuple(by_rate[rate] for rate in sorted(by_rate))
    return Search(limits, wanted, by_rate.get(low or 0.0), by_rate.get(high or 0.0), ordered)


def tried_rate(rate: float, run: SimulatedRun, limits: dict[str, float]) -> TriedRate:
    """Which share of a run's requests kept the limits."""
    count = len(run.served)
    attainment = sum(is_good(each, limits) for each in run.served) / count
    broken = {
        name: sum(not is_good(each, {name: limit}) for each in run.served) / count for name, limit in limits.items()
    }
    return TriedRate(rate, attainment, broken, keeps_up(run.served), run)


def keeps_up(served: Sequence[Served]) -> bool:
    """Whether open requests did not grow, as far as this load tells. Each request counts those open when it is sent."""
    ends = sorted(each.times[-1] for each in served)
    met = [number - bisect_right(ends, each.sent) for number, each in enumerate(served)]
    quarter = max(1, len(met) // 4)
    return median(met[-quarter:]) <= STEADY * median(met[quarter : 2 * quarter] or met[:1]) + FEW


def _bracket(keeps: Callable[[float], bool], first: float) -> tuple[float | None, float | None]:
    """A rate that keeps the limits and its double, which does not; None for either that does not exist."""
    rate = first
    if keeps(rate):
        while rate < SPAN * first:
            if not keeps(2 * rate):
                return rate, 2 * rate
            rate *= 2
        return rate, None
    while rate > first / SPAN:
        if keeps(rate / 2):
            return rate / 2, rate
        rate /= 2
    return None, rate
