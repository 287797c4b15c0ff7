"""The statistics of one engine in one API process: plain numbers, which `quire.engine.metrics.prometheus` shows.

Owns which event changes which number. Counters are exact to the token. Knows nothing about Prometheus or HTTP.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal, get_args

from msgspec.structs import replace

from quire.engine.metrics.histogram import Histogram, HistogramCounts, steps_of_1_2_5
from quire.engine.metrics.work_times import WorkTimes
from quire.foundation.messages.from_engine import STEP_TOKEN_BOUNDS, End, EndReason, Heartbeat, Load
from quire.foundation.messages.to_engine import Add

# Bounds of histograms, in seconds: vLLM's, so that its dashboards fit.
FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
TOKEN_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
CHOICES = (1, 2, 5, 10, 20)
Limit = Literal["requests", "tokens"]
"""Which limit of the queue turned a request away."""
END_REASONS: tuple[EndReason, ...] = get_args(EndReason)
REQUEST_COUNTERS = ("prompt_tokens", "cached_tokens", "generation_tokens", "replayed")
"""Attributes of Stats that only grow, with what requests bring."""
_LOAD_COUNTERS = ("preemptions", "prefix_queries", "prefix_hits", "drafts", "draft_tokens")
"""Counters of a Load, beside `accepted_drafts`, which is counted by position."""


@dataclass
class SequenceGroup:
    """The sequences of one prompt: how many have not ended, and how many tokens the longest got."""

    first: int
    open: int
    most_tokens: int = 0


@dataclass
class SequenceStats:
    """Times and counts of one sequence.

    Attributes:
        received: Tokens that the engine sent.
        delivered: Tokens that its reader has got: fewer than `received` where a stop string ends it.
        end: The engine's End, if the engine ended it.
        ended: Why it counts as ended; None while it does not.
        engine: The number of the one it was given to.
    """

    prompt_tokens: int
    max_tokens: int
    choices: int
    arrival: float
    group: SequenceGroup
    cached_tokens: int = 0
    first_token: float | None = None
    last_token: float = 0.0
    received: int = 0
    delivered: int = 0
    end: End | None = None
    ended: EndReason | None = None
    engine: int = 0


class Stats:
    """Counters, gauges and histograms of one engine.

    Args:
        engine: Its number.

    Attributes:
        engine: As given.
        load: The engine's last, with counters that go on when it is replaced.
        prompt_tokens, cached_tokens: Of prompts that have brought a first token; cached ones were not computed for it.
        generation_tokens: Tokens that readers have got: as many as `usage` reports.
        prompt_rate, generation_rate: Tokens a second in the last interval of `StatsLogLine`.
        ended: Sequences by reason.
        restarts: How often the engine was replaced.
        epoch: Which of its lives is heard, or awaited.
        lost: Whether it is dead, and its successor has said nothing yet.
        inherited: Of counters by name: what models and processes before this one have counted.
        replayed: Sequences that another engine went on with.
        turns: Of the engine's loop.
    """

    def __init__(self, engine: int = 0) -> None:
        self.engine = engine
        self.load = Load()
        self.prompt_tokens = self.cached_tokens = self.generation_tokens = 0
        self.prompt_rate = self.generation_rate = 0.0
        self.ended: dict[EndReason, int] = dict.fromkeys(END_REASONS, 0)
        self.restarts = self.replayed = self.epoch = 0
        self.lost = False
        self.inherited: Counter[str] = Counter()
        self.turns = WorkTimes()
        self._groups: dict[int, SequenceGroup] = {}  # by the id of the first sequence
        self._present = Load()
        self._own = self._earlier = Load()  # what this model's engines have counted; what those before the present have
        self._before = Load()  # what the model or the process before has counted
        self._handed: Counter[str] = Counter()
        self.first_token_s = Histogram(FIRST_TOKEN_S)
        self.inter_token_s = Histogram(TOKEN_S)
        self.mean_token_s = Histogram(TOKEN_S)
        self.whole_s = Histogram(REQUEST_S)
        self.queued_s = Histogram(REQUEST_S)
        self.inference_s = Histogram(REQUEST_S)
        self.prefill_s = Histogram(REQUEST_S)
        self.decode_s = Histogram(REQUEST_S)
        self.choices = Histogram(CHOICES)
        self.step_tokens = Histogram(STEP_TOKEN_BOUNDS)
        self._set_lengths(steps_of_1_2_5(1))

    def set_max_model_len(self, max_model_len: int) -> None:
        """Set the scale of token counts, before the first request. What was counted on this scale stays."""
        lengths = steps_of_1_2_5(max_model_len)
        if self.prompt_lengths.bounds != tuple(lengths):
            self._set_lengths(lengths)

    def _set_lengths(self, lengths: Sequence[float]) -> None:
        self.prompt_lengths = Histogram(lengths)
        self.computed_lengths = Histogram(lengths)
        self.output_lengths = Histogram(lengths)
        self.most_tokens = Histogram(lengths)
        self.max_tokens = Histogram(lengths)

    @property
    def request_histograms(self) -> dict[str, Histogram]:
        """The histograms of requests, by attribute."""
        engines = ("step_tokens",)
        return {name: own for name, own in vars(self).items() if isinstance(own, Histogram) and name not in engines}

    def add_histogram(self, name: str, counts: HistogramCounts) -> None:
        """Add what another process has counted in one of `request_histograms`. On another scale only if nothing is
        counted on this one; a process that has not heard an engine yet does not know the scale."""
        own: Histogram = getattr(self, name)
        if not own.count and (any(counts.counts) or len(counts.bounds) > len(own.bounds)):
            own = Histogram(counts.bounds)
            setattr(self, name, own)
        own.add(counts)

    @property
    def present_load(self) -> Load:
        """The engine's last Load, with the counters of its present life alone."""
        return self._present

    @property
    def cache_usage(self) -> float:
        """Share of the KV blocks in use."""
        return 1 - self.load.free_blocks / self.load.num_blocks if self.load.num_blocks else 0.0

    @property
    def host_usage(self) -> float:
        """Share of the swap space that is ready, in use."""
        return 1 - self.load.free_host_blocks / self.load.ready_host_blocks if self.load.ready_host_blocks else 0.0

    @property
    def cache_waste(self) -> float:
        """Share of the tokens that would fit into the KV blocks in use, but are not written."""
        held = (self.load.num_blocks - self.load.free_blocks) * self.load.block_size
        return self.load.unwritten_tokens / held if held else 0.0

    @property
    def queue_seconds(self) -> float:
        """How long the engine needs to compute what waits; 0 if that is not known."""
        return self.load.queued_tokens / self.load.tokens_per_s if self.load.tokens_per_s else 0.0

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the tokens looked up in the prefix cache that were there."""
        return self.load.prefix_hits / self.load.prefix_queries if self.load.prefix_queries else 0.0

    def record_load(self, load: Load) -> None:
        """Record what the engine has to do."""
        self.lost, self._present = False, load
        self._own = _with_counters(load, self._earlier)
        self.load = _with_counters(self._own, self._before)

    def record_engine_death(self, waiting: int, queued_tokens: int) -> None:
        """Record that the engine is gone with all that it held, and that so many sequences of so many tokens wait for
        the next one."""
        load, self._earlier = self.load, self._own
        self.lost, self._present = True, Load()
        self.load = replace(
            load,
            running=0,
            waiting=waiting,
            deferred=0,
            waiting_tokens=queued_tokens,
            queued_tokens=queued_tokens,
            free_blocks=load.num_blocks,
            unwritten_tokens=0,
            free_host_blocks=load.ready_host_blocks,
        )
        self.step_tokens.keep()
        self.turns.seconds.keep()

    def record_heartbeat(self, beat: Heartbeat) -> None:
        """Record the engine's heartbeat, which comes once a second."""
        self.record_load(beat.load)
        if beat.step_tokens:
            self.step_tokens.take_over(beat.step_tokens, beat.step_tokens_sum)
        if beat.turns:
            self.turns.seconds.take_over(beat.turns, beat.turns_sum_s)
            self.turns.longest = max(self.turns.longest, beat.longest_turn_s)

    def go_on_from(self, load: Load, present: Load) -> None:
        """Another process has heard this engine before. Until the engine says something, its counters are as they were.

        Args:
            load: What was shown last.
            present: Of its counters, what the engine's present life had counted: it says that again.
        """
        self._before = _without_counters(load, present)
        self.load = _without_counters(load, Load())

    def hand_over(self, successor: Stats) -> None:
        """Another model takes the place of this one under the same name: its counters go on from these. To be called
        when it does, and again when the last sequence here has ended. On another scale lengths are counted anew."""
        for name in ("prompt_tokens", "cached_tokens", "generation_tokens", "replayed", "restarts"):
            more = getattr(self, name) - self._handed[name]
            setattr(successor, name, getattr(successor, name) + more)
            successor.inherited[name] += more
            self._handed[name] += more
        for reason, ended in self.ended.items():
            successor.ended[reason] += ended - self._handed[reason]
            self._handed[reason] = ended
        for name, own in vars(self).items():
            if isinstance(own, Histogram):
                own.hand_over(getattr(successor, name))
        self.turns.seconds.hand_over(successor.turns.seconds)
        successor.turns.longest = max(successor.turns.longest, self.turns.longest)
        successor._before = self.load
        successor.load = _with_counters(successor._own, self.load)

    def start_sequence(self, add: Add) -> SequenceStats:
        """Count a sequence that goes to the engine."""
        params = add.sampling
        first = add.id if add.fork_of is None else add.fork_of
        group = self._groups.setdefault(first, SequenceGroup(first, params.n))
        return SequenceStats(add.prompt_len, params.max_tokens or 0, params.n, add.arrival, group, engine=self.engine)

    def move_sequence(self, sequence: SequenceStats, other: Stats) -> None:
        """Move a sequence of which nothing has come yet to another engine, which counts it from now on."""
        group = sequence.group
        sequence.engine = other.engine
        if (moved := self._groups.pop(group.first, None)) is not None:
            other._groups[group.first] = moved

    def record_tokens(self, sequence: SequenceStats, tokens: int, now: float, cached: int = 0) -> None:
        """Record tokens that a step brought; with the first ones, `cached` is how much of the prompt was found
        computed."""
        if not tokens:
            return
        if sequence.first_token is None:
            sequence.first_token = now
            sequence.cached_tokens = cached
            self.prompt_tokens += sequence.prompt_tokens
            self.cached_tokens += cached
            self.first_token_s.observe(now - sequence.arrival)
        else:
            self.inter_token_s.observe(now - sequence.last_token)
        sequence.last_token = now
        sequence.received += tokens

    def record_delivered(self, sequence: SequenceStats, tokens: int) -> None:
        """Record that the reader has got so many more tokens."""
        sequence.delivered += tokens
        self.generation_tokens += tokens

    def finish_sequence(self, sequence: SequenceStats, reason: EndReason, now: float) -> None:
        """Record that the reader has got the end of a sequence, or wants no more of it. Only the first call counts."""
        if sequence.ended is not None:
            return
        sequence.ended = reason
        self.ended[reason] += 1
        self.whole_s.observe(now - sequence.arrival)
        self.prompt_lengths.observe(sequence.prompt_tokens)
        self.output_lengths.observe(sequence.delivered)
        self.max_tokens.observe(sequence.max_tokens)
        if sequence.first_token is not None:
            self.computed_lengths.observe(sequence.prompt_tokens - sequence.cached_tokens)
            if sequence.received > 1:
                self.mean_token_s.observe((sequence.last_token - sequence.first_token) / (sequence.received - 1))
        if (end := sequence.end) is not None:
            self.queued_s.observe(end.queued_s)
            self.inference_s.observe(end.prefill_s + end.decode_s)
            self.prefill_s.observe(end.prefill_s)
            self.decode_s.observe(end.decode_s)
        self._finish_in_group(sequence)

    def _finish_in_group(self, sequence: SequenceStats) -> None:
        """Count a prompt when its last sequence ends."""
        group = sequence.group
        group.open -= 1
        group.most_tokens = max(group.most_tokens, sequence.delivered)
        if group.open == 0:
            self.most_tokens.observe(group.most_tokens)
            self.choices.observe(sequence.choices)
            del self._groups[group.first]


