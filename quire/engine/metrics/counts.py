"""What one API process has counted, as plain data: written down, so that it outlives the process, and added up.

`count_of` reads the statistics of a process; `continue_after` lets a process go on from what the one before it had;
`total` is the statistics of several together. What requests brought is added. What an engine says of itself all
processes hear, some a moment later: of its counters the highest is true, and of its state the latest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from quire.engine.metrics.histogram import Histogram, HistogramCounts
from quire.engine.metrics.http_counts import Answered
from quire.engine.metrics.server_stats import ServerStats
from quire.engine.metrics.stats import REQUEST_COUNTERS, Limit, Stats, combined_counters
from quire.foundation.messages.from_engine import EndReason, Load


class EngineCounts(msgspec.Struct, frozen=True, array_like=True):
    """Of one engine.

    Attributes:
        engine, epoch: Which, and how often it had been started again.
        lost: Whether it is dead, and its successor has said nothing yet.
        counters, ended, histograms: Of requests, see Stats.
        rates: Tokens a second lately, of prompts and generated.
        load: The engine's, with counters of all its lives.
        present_load: The same without those of earlier lives.
        step_tokens, turns, longest_turn: What the engine counts itself.
        earlier_step_tokens, earlier_turns: Of these: what its earlier lives have.
        restarts: See Stats.
    """

    engine: int
    epoch: int
    lost: bool
    counters: dict[str, int]
    ended: dict[EndReason, int]
    histograms: dict[str, HistogramCounts]
    rates: tuple[float, float]
    load: Load
    present_load: Load
    step_tokens: HistogramCounts
    turns: HistogramCounts
    longest_turn: float
    earlier_step_tokens: HistogramCounts
    earlier_turns: HistogramCounts
    restarts: int


class Counts(msgspec.Struct, frozen=True, array_like=True):
    """Of one process.

    Attributes:
        generation: Which model `engines` and `rejections` are about.
        answers, seconds: See HttpCounts.
        callbacks, longest_callback: Of the event loop.
        swaps: Done, failed, whether one proceeds, and how many requests wait.
        api_restarts: See ServerStats.
        process: What the system says of the process, by metric.
    """

    generation: int
    engines: list[EngineCounts]
    rejections: dict[Limit, int]
    answers: list[tuple[str, str, str, int]]
    seconds: list[tuple[str, str, HistogramCounts]]
    callbacks: HistogramCounts
    longest_callback: float
    swaps: tuple[int, int, bool, int]
    api_restarts: int
    process: dict[str, float]


def count_of(stats: ServerStats, generation: int = 0, process: dict[str, float] | None = None) -> Counts:
    """What a process has counted until now."""
    swaps, callbacks = stats.swaps, stats.callbacks
    return Counts(
        generation,
        [_count_of_engine(each) for each in stats.engines],
        dict(stats.rejections),
        [(*answered, count) for answered, count in stats.http.answers.items()],
        [(*labels, histogram.counts()) for labels, histogram in stats.http.seconds.items()],
        callbacks.seconds.counts(),
        callbacks.longest,
        (swaps.done, swaps.failed, swaps.proceeds, swaps.waiting),
        stats.api_restarts,
        process or {},
    )


def _count_of_engine(stats: Stats) -> EngineCounts:
    return EngineCounts(
        stats.engine,
        stats.epoch,
        stats.lost,
        {name: getattr(stats, name) for name in REQUEST_COUNTERS},
        dict(stats.ended),
        {name: histogram.counts() for name, histogram in stats.request_histograms.items()},
        (stats.prompt_rate, stats.generation_rate),
        stats.load,
        stats.present_load,
        stats.step_tokens.counts(),
        stats.turns.seconds.counts(),
        stats.turns.longest,
        stats.step_tokens.kept(),
        stats.turns.seconds.kept(),
        stats.restarts,
    )


def continue_after(stats: ServerStats, before: Counts, generation: int = 0) -> None:
    """A new process takes the place of one that is dead, before anything is counted. Of another model its counters
    begin anew."""
    _add_process(stats, before)
    if before.generation != generation:
        return
    _add_rejections(stats, before)
    for engine, counts in zip(stats.engines, before.engines, strict=False):
        engine.inherited.update(counts.counters)
        _add_requests(engine, counts)
        same_life = counts.epoch == engine.epoch
        engine.go_on_from(counts.load, counts.present_load if same_life else Load())
        steps, turns = counts.step_tokens, counts.turns
        engine.step_tokens.go_on_from(steps, counts.earlier_step_tokens if same_life else steps)
        engine.turns.seconds.go_on_from(turns, counts.earlier_turns if same_life else turns)
        engine.turns.longest = counts.longest_turn
        engine.restarts = counts.restarts
        engine.inherited["restarts"] = counts.restarts - counts.epoch  # of models before this one


def total(counts: Sequence[Counts]) -> ServerStats:
    """Of all processes, that of this process first."""
    stats = ServerStats([Stats(each.engine) for each in counts[0].engines])
    for each in counts:
        _add_process(stats, each)
        _add_rejections(stats, each)
        stats.api_restarts += each.api_restarts
        for engine, of_engine in zip(stats.engines, each.engines, strict=True):
            _add_requests(engine, of_engine)
            engine.prompt_rate += of_engine.rates[0]
            engine.generation_rate += of_engine.rates[1]
    for number, engine in enumerate(stats.engines):
        _show_engine(engine, [each.engines[number] for each in counts])
    stats.swaps.proceeds = any(each.swaps[2] for each in counts)
    stats.swaps.waiting = sum(each.swaps[3] for each in counts)
    stats.process = _total_process([each.process for each in counts])
    return stats


def _add_process(stats: ServerStats, counts: Counts) -> None:
    for method, handler, status, number in counts.answers:
        stats.http.answers[Answered(method, handler, status)] += number
    for method, handler, histogram in counts.seconds:
        stats.http.seconds.setdefault((method, handler), Histogram(histogram.bounds)).add(histogram)
    stats.callbacks.seconds.add(counts.callbacks)
    stats.callbacks.longest = max(stats.callbacks.longest, counts.longest_callback)
    stats.swaps.done += counts.swaps[0]
    stats.swaps.failed += counts.swaps[1]


def _add_rejections(stats: ServerStats, counts: Counts) -> None:
    for limit, number in counts.rejections.items():
        stats.rejections[limit] += number


def _add_requests(stats: Stats, counts: EngineCounts) -> None:
    for name, number in counts.counters.items():
        setattr(stats, name, getattr(stats, name) + number)
    for reason, number in counts.ended.items():
        stats.ended[reason] += number
    for name, histogram in counts.histograms.items():
        stats.add_histogram(name, histogram)


def _show_engine(stats: Stats, heard: Sequence[EngineCounts]) -> None:
    """What an engine says of itself, as several processes have heard it."""
    epoch = max(each.epoch for each in heard)
    latest = [each for each in heard if each.epoch == epoch]
    alive = [each for each in latest if not each.lost]
    load = max(alive or latest, key=lambda each: each.load.step).load
    if not alive:  # what each process holds back for the next engine
        load = msgspec.structs.replace(
            load,
            waiting=sum(each.load.waiting for each in latest),
            waiting_tokens=sum(each.load.waiting_tokens for each in latest),
            queued_tokens=sum(each.load.queued_tokens for each in latest),
        )
    stats.load = msgspec.structs.replace(load, **combined_counters([each.load for each in heard], max))
    stats.step_tokens.add(max((each.step_tokens for each in heard), key=lambda counts: sum(counts.counts)))
    stats.turns.seconds.add(max((each.turns for each in heard), key=lambda counts: sum(counts.counts)))
    stats.turns.longest = max(each.longest_turn for each in heard)
    stats.restarts = max(each.restarts for each in heard)


def _total_process(values: Iterable[dict[str, float]]) -> dict[str, float]:
    """Sums; but they run since the first one does."""
    together: dict[str, float] = {}
    for each in values:
        for name, value in each.items():
            if name not in together:
                together[name] = value
            elif name == "process_start_time_seconds":
                together[name] = min(together[name], value)
            else:
                together[name] += value
    return together
