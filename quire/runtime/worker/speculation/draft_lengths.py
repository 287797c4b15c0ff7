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

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.compute.attention.metadata import IntArray
from quire.runtime.worker.speculation.step_times import DraftingTimes, StepTimes

FloatArray = npt.NDArray[np.float64]
FIRST_GUESS = 0.7
"""Acceptance before anything is known."""
_MARGIN = 1.03
"""Drafts must bring so many times the tokens a millisecond that there are without."""
_BASELINE_STEPS = 100
"""With drafts, a few in so many steps have none, or more often where that loses little."""
_BASELINE_LOSS = 0.005
"""The share of the time that steps without drafts may cost, at most, where others have some."""
_FEWEST_BASELINE_STEPS = 30
_BASELINE_RUN = 3
"""Steps without drafts that come together: the first one finds the draft model in the processor's caches."""
_FIRST_PAUSE, _LONGEST_PAUSE = 32, 1024
"""While steps have no drafts: how many pass before some are tried, at first and at most."""
_LONGEST_PAUSE_AHEAD = 4096
"""The longest pause on a device that drafts: there several steps try drafts together, and the first of them is
slower."""
_LOOK_EVERY = 16
"""Without drafts, only one step in so many asks whether they would pay: asking takes time too."""
_LOOK_EVERY_AHEAD = 64
"""Takes the place of `_LOOK_EVERY` on a device that runs ahead of the host: there the host's time may be what a step
takes."""
_CHOSEN_FOR = 8
"""Steps of the same rows that a choice holds for, on a device that drafts."""
_TRIED_DRAFTS = 2
_TRIED_RUN = 3
"""Steps that try drafts together where the first one is slower."""
_TRIED_MS = 0.2
"""The time that drafts which are tried are taken to save for each token, as a share of what a token takes without."""


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
        self._look_every = _LOOK_EVERY_AHEAD if waits else _LOOK_EVERY
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
        none = np.zeros_like(most)
        if not self.alone:
            return Choice(none)  # a step without drafts comes first
        choice = None
        if self._trials_left:
            self._trials_left -= 1
            return self._trial(tokens, most)
        if self._since_drafts % self._look_every == 0:
            choice = self._best_for_a_while(tokens, slots, most)
        if choice is None:
            self._since_drafts += 1
            if self._since_drafts <= self._pause:
                return Choice(none)
            longest = _LONGEST_PAUSE_AHEAD if self._settles else _LONGEST_PAUSE
            self._since_drafts, self._pause = 1, min(2 * self._pause, longest)
            self._trials_left = _TRIED_RUN - 1 if self._settles else 0
            return self._trial(tokens, most)
        self._since_baseline += 1
        self._since_drafts, self._pause = 0, _FIRST_PAUSE
        gain = choice.saved_ms * len(slots) / self.alone.of(tokens)  # in shares of the time without
        pause = max(_FEWEST_BASELINE_STEPS, _BASELINE_RUN * gain / _BASELINE_LOSS)
        if self._since_baseline > min(_BASELINE_STEPS, pause):
            self._since_baseline = 0
        return Choice(none) if self._since_baseline < _BASELINE_RUN else choice

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
        return max(0, min(-since % self._look_every, self._pause - since)) if since else 0

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
            self._chosen_for = _CHOSEN_FOR if self._settles else 1
        self._chosen_for -= 1
        return self._chosen[1]

    def _trial(self, tokens: int, most: IntArray) -> Choice:
        return Choice(np.minimum(most, _TRIED_DRAFTS), _TRIED_MS * self.alone.of(tokens) / len(most))

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