def combined_counters(loads: Sequence[Load], combine: Callable[[Sequence[int]], int]) -> dict[str, Any]:
    """The counters of several loads by name, each made of theirs in the order of the loads."""
    places = zip_longest(*(load.accepted_drafts for load in loads), fillvalue=0)
    counters: dict[str, Any] = {name: combine([getattr(load, name) for load in loads]) for name in _LOAD_COUNTERS}
    return counters | {"accepted_drafts": [combine(place) for place in places]}


def _with_counters(load: Load, earlier: Load) -> Load:
    """With what was counted earlier. As `combined_counters` would, in a fifth of the time: it is done for each step."""
    return replace(
        load,
        preemptions=earlier.preemptions + load.preemptions,
        prefix_queries=earlier.prefix_queries + load.prefix_queries,
        prefix_hits=earlier.prefix_hits + load.prefix_hits,
        drafts=earlier.drafts + load.drafts,
        draft_tokens=earlier.draft_tokens + load.draft_tokens,
        accepted_drafts=_added(earlier.accepted_drafts, load.accepted_drafts),
    )


def _without_counters(load: Load, counted: Load) -> Load:
    """Nothing but counters, less these."""
    return Load(**combined_counters((load, counted), lambda both: both[0] - both[1]))


def _added(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """Position by position; one may be longer."""
    return [sum(pair) for pair in zip_longest(first, second, fillvalue=0)]
