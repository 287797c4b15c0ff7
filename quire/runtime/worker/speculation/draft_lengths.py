"""How many drafts pay: from how often they were accepted, and how long steps of so many tokens take.

A step of n tokens brings the tokens of its rows, and for a row whose drafts are accepted with probability a each, a +
a² + … + a^d more (Leviathan, Kalman, Matias 2023, section 3.1). The number of drafts is chosen that brings most tokens
a millisecond; none where that is next to nothing. Now and then a step tries the other side, so that what is known stays
true: one without drafts where there are some, one with a few where there are none, ever more seldom while they fail.
How often drafts are found at all counts as well: asking for them takes the host's time.

A device that runs ahead of the host has to wait for a step that asks for drafts, whether any are found or not. There,
steps that ask are timed by themselves. If it drafts itself, only the first of several such steps is waited for: so a
few are tried together, and the first does not count.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.compute.attention.metadata import IntArray

FloatArray = npt.NDArray[np.float64]
FIRST_GUESS = 0.7
"""Acceptance before anything is known."""
_MARGIN = 1.03
"""Drafts must bring so many times the tokens a millisecond that there are without."""
_BASELINE_RUN = 3
"""Steps without drafts that come together: the first one finds the draft model in the processor's caches."""
_BASELINE_STEPS = range(30, 101)
"""How many steps with drafts pass before a run without: so many that it costs less than _BASELINE_LOSS."""
_BASELINE_LOSS = 0.005
"""A share of the time."""
_FIRST_PAUSE = 32
"""While steps have no drafts: how many pass before some are tried, at first. Each pause is twice the last one."""
_TRIED_DRAFTS = 2
_TRIED_MS = 0.2
"""The time that drafts which are tried are taken to save for each token, as a share of what a token takes without."""
_PRIOR_SLOPE = 0.15
"""Before more is known: each further token takes this share of the time of a step of one."""
_EXACT = 8
"""Steps of up to so many tokens are told apart; larger ones by powers of two."""
_RATE_OF_TIMES = 0.1
_OUTLIER = 1.5
"""A time that differs from what is usual by more than this factor counts as this much: the machine was busy."""


class Pace(NamedTuple):
    """How often drafts are thought about.

    Attributes:
        look_every: While steps have no drafts, only one in so many asks whether they would pay: asking takes time too.
        learn_every: While no guess would have been right either, only one in so many is learned from.
        longest_pause: Steps that pass before some drafts are tried again, at most.
        tried_run: Steps that try drafts together.
        chosen_for: Steps of the same rows that a choice holds for.
    """

    look_every: int
    learn_every: int
    longest_pause: int = 1024
    tried_run: int = 1
    chosen_for: int = 1


ON_HOST = Pace(look_every=16, learn_every=4)
"""Where the host computes steps."""
AHEAD = Pace(look_every=64, learn_every=16)
"""On a device that runs ahead of the host: there the host's time may be what a step takes."""
DEVICE_DRAFTS = AHEAD._replace(longest_pause=4096, tried_run=3, chosen_for=8)
"""On a device that also drafts: there the first of several steps that try drafts is slower."""


class StepTimes:
    """Averages of how long steps take, by their tokens, and straight lines between them."""

    def __init__(self) -> None:
        self._sizes: list[float] = []  # ascending, of the buckets below
        self._times: list[float] = []
        self._buckets: list[int] = []
        self._seen: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._sizes)

    def learn(self, tokens: int, ms: float) -> None:
        """Learn how long a step of this many tokens took."""
        bucket = tokens if tokens <= _EXACT else _EXACT + (tokens - 1).bit_length()
        at = bisect_left(self._buckets, bucket)
        if at == len(self._buckets) or self._buckets[at] != bucket:
            self._buckets.insert(at, bucket)
            self._sizes.insert(at, tokens)
            self._times.insert(at, ms)
            self._seen.insert(at, 1)
            return
        self._seen[at] += 1
        rate = max(_RATE_OF_TIMES, 1 / self._seen[at])
        usual = self._times[at]
        self._times[at] += rate * (min(max(ms, usual / _OUTLIER), usual * _OUTLIER) - usual)
        self._sizes[at] += rate * (tokens - self._sizes[at])

    def of(self, tokens: int) -> float:
        """How many milliseconds a step of this many tokens takes; 0 while nothing is known."""
        sizes, times = self._sizes, self._times
        if not sizes:
            return 0.0
        at = bisect_left(sizes, tokens)
        if 0 < at < len(sizes):
            share = (tokens - sizes[at - 1]) / (sizes[at] - sizes[at - 1])
            return times[at - 1] + share * (times[at] - times[at - 1])
        at = min(at, len(sizes) - 1)
        return times[at] * (1 + _PRIOR_SLOPE * (tokens - 1)) / (1 + _PRIOR_SLOPE * (sizes[at] - 1))


