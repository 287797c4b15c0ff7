"""Decides how many drafts pay off, from how often they were accepted and how long steps take.

If each draft is accepted with probability a, a row with d drafts gains a + a² + … + a^d tokens beyond its own
(Leviathan, Kalman, Matias 2023, section 3.1). The number of drafts with the most tokens per millisecond is chosen, or
none if the gain is negligible. To keep the measurements true, some steps try the other side: steps without drafts now
and then, or a few drafts while there are none, less and less often while they fail. How often drafts are found at all
counts too, because asking for them takes the host's time.

A device that runs ahead of the host waits for a step that asks for drafts, whether any are found or not, so such steps
are timed separately. If the device drafts itself, only the first of several such steps is waited for: a few are tried
together, and the first is not counted.
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
"""Acceptance rate that is assumed at first."""
_MARGIN = 1.03
"""Drafts must bring at least this many times the tokens per millisecond of steps without drafts."""
_BASELINE_RUN = 3
"""Consecutive steps without drafts. Several are needed because the first finds the draft model in the processor's
caches."""
_BASELINE_STEPS = range(30, 101)
"""Bounds on the steps with drafts between two runs without; they keep the cost of a run below _BASELINE_LOSS."""
_BASELINE_LOSS = 0.005
"""Maximum share of the time that runs without drafts may cost."""
_FIRST_PAUSE = 32
"""Steps without drafts before drafts are tried the first time; each pause is twice the one before."""
_TRIED_DRAFTS = 2
_TRIED_MS = 0.2
"""Time that tried drafts are assumed to save per token, as a share of a token's time without drafts."""
_PRIOR_SLOPE = 0.15
"""Assumed cost of each further token, as a share of the time of a step of one token, before it is measured."""
_EXACT = 8
"""Steps of up to this many tokens are timed separately; larger ones are grouped by powers of two."""
_RATE_OF_TIMES = 0.1
_OUTLIER = 1.5
"""Measured times are clipped to within this factor of the average, because the machine may have been busy."""


class Pace(NamedTuple):
    """How often drafts are considered.

    Attributes:
        look_every: While drafts do not pay, one in this many steps checks whether they would, because the check takes
            time.
        learn_every: While guesses would not have been right either, one in this many steps is learned from.
        longest_pause: Maximum steps before drafts are tried again.
        tried_run: Steps that try drafts together.
        chosen_for: Number of steps of the same rows that a choice is used for.
    """

    look_every: int
    learn_every: int
    longest_pause: int = 1024
    tried_run: int = 1
    chosen_for: int = 1


ON_HOST = Pace(look_every=16, learn_every=4)
"""Pace where the host computes steps."""
AHEAD = Pace(look_every=64, learn_every=16)
"""Pace on a device that runs ahead of the host, where the host's time may limit a step."""
DEVICE_DRAFTS = AHEAD._replace(longest_pause=4096, tried_run=3, chosen_for=8)
"""Pace on a device that also drafts, where the first of several steps that try drafts is slower."""


class StepTimes:
    """Average step times by number of tokens, interpolated linearly."""

    def __init__(self) -> None:
        self._sizes: list[float] = []  # ascending, of the buckets below
        self._times: list[float] = []
        self._buckets: list[int] = []
        self._seen: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._sizes)

    def learn(self, tokens: int, ms: float) -> None:
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
        """Return the milliseconds that a step of this many tokens takes; 0 while nothing is known."""
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
    """Average drafting times by number of drafts and rows."""

    def __init__(self) -> None:
        self._by_drafts: dict[int, StepTimes] = {}

    def learn(self, drafts: int, rows: int, ms: float) -> None:
        self._by_drafts.setdefault(drafts, StepTimes()).learn(rows, ms)

    def of(self, drafts: int, rows: int) -> float:
        """Return the milliseconds that drafting takes; 0 while nothing is known. An untried number of drafts is
        estimated from the nearest tried one. The first draft takes 1.5 times as long as another, because the tokens
        sampled since the last drafts come first."""
        if not self._by_drafts:
            return 0.0
        nearest = min(self._by_drafts, key=lambda known: abs(known - drafts))
        return self._by_drafts[nearest].of(rows) * (0.5 + drafts) / (0.5 + nearest)


