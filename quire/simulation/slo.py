"""The highest rate of requests at which enough of them keep limits of latency, by bisection.

Every rate is simulated with the same requests, whose gaps are stretched, so the answer is the same each time. A rate is
sustained if besides the queue does not grow: half of the last quarter of the requests wait no longer than they are
served, or no more than twice as long as half of the second quarter. (Where more comes than is served, waits grow in
proportion, and the last quarter's is 7/3 of the second's.) Without that, limits on tokens after the first would be kept
at any rate, behind an endless queue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from quire.errors import ConfigError
from quire.simulation.engine import Served, SimulatedRun
from quire.simulation.figures import is_good

LIMITED = ("ttft", "tpot", "itl", "e2el")
PRECISION = 1.01
"""The rate that keeps the limits and the next one that does not are as close as this."""
LOWEST_RATE, HIGHEST_RATE = 1e-4, 1e5
FIRST_RATE = 1.0
_STEADY = 2.0
"""Waits that are no more than so many times those of before come of chance."""


@dataclass(frozen=True)
class TriedRate:
    """A rate that was simulated.

    Attributes:
        rate: Requests a second.
        attainment: The share of requests that kept all limits.
        broken: By limit, the share of requests that broke it; one may break several.
        sustained: Whether the queue did not grow.
        run: What came of it.
    """

    rate: float
    attainment: float
    broken: dict[str, float]
    sustained: bool
    run: SimulatedRun

    def keeps(self, wanted: float) -> bool:
        """Whether enough requests kept the limits, for longer than this load lasted."""
        return self.sustained and self.attainment >= wanted


@dataclass(frozen=True)
class Search:
    """What was found.

    Attributes:
        limits: Milliseconds by metric.
        wanted: Share of the requests that are to keep them.
        best: The highest rate that keeps them; None: none does.
        over: The lowest rate that does not; None: all do.
        tried: All, by rate.
    """

    limits: dict[str, float]
    wanted: float
    best: TriedRate | None
    over: TriedRate | None
    tried: tuple[TriedRate, ...]

    def reason(self) -> str:
        """Why not more."""
        over = self.over
        if over is None:
            return f"nothing is broken up to {HIGHEST_RATE:,.0f} requests/s: the load is too short, see --num-prompts"
        at = f"at {over.rate:,.4g} requests/s"
        if not over.sustained:
            return f"{at} the queue grows"
        worst = max(over.broken, key=lambda name: over.broken[name])
        return (
            f"{at} {over.attainment:.2%} keep the limits: {over.broken[worst]:.2%} of the requests have "
            f"{worst.upper()} above {self.limits[worst]:g} ms"
        )


def read_limits(text: str) -> dict[str, float]:
    """Milliseconds by metric, of `ttft=500,tpot=40`.

    Raises:
        ConfigError: It says something else.
    """
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


def search(simulated: Callable[[float], SimulatedRun], limits: dict[str, float], wanted: float) -> Search:
    """Bisect for the highest rate.

    Args:
        simulated: The load at so many requests a second.
        limits: Milliseconds by metric.
        wanted: Share of the requests that are to keep them.
    """
    tried: list[TriedRate] = []

    def keeps(rate: float) -> bool:
        tried.append(tried_rate(rate, simulated(rate), limits))
        return tried[-1].keeps(wanted)

    low, high = _bracket(keeps)
    while low and high and high / low > PRECISION:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if keeps(middle) else (low, middle)
    by_rate = {each.rate: each for each in tried}
    ordered = tuple(by_rate[rate] for rate in sorted(by_rate))
    return Search(limits, wanted, by_rate.get(low or 0.0), by_rate.get(high or 0.0), ordered)


def tried_rate(rate: float, run: SimulatedRun, limits: dict[str, float]) -> TriedRate:
    """Of a run, which requests kept the limits."""
    count = len(run.served)
    attainment = sum(is_good(each, limits) for each in run.served) / count
    broken = {
        name: sum(not is_good(each, {name: limit}) for each in run.served) / count for name, limit in limits.items()
    }
    return TriedRate(rate, attainment, broken, keeps_up(run.served), run)


def keeps_up(served: Sequence[Served]) -> bool:
    """Whether the queue did not grow, as far as this load tells."""
    quarter = max(1, len(served) // 4)
    second, last = served[quarter : 2 * quarter] or served[:1], served[-quarter:]
    waits, earlier = (median(each.queued for each in part) for part in (last, second))
    return waits <= median(each.e2e - each.queued for each in last) or waits <= _STEADY * earlier


def _bracket(keeps: Callable[[float], bool]) -> tuple[float | None, float | None]:
    """A rate that keeps the limits and one that does not, a factor of 4 apart; None where there is none."""
    rate = FIRST_RATE
    if keeps(rate):
        while rate < HIGHEST_RATE:
            if not keeps(4 * rate):
                return rate, 4 * rate
            rate *= 4
        return rate, None
    while rate > LOWEST_RATE:
        if keeps(rate / 4):
            return rate / 4, rate
        rate /= 4
    return None, rate