class DraftingTimes:
    """Averages of how long drafting takes, by number of drafts and rows."""

    def __init__(self) -> None:
        self._by_drafts: dict[int, StepTimes] = {}

    def learn(self, drafts: int, rows: int, ms: float) -> None:
        """Learn how long it took to draft this many tokens for each of this many rows."""
        self._by_drafts.setdefault(drafts, StepTimes()).learn(rows, ms)

    def of(self, drafts: int, rows: int) -> float:
        """How many milliseconds drafting takes; 0 while nothing is known. A number of drafts that was not tried is
        estimated from the nearest one that was; the first draft takes half as long again as another, since it is
        preceded by what was sampled since the last ones."""
        if not self._by_drafts:
            return 0.0
        nearest = min(self._by_drafts, key=lambda known: abs(known - drafts))
        return self._by_drafts[nearest].of(rows) * (0.5 + drafts) / (0.5 + nearest)


class Acceptance:
    """How likely a draft is accepted once those before it are, in all sequences and in each."""

    def __init__(self) -> None:
        self._all = [FIRST_GUESS * 10, 10.0]  # accepted, tried
        self._by_slot: dict[int, list[float]] = {}
        self._found_all = [5.0, 10.0]  # found, asked
        self._found: dict[int, list[float]] = {}

    def admit(self, slot: int) -> None:
        """Forget what is known of a slot: it has a new owner."""
        self._by_slot.pop(slot, None)
        self._found.pop(slot, None)

    def learn_found(self, slot: int, found: bool) -> None:
        """Learn whether any drafts were found for a slot when they were asked for."""
        for counts, kept in ((self._found_all, 0.98), (self._found.setdefault(slot, [0.0, 0.0]), 0.9)):
            counts[0] = counts[0] * kept + found
            counts[1] = counts[1] * kept + 1

    def learn(self, slot: int, accepted: int, proposed: int) -> None:
        """Learn how many of the drafts proposed for a slot were accepted."""
        tried = min(accepted + 1, proposed)
        for counts, kept in ((self._all, 0.998), (self._by_slot.setdefault(slot, [0.0, 0.0]), 0.95)):
            counts[0] = counts[0] * kept + accepted
            counts[1] = counts[1] * kept + tried

    def rest(self, slot: int) -> None:
        """Let what is known of a slot fade: its row had no drafts though it might have had some."""
        if (counts := self._by_slot.get(slot)) is not None:
            counts[0] *= 0.99
            counts[1] *= 0.99

    @property
    def usual(self) -> float:
        """How likely a draft is accepted, over all sequences."""
        return self._all[0] / self._all[1]

    def of(self, slot: int) -> float:
        """How likely a draft of the slot's owner is accepted. What is known of all sequences counts as much as five
        drafts of its own."""
        accepted, tried = self._by_slot.get(slot, (0.0, 0.0))
        return (5 * self.usual + accepted) / (5 + tried)

    def found(self, slot: int) -> float:
        """How likely any drafts are found for the slot's owner. What is known of all sequences counts as much as two
        times that its own were asked for."""
        found, asked = self._found.get(slot, (0.0, 0.0))
        return (2 * self._found_all[0] / self._found_all[1] + found) / (2 + asked)


@dataclass(frozen=True)
class Choice:
    """How many drafts a step should have.

    Attributes:
        drafts: [rows] most drafts of each.
        saved_ms: How much sooner a token is expected than without drafts.
    """

    drafts: IntArray
    saved_ms: float = 0.0