class SuccessRate:
    """How likely a trial succeeds, over all sequences and for each slot's owner. Earlier trials count less.

    Args:
        first: The rate at first, as if it came from ten trials.
        kept, kept_of_slot: What earlier trials count for after each lesson, over all sequences and for one slot.
        weight: How many trials of a slot's owner the rate over all sequences weighs as much as.
    """

    def __init__(self, first: float, kept: float, kept_of_slot: float, weight: int) -> None:
        self._all = [first * 10, 10.0]  # successes, trials
        self._by_slot: dict[int, list[float]] = {}
        self._kept, self._kept_of_slot = kept, kept_of_slot
        self._weight = weight

    def admit(self, slot: int) -> None:
        """Forget what is known of a slot, because it has a new owner."""
        self._by_slot.pop(slot, None)

    def learn(self, slot: int, successes: int, trials: int) -> None:
        own = self._by_slot.setdefault(slot, [0.0, 0.0])
        for counts, kept in ((self._all, self._kept), (own, self._kept_of_slot)):
            counts[0] = counts[0] * kept + successes
            counts[1] = counts[1] * kept + trials

    def fade(self, slot: int) -> None:
        """Let what is known of a slot count a little less."""
        if (counts := self._by_slot.get(slot)) is not None:
            counts[0] *= 0.99
            counts[1] *= 0.99

    @property
    def usual(self) -> float:
        """The rate over all sequences."""
        return self._all[0] / self._all[1]

    def of(self, slot: int) -> float:
        """Return the rate of the slot's owner."""
        successes, trials = self._by_slot.get(slot, (0.0, 0.0))
        return (self._weight * self.usual + successes) / (self._weight + trials)


@dataclass(frozen=True)
class Choice:
    """How many drafts a step should have.

    Attributes:
        drafts: [rows] maximum drafts of each row.
        saved_ms: How much sooner a token is expected than without drafts.
    """

    drafts: IntArray
    saved_ms: float = 0.0


class DraftLengths:
    """Chooses how many drafts each row of a step has.

    Args:
        waits: Whether the device must be waited for before a step that asks for drafts.
        settles: Whether a step that asks for drafts is slower if the step before did not.

    Attributes:
        alone: Times of steps that ask for no drafts, by their tokens.
        steps: Times of steps that ask for drafts, without drafting. The same object as `alone` where nothing waits.
        drafting: Times of drafting, by drafts and rows.
        acceptance: How likely a draft is accepted if those before it are.
        found: How likely drafts are found when they are asked for.
    """

    def __init__(self, waits: bool = False, *, settles: bool = False) -> None:
        self.steps, self.drafting = StepTimes(), DraftingTimes()
        self.alone = StepTimes() if waits else self.steps
        self.pace = DEVICE_DRAFTS if settles else AHEAD if waits else ON_HOST
        self.acceptance = SuccessRate(FIRST_GUESS, kept=0.998, kept_of_slot=0.95, weight=5)
        self.found = SuccessRate(0.5, kept=0.98, kept_of_slot=0.9, weight=2)
        self._since_baseline = _BASELINE_RUN  # steps since the last run of them has begun
        self._since_drafts = 0
        self._pause = _FIRST_PAUSE
        self._asked_before = False
        self._settles = settles
        self._trials_left = 0  # steps that go on trying drafts
        self._chosen: tuple[tuple[int, ...], Choice | None] = (), None  # for which rows, and what
        self._chosen_for = 0  # so many more steps

    def admit(self, slot: int) -> None:
        """Forget what is known of a slot, because it has a new owner."""
        self.acceptance.admit(slot)
        self.found.admit(slot)

    def learn_accepted(self, slot: int, accepted: int, proposed: int) -> None:
        self.acceptance.learn(slot, accepted, min(accepted + 1, proposed))

    def choose(self, tokens: int, slots: list[int], most: IntArray) -> Choice:
        """Choose the drafts of a step that has `tokens` tokens without them. The rows of `slots` may have up to `most`
        [rows] drafts."""
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
        """Learn how long a step took, without drafting.

        The first step without drafts after one with drafts is not counted: it is slower, since the draft model has
        replaced the model in the processor's caches. Where steps wait for the host, the first step with drafts is not
        counted either.
        """
        times, changed = self.steps if asked else self.alone, asked is not self._asked_before
        if not changed or (asked and not self._settles) or (not asked and not times):
            times.learn(tokens, ms)
        self._asked_before = asked

    def skip(self) -> None:
        """Note a step that could not have drafts."""
        if self._since_drafts:
            self._since_drafts += 1

    @property
    def rests(self) -> bool:
        """Whether drafts do not pay, as far as is known."""
        return self._since_drafts > 0

    @property
    def resting(self) -> int:
        """How many of the next steps will certainly have no drafts."""
        since = 0 if self._trials_left else self._since_drafts
        return max(0, min(-since % self.pace.look_every, self._pause - since)) if since else 0

    def wake(self) -> None:
        """Let the next step that may have drafts check whether they would pay."""
        self._since_drafts = 0

    def _best_for_a_while(self, tokens: int, slots: list[int], most: IntArray) -> Choice | None:
        """Return the best choice, which is kept for a few steps where the host's time may limit a step."""
        rows = (tokens, *slots, *most.tolist())
        if not self._chosen_for or rows != self._chosen[0]:
            rates = np.array([self.acceptance.of(slot) for slot in slots])
            finds = np.array([self.found.of(slot) for slot in slots])
            self._chosen = rows, self._best(tokens, rates, finds, most)
            self._chosen_for = self.pace.chosen_for
        self._chosen_for -= 1
        return self._chosen[1]

    def _best(self, tokens: int, rates: FloatArray, finds: FloatArray, most: IntArray) -> Choice | None:
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
