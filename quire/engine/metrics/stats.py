"""The statistics of one engine: plain numbers, which `quire.engine.metrics.prometheus` shows.

Owns which event changes which number. Counters are exact to the token. Knows nothing about Prometheus or HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, get_args

from msgspec.structs import replace

from quire.engine.metrics.histogram import Histogram, WorkTimes, steps_of_1_2_5
from quire.foundation.config.server import BUCKET_FAMILIES
from quire.foundation.messages.from_engine import (
    STEP_TOKEN_BOUNDS,
    WORK_BOUNDS_S,
    End,
    EndReason,
    Heartbeat,
    Load,
)
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
UNKNOWN_LENGTHS = (1.0,)
"""The scale of token counts before the longest length is known."""
_LENGTHS = ("prompt_lengths", "computed_lengths", "output_lengths", "most_tokens", "max_tokens")
_REQUEST_COUNTERS = ("prompt_tokens", "cached_tokens", "generation_tokens", "pooled", "replayed", "schema_misses")


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


@dataclass
class Stats:
    """Counters, gauges and histograms of one engine in one API process, or in several together.

    Attributes:
        epoch: How often the engine was replaced.
        lost: Whether it is dead, and its successor has said nothing yet.
        step_tokens, turns: Tokens of its steps and times of its loop's turns, as the engine counts them.
        prompt_tokens, cached_tokens: Of prompts that have brought a first token; cached ones were not computed for it.
        generation_tokens: Tokens that readers have got: as many as `usage` reports.
        pooled: Texts that a vector or values were made of.
        prompt_rate, generation_rate: Tokens a second in the last interval of `StatsLogLine`.
        replayed: Sequences that another engine went on with.
        schema_misses: Finished outputs that were not valid under a schema that is not strict.
    """

    engine: int = 0
    epoch: int = 0
    lost: bool = False
    load: Load = field(default_factory=Load)
    step_tokens: Histogram = field(default_factory=partial(Histogram, STEP_TOKEN_BOUNDS))
    turns: WorkTimes = field(default_factory=WorkTimes)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    pooled: int = 0
    prompt_rate: float = 0.0
    generation_rate: float = 0.0
    replayed: int = 0
    schema_misses: int = 0
    ended: dict[EndReason, int] = field(default_factory=lambda: dict.fromkeys(END_REASONS, 0))
    first_token_s: Histogram = field(default_factory=partial(Histogram, FIRST_TOKEN_S))
    inter_token_s: Histogram = field(default_factory=partial(Histogram, TOKEN_S))
    mean_token_s: Histogram = field(default_factory=partial(Histogram, TOKEN_S))
    whole_s: Histogram = field(default_factory=partial(Histogram, REQUEST_S))
    queued_s: Histogram = field(default_factory=partial(Histogram, REQUEST_S))
    inference_s: Histogram = field(default_factory=partial(Histogram, REQUEST_S))
    prefill_s: Histogram = field(default_factory=partial(Histogram, REQUEST_S))
    decode_s: Histogram = field(default_factory=partial(Histogram, REQUEST_S))
    choices: Histogram = field(default_factory=partial(Histogram, CHOICES))
    prompt_lengths: Histogram = field(default_factory=partial(Histogram, UNKNOWN_LENGTHS))
    computed_lengths: Histogram = field(default_factory=partial(Histogram, UNKNOWN_LENGTHS))
    output_lengths: Histogram = field(default_factory=partial(Histogram, UNKNOWN_LENGTHS))
    most_tokens: Histogram = field(default_factory=partial(Histogram, UNKNOWN_LENGTHS))
    max_tokens: Histogram = field(default_factory=partial(Histogram, UNKNOWN_LENGTHS))

    def __post_init__(self) -> None:
        self._groups: dict[int, SequenceGroup] = {}  # by the id of the first sequence
        self._has_own_scale: set[str] = set()

    def set_buckets(self, buckets: Mapping[str, Sequence[float]]) -> None:
        """Set the bounds of families of histograms (--custom-histogram-buckets), before the first request."""
        for family, bounds in buckets.items():
            for name in BUCKET_FAMILIES[family]:
                setattr(self, name, Histogram(bounds))
                self._has_own_scale.add(name)

    def share_scales(self, other: Stats) -> None:
        """Count on the scales of another process from now on; nothing was counted before."""
        for names in BUCKET_FAMILIES.values():
            for name in names:
                setattr(self, name, Histogram(getattr(other, name).bounds))

    def set_max_model_len(self, max_model_len: int) -> None:
        """Set the scale of token counts, before the first request. What was counted on this scale stays."""
        for name in set(_LENGTHS) - self._has_own_scale:
            own: Histogram = getattr(self, name)
            if own.bounds != (scale := Histogram(steps_of_1_2_5(max_model_len))).bounds:
                setattr(self, name, scale)

    # --- several processes ------------------------------------------------------------------------------------------

    def add_requests(self, other: Stats) -> None:
        """Add what requests have brought to another process."""
        for name in _REQUEST_COUNTERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for reason, number in other.ended.items():
            self.ended[reason] += number
        for name, own in vars(self).items():
            if isinstance(own, Histogram) and name != "step_tokens":
                own.add(getattr(other, name))

    def add_heard(self, heard: Sequence[Stats], gone: Sequence[Stats] = ()) -> None:
        """Take over what the engine says of itself; the latest is true. While there is no engine, add up what each
        process holds back for the next one.

        Args:
            heard: What the processes have heard.
            gone: What ended processes had heard: perhaps a moment more than the others, so its counters count.
        """
        self.epoch = max(each.epoch for each in heard)
        latest = [each for each in heard if each.epoch == self.epoch]
        alive = [each for each in latest if not each.lost]
        known = [*(alive or latest), *(each for each in gone if each.epoch == self.epoch)]
        self.load = max(known if alive else latest, key=lambda each: each.load.step).load
        if not alive:
            self.load = replace(
                self.load,
                waiting=sum(each.load.waiting for each in latest),
                waiting_tokens=sum(each.load.waiting_tokens for each in latest),
                queued_tokens=sum(each.load.queued_tokens for each in latest),
            )
        self.step_tokens = max((each.step_tokens for each in known), key=lambda steps: steps.count)
        self.turns = max((each.turns for each in known), key=lambda turns: turns.seconds.count)
        self.prompt_rate = sum(each.prompt_rate for each in heard)
        self.generation_rate = sum(each.generation_rate for each in heard)

    # --- gauges -----------------------------------------------------------------------------------------------------

    @property
    def cache_usage(self) -> float:
        """Share of the KV blocks in use."""
        return 1 - self.load.free_blocks / self.load.num_blocks if self.load.num_blocks else 0.0

    @property
    def retained_share(self) -> float:
        """Share of the KV blocks that are kept for sessions between their turns."""
        return self.load.retained_blocks / self.load.num_blocks if self.load.num_blocks else 0.0

    @property
    def host_usage(self) -> float:
        """Share of the ready swap space in use."""
        return 1 - self.load.free_host_blocks / self.load.ready_host_blocks if self.load.ready_host_blocks else 0.0

    @property
    def cache_waste(self) -> float:
        """Share of the tokens that fit into the KV blocks in use, but are not written."""
        held = (self.load.num_blocks - self.load.free_blocks) * self.load.block_size
        return self.load.unwritten_tokens / held if held else 0.0

    @property
    def queue_seconds(self) -> float:
        """How long the engine needs to compute what waits; 0 if that is not known."""
        return self.load.queued_tokens / self.load.tokens_per_s if self.load.tokens_per_s else 0.0

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the tokens looked up in the prefix cache that were found."""
        return self.load.prefix_hits / self.load.prefix_queries if self.load.prefix_queries else 0.0

    # --- what the engine says ---------------------------------------------------------------------------------------

    def record_load(self, load: Load) -> None:
        self.lost, self.load = False, load

    def record_heartbeat(self, beat: Heartbeat) -> None:
        """Record a heartbeat of the engine, which comes once a second."""
        self.record_load(beat.load)
        if beat.step_tokens:
            self.step_tokens = Histogram(STEP_TOKEN_BOUNDS, beat.step_tokens, beat.step_tokens_sum)
        if beat.turns:
            self.turns = WorkTimes(Histogram(WORK_BOUNDS_S, beat.turns, beat.turns_sum_s), beat.longest_turn_s)

    def record_engine_death(self, epoch: int, waiting: int, queued_tokens: int) -> None:
        """Record that the engine is dead with all that it held.

        Args:
            epoch: Of its successor.
            waiting, queued_tokens: Sequences that wait for the successor, and their tokens.
        """
        self.epoch, self.lost = epoch, True
        self.load = replace(
            self.load,
            running=0,
            waiting=waiting,
            deferred=0,
            waiting_tokens=queued_tokens,
            queued_tokens=queued_tokens,
            free_blocks=self.load.num_blocks,
            retained_blocks=0,
            unwritten_tokens=0,
            free_host_blocks=self.load.ready_host_blocks,
        )

    # --- requests ---------------------------------------------------------------------------------------------------

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
        """Record tokens that a step brought. `cached` counts with the first ones: prompt tokens found computed."""
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

    def record_pooled(self, sequence: SequenceStats, end: End) -> None:
        """Record that a text was pooled, by its last message."""
        if end.vector_shape:
            self.pooled += 1
            sequence.cached_tokens = end.cached_tokens
            self.prompt_tokens += sequence.prompt_tokens
            self.cached_tokens += end.cached_tokens
            self.computed_lengths.observe(sequence.prompt_tokens - end.cached_tokens)

    def record_delivered(self, sequence: SequenceStats, tokens: int) -> None:
        """Record that the reader has got more tokens."""
        sequence.delivered += tokens
        self.generation_tokens += tokens

    def finish_sequence(self, sequence: SequenceStats, reason: EndReason, now: float) -> None:
        """Record that the reader has got a sequence's end, or wants no more of it. Only the first call counts."""
        if sequence.ended is not None:
            return
        sequence.ended = reason
        self.ended[reason] += 1
        self.whole_s.observe(now - sequence.arrival)
        self.prompt_lengths.observe(sequence.prompt_tokens)
        if sequence.max_tokens:  # else it was pooled
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