class DraftLengths:
    """Chooses how many drafts each row of a step has.

    Args:
        waits: Whether a step that asks for drafts has to be waited for.
        settles: Whether a step that asks for drafts behind one that does not is slower than those that follow.

    Attributes:
        alone: Times of steps that ask for no drafts, by their tokens.
        steps: Times of steps that ask for some, without drafting. Where nothing waits, this is `alone` too.
        drafting: Times of proposing, by drafts and rows.
        acceptance: Of drafts.
    """

    def __init__(self, waits: bool = False, *, settles: bool = False) -> None:
        self.steps, self.drafting = StepTimes(), DraftingTimes()
        self.alone = StepTimes() if waits else self.steps
        self.pace = DEVICE_DRAFTS if settles else AHEAD if waits else ON_HOST
        self.acceptance = Acceptance()
        self._since_baseline = _BASELINE_RUN  # steps since the last run of them has begun
        self._since_drafts = 0
        self._pause = _FIRST_PAUSE
        self._asked_before = False
        self._settles = settles
        self._trials_left = 0  # steps that go on trying drafts
        self._chosen: tuple[tuple[int, ...], Choice | None] = (), None  # for which rows, and what
        self._chosen_for = 0  # so many more steps

    def choose(self, tokens: int, slots: list[int], most: IntArray) -> Choice:
        """Choose the drafts of a step that has `tokens` without them, and whose rows of these slots may have up to
        `most` [rows] drafts."""
        none, choice = Choice(np.zeros_like(most)), None
        if not self.alone:
            return none  # a step without drafts comes first
        if not self._trials_left and self._since_drafts % self.pace.look_every == 0:
            choice = self._best_for_a_while(tokens, slots, most)
        if choice is None:
            if not self._trials_left:
                self._since_drafts += 1
                if self._since_drafts <= self._pause:
                    return none
                self._since_drafts, self._pause = 1, min(2 * self._pause, self.pace.longest_pause)
                self._trials_left = self.pace.tried_run
            self._trials_left -= 1
            saved_ms = _TRIED_MS * self.alone.of(tokens) / len(most)
            return Choice(np.minimum(most, _TRIED_DRAFTS), saved_ms)
        self._since_baseline += 1
        self._since_drafts, self._pause = 0, _FIRST_PAUSE
        gain = choice.saved_ms * len(slots) / self.alone.of(tokens)  # in shares of the time without
        pause = max(_BASELINE_STEPS.start, _BASELINE_RUN * gain / _BASELINE_LOSS)
        if self._since_baseline > min(_BASELINE_STEPS[-1], pause):
            self._since_baseline = 0
        return none if self._since_baseline < _BASELINE_RUN else choice

    def learn_step(self, tokens: int, ms: float, *, asked: bool) -> None:
        """Learn how long a step took, drafting left out. A step without drafts right behind one with some does not
        count: it is slower than those that follow, since the draft model has taken the model's place in the processor's
        caches. Nor does a step with drafts right behind one without, where that has waited for the host."""
        times, changed = self.steps if asked else self.alone, asked is not self._asked_before
        if not changed or (asked and not self._settles) or (not asked and not times):
            times.learn(tokens, ms)
        self._asked_before = asked

    def skip(self) -> None:
        """Note a step that could have no drafts."""
        if self._since_drafts:
            self._since_drafts += 1

    @property
    def rests(self) -> bool:
        """Whether drafts do not pay, as far as is known."""
        return self._since_drafts > 0

    @property
    def resting(self) -> int:
        """How many of the next steps surely have no drafts."""
        since = 0 if self._trials_left else self._since_drafts
        return max(0, min(-since % self.pace.look_every, self._pause - since)) if since else 0

    def wake(self) -> None:
        """Let the next step that may have drafts ask whether they would pay."""
        self._since_drafts = 0

    def _best_for_a_while(self, tokens: int, slots: list[int], most: IntArray) -> Choice | None:
        """The best choice; where the host's time may be what a step takes, it is made anew every few steps."""
        rows = (tokens, *slots, *most.tolist())
        if not self._chosen_for or rows != self._chosen[0]:
            rates = np.array([self.acceptance.of(slot) for slot in slots])
            finds = np.array([self.acceptance.found(slot) for slot in slots])
            self._chosen = rows, self._best(tokens, rates, finds, most)
            self._chosen_for = self.pace.chosen_for
        self._chosen_for -= 1
        return self._chosen[1]

    def _best(self, tokens: int, rates: FloatArray, finds: FloatArray, most: IntArray) -> Choice | None:
        """The best number of drafts; None if that is 0."""
        longest, rows = int(most.max(initial=0)), len(rates)
        powers = np.cumprod(np.repeat(rates[:, None], longest, axis=1), axis=1)  # [rows, drafts]
        powers[np.arange(longest) >= most[:, None]] = 0.0
        alone_ms, steps = self.alone.of(tokens), self.steps or self.alone
        best, chosen, best_step_ms, brought = rows / alone_ms * _MARGIN, 0, 0.0, float(rows)
        for drafts in range(1, longest + 1):
            brought += float((powers[:, drafts - 1] * finds).sum())
            step_ms = steps.of(tokens + round(float((np.minimum(most, drafts) * finds).sum())))
            ms = step_ms + self.drafting.of(drafts, rows)
            if brought / ms > best:
                best, chosen, best_step_ms = brought / ms, drafts, step_ms
        if not chosen:
            return None
        granted = np.minimum(most, chosen)
        token_ms = max(0.0, best_step_ms - alone_ms) / max(1, int(granted.sum()))
        if rows > 1:  # a row whose draft is less likely than what its token costs has fewer
            granted = np.minimum(granted, (powers >= best * token_ms).sum(axis=1))
        return Choice(granted, alone_ms / rows - 1 / best)
