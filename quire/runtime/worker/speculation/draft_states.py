"""Keeps rejected drafts out of the states of sequences, which nobody can take back.

A row with drafts runs on a scratch copy of its sequence's state. Once it is known which drafts are accepted, the ops
that read and write states run again, with the inputs that the step has computed: on the sequence's own state, through
the tokens that stay. So a state is always that of accepted tokens, and checkpoints are made within a row as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from quire.compute.attention.metadata import IntArray
from quire.compute.kernels.reference.state_inputs import StateRows
from quire.foundation.config.speculation import MAX_DRAFTS
from quire.runtime.worker.slot_table import SlotTable
from quire.runtime.worker.state_tensors import StateTensors

if TYPE_CHECKING:
    from quire.runtime.worker.host_batch import HostBatch
    from quire.runtime.worker.step import Step


class _Part(NamedTuple):
    """Tokens of a row, from `first` to `end`, that take a state further."""

    first: int
    end: int
    state: int
    scratch: int


class DraftStates:
    """The states of a step's rows on a CPU, with drafts and without.

    Args:
        states: The states of sequences, and a scratch one for each slot if there may be drafts.
        slots: The slots of the sequences.
    """

    def __init__(self, states: StateTensors, slots: SlotTable) -> None:
        self._states = states
        self._slots = slots

    def of_rows(self, step: Step, host: HostBatch) -> IntArray:
        """Return the states [rows] that the rows of the step, which is padded to `host`, run on."""
        states: IntArray = self._slots.host.states[host.slots]
        if step.drafts:
            rows = _drafted(step)
            states[rows] = self._states.first_scratch + host.slots[rows]
        return states

    def begin(self, step: Step) -> None:
        """Load states before the rows of a staged step move."""
        self._states.load(step.plan.state_loads)
        if step.drafts:
            slots = step.host.slots[_drafted(step)]
            own = self._slots.host.states[slots].tolist()
            self._states.save(list(zip(own, (self._states.first_scratch + slots).tolist(), strict=True)))

    def settle(self, step: Step, gained: IntArray | None = None) -> None:
        """Take the states of rows with drafts through what they have gained, and make the step's checkpoints.

        Args:
            gained: [sampled rows], how many tokens each has gained, which its slot counts already; None without drafts.
        """
        plan = step.plan
        self._states.save(plan.state_saves)
        if not plan.state_marks and not step.drafts:
            return
        drafted = _drafted(step)
        slots, moved = step.host.slots, np.zeros_like(step.host.slots)
        own: list[int] = self._slots.host.states[slots].tolist()
        ends: list[int] = self._slots.length[torch.from_numpy(slots)].tolist()
        if gained is not None:
            moved[plan.sampled_rows] = gained
        marks, others = _marks_of(plan.state_marks), sorted(set(range(len(slots))) - set(drafted.tolist()))
        self._states.save([  # these rows have moved their own states
            (own[row], state) for row in others
            for length, state in marks.get(int(slots[row]), ()) if length == ends[row]
        ])  # fmt: skip
        rows = [(row, _cuts(marks.get(int(slots[row]), ()), int(moved[row]), ends[row])) for row in drafted.tolist()]
        while rows := [(row, cuts) for row, cuts in rows if len(cuts) > 1]:
            self._run(step, [(row, cuts[0][0], cuts[1][0]) for row, cuts in rows])
            self._states.save([(own[row], cuts[1][1]) for row, cuts in rows if cuts[1][1]])
            rows = [(row, cuts[1:]) for row, cuts in rows]

    def _run(self, step: Step, parts: list[tuple[int, int, int]]) -> None:
        """Run the step's ops again for parts of rows: (row, from, to), counted from the row's first token."""
        host, own = step.host, self._slots.host.states
        spans = []
        for row, begin, end in sorted(parts):
            first, slot = int(host.first_tokens[row]), int(host.slots[row])
            spans.append(_Part(first + begin, first + end, int(own[slot]), self._states.first_scratch + slot))
        at = 0
        while at < len(spans):
            rows, at = _adjacent(spans, at)
            self._states.by_layer.run_again(rows)


def _drafted(step: Step) -> IntArray:
    """Return the rows that have drafts."""
    if not step.drafts:
        return _NO_ROWS
    rows: IntArray = np.array(step.plan.sampled_rows, dtype=np.int64)[step.drafts.counts > 0]
    return rows


_NO_ROWS = np.zeros(0, dtype=np.int64)


def _marks_of(marks: list[tuple[int, int, int]]) -> dict[int, list[tuple[int, int]]]:
    by_slot = dict[int, list[tuple[int, int]]]()
    for slot, length, state in marks:
        by_slot.setdefault(slot, []).append((length, state))
    return by_slot


def _cuts(marks: Sequence[tuple[int, int]], moved: int, end: int) -> list[tuple[int, int]]:
    """Return where a row that moved so far, and ends at length `end`, is cut: (tokens, state that is saved there or 0),
    from its start to its end."""
    start = end - moved
    within = sorted((length - start, state) for length, state in marks if start < length <= end)
    ends = [] if moved == max([0, *(tokens for tokens, _ in within)]) else [(moved, 0)]
    return [(0, 0), *within, *ends]


def _adjacent(spans: list[_Part], at: int) -> tuple[StateRows, int]:
    """Return the rows of the parts from `at` on that few other tokens lie between, and the number of the next part.
    These others take scratch states, which nobody reads any more."""
    states, starts = [spans[at].state], [spans[at].first, spans[at].end]
    while (at := at + 1) < len(spans) and (gap := spans[at].first - starts[-1]) <= MAX_DRAFTS:
        if gap:
            states.append(spans[at - 1].scratch)
            starts.append(spans[at].first)
        states.append(spans[at].state)
        starts.append(spans[at].end)
    return StateRows(torch.tensor(states), torch.tensor(starts)), at
