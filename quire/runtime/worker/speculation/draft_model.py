"""Drafts by a smaller model, or by a head of the model itself, which samples them one after another before each step.

Its KV cache lies beside the model's and has as many blocks; a sequence's keys stand in blocks of the same ids, so the
engine plans one set of block tables for both. Only a sequence that may have drafts is computed, when it first has some,
and then as far as it has grown since. Knows nothing about how drafts are verified.

On a device that runs ahead, a sequence that has drafts in a step which still runs can have more behind it: the draft
model reads what that step samples from the device, see `draft_steps.py`.

A head differs in three ways:

- At each place it reads the token behind that place, so its sequences lack their first token.
- It also reads the state that the model has computed there (`hidden_states.py`). Behind a draft that is the head's own
  state, so what it has computed there is computed again once the model's is known.
- States that a plan moves, with their block, are there only once the plan is launched: until then there are no drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from msgspec.structs import replace

from quire.foundation.config.speculation import MAX_DRAFTS
from quire.foundation.messages.workers import Admitted, Plan, Result
from quire.planning.draft_model import DRAFT_TOKENS_A_STEP
from quire.runtime.worker.speculation.draft_steps import DraftSteps, Tokens, last_tokens
from quire.runtime.worker.speculation.step_drafts import StepDrafts, named_drafts
from quire.sampling_params import SamplingParams

_MAX_UNREAD = 256
"""Steps without drafts that are kept, at most, before sequences are told of them."""
_FEW = 16
"""Up to this many tokens of a sequence are always read."""


@dataclass
class _Sequence:
    """The sequence that a slot holds.

    Attributes:
        tokens: All of it; a head's lack the first one.
        sampled: How many of them were sampled.
        key: Stands for whatever else the keys of its tokens depend on.
        computed: How many of its tokens have the draft model's keys in its blocks.
        blocks: Block ids by index.
        keys: Hashes of its full blocks that are computed, see DraftModel.
        proposed: Drafts by the number of their step, until it is recorded.
    """

    tokens: list[int]
    sampled: int
    key: int = 0
    computed: int = 0
    blocks: dict[int, int] = field(default_factory=dict)
    keys: list[int] = field(default_factory=list)
    proposed: dict[int, int] = field(default_factory=dict)

    def put_block(self, index: int, block: int, block_size: int) -> None:
        """Set a block of the sequence. Where it takes the place of another one, what was computed from there on is
        lost."""
        if self.blocks.get(index, block) != block and self.computed > index * block_size:
            self.computed = index * block_size
            del self.keys[index:]
        self.blocks[index] = block


class _Row(NamedTuple):
    """A row that gets drafts, or only reads.

    Attributes:
        slot: The row's slot.
        sequence: The slot's sequence.
        read: How many tokens the draft model reads.
        drafts: How many drafts the row gets.
        bound: How many tokens the sequence may have, drafts left out.
        place: The row's place among the plan's sampled rows.
        follows: Whether the step before still runs.
    """

    slot: int
    sequence: _Sequence
    read: int
    drafts: int
    bound: int
    place: int
    follows: bool

    @property
    def start(self) -> int:
        """How many tokens have their keys already, at most."""
        return self.bound - self.read if self.follows else self.sequence.computed


class DraftModel:
    """A Drafter that samples drafts from a smaller model, or from a head of the model.

    A hash over all tokens up to a block's end tells whose keys the block holds. So keys that the prefix cache brings
    are found again, and what other sequences, swaps or copies have left in a block is computed anew.

    Args:
        steps: Of the draft model, which has as many slots and blocks as the model.
        group: The model's KV group that looks back to the beginning.
        block_size: Tokens of a block.
        longest: Tokens of the longest sequence that the draft model can follow.
        most_tokens: Tokens of one of these steps, at most.
        max_drafts: Drafts of a row, at most.
        is_head: Whether it is a head of the model.
    """

    def __init__(
        self,
        steps: DraftSteps,
        group: int,
        block_size: int,
        longest: int,
        most_tokens: int,
        max_drafts: int,
        *,
        is_head: bool = False,
    ) -> None:
        self._steps = steps
        self._group = group
        self._block_size = block_size
        self._longest = longest
        self._max_tokens = min(DRAFT_TOKENS_A_STEP, most_tokens)
        self._max_drafts = max_drafts
        self._is_head = is_head
        self.on_device = steps.followed is not None
        self._sequences: dict[int, _Sequence] = {}  # by slot
        self._written: dict[int, int] = {}  # by block
        self._changes = _Changes()
        self._unread: list[tuple[Plan, Result]] = []  # steps without drafts, of which sequences have not been told
        self._drafted: set[int] = set()  # steps with drafts that are not recorded
        self.read = 0

    def begin(self, plan: Plan) -> None:
        if plan.admitted:
            self._catch_up()
        for owner in plan.admitted:
            self._sequences.pop(owner.slot, None)
            if owner.history:
                self._sequences[owner.slot] = self._new_sequence(owner)
        places = [place for place, group in enumerate(plan.block_groups) if group == self._group]
        for place in places:
            if (sequence := self._sequences.get(plan.block_slots[place])) is not None:
                sequence.put_block(plan.block_indices[place], plan.block_ids[place], self._block_size)
        self._changes.add(plan, places)
        for owner in plan.admitted:
            if owner.slot in self._sequences:
                self._find_computed(self._sequences[owner.slot])

    def follows(self, plan: Plan) -> bool:
        """Whether drafts can be proposed while the step before still runs: all rows that get some have some in that
        step too, nobody asks what they are, and no slot is new."""
        if not self.on_device or plan.admitted or plan.masked:
            return False
        slots = [plan.slots[row] for row, most in zip(plan.sampled_rows, plan.drafts, strict=True) if most]
        return all(slot in self._sequences and self._sequences[slot].proposed for slot in slots)

    def propose(self, plan: Plan, max_read: int) -> StepDrafts:
        self._catch_up()
        self.read = 0
        rows: list[_Row] = []
        behind: list[_Row] = []
        left = self._max_tokens
        moved = self._moved_blocks(plan)
        for place, most in enumerate(plan.drafts):
            slot = plan.slots[plan.sampled_rows[place]]
            sequence = self._sequences.get(slot) if most else None
            if sequence is None or not left or (moved and not moved.isdisjoint(sequence.blocks.values())):
                continue
            row = self._row(slot, sequence, most, place)
            if row.bound + most > self._longest or (row.read > max(max_read, _FEW) and not row.follows):
                continue
            if row.follows and len(sequence.tokens) + 1 < row.read:
                continue
            if row.read <= left:
                rows.append(row)
            else:
                behind.append(row._replace(read=left))
            self.read += 0 if row.follows else min(row.read, left)
            left -= min(row.read, left)
        if not rows and not behind:
            return StepDrafts.of([()] * len(plan.sampled_rows))
        return self._run(plan, rows, behind)

    def record(self, plan: Plan, result: Result) -> None:
        """Take in what a step has sampled. Steps without drafts are kept, and taken in several at a time."""
        if plan.step in self._drafted:
            self._drafted.remove(plan.step)
            self._catch_up()
            self._take(plan, result)
        else:
            self._unread.append((plan, result))
            if len(self._unread) == _MAX_UNREAD:
                self._catch_up()

    def _catch_up(self) -> None:
        """Take in the steps without drafts that were kept; steps of the same sequences are taken in together."""
        unread, self._unread = self._unread, []
        for slots, group in groupby(unread, key=lambda step: [step[0].slots[row] for row in step[0].sampled_rows]):
            steps = list(group)
            if any(len(result.tokens) != len(slots) for _, result in steps):  # some rows have failed
                for plan, result in steps:
                    self._take(plan, result)
                continue
            for slot, tokens in zip(slots, zip(*(result.tokens for _, result in steps), strict=True), strict=True):
                if (sequence := self._sequences.get(slot)) is not None:
                    sequence.tokens += tokens
                    sequence.sampled += len(tokens)

    def _take(self, plan: Plan, result: Result) -> None:
        """Add the tokens that a step has sampled to their sequences."""
        at = 0
        for row, count in zip(plan.sampled_rows, result.counts, strict=True):
            sequence = self._sequences.get(plan.slots[row])
            if sequence is not None:
                if proposed := sequence.proposed.pop(plan.step, 0):
                    # the last draft's keys are not computed; others' stay as far as they were right
                    stay = 0 if self._is_head else max(0, min(count, proposed) - 1)
                    sequence.computed = len(sequence.tokens) + stay
                sequence.tokens += result.tokens[at : at + count]
                sequence.sampled += count
                self._note_written(sequence)
            at += count

    def first_guess(self, slot: int) -> None:
        """Always None: a guess would have to be computed."""

    def _row(self, slot: int, sequence: _Sequence, most: int, place: int) -> _Row:
        """The row by which a slot gets drafts. Behind a step that still runs, a head reads all tokens again from the
        one that the step began with, since it computed its drafts from states of its own; a model lacks the keys of the
        last draft at most."""
        known = len(sequence.tokens)
        if not sequence.proposed:
            return _Row(slot, sequence, known - sequence.computed, most, known, place, follows=False)
        (proposed,) = sequence.proposed.values()
        read = proposed + 1 if self._is_head else 2
        return _Row(slot, sequence, read, most, known + proposed + 1, place, follows=True)

    def _run(self, plan: Plan, rows: list[_Row], behind: list[_Row]) -> StepDrafts:
        """Compute what is missing, and with it the first draft of each row; then one draft of each after another."""
        every, inputs = [*rows, *behind], list[list[int]]()
        changes = self._changes.take()
        if changes is not None and changes.admitted:
            self._steps.change(changes)
            changes = None
        known, following = ([row for row in every if row.follows is follows] for follows in (False, True))
        if known:
            self._steps.rewind(
                [row.slot for row in known],
                [row.sequence.computed for row in known],
                [row.sequence.sampled for row in known],
                [row.sequence.tokens for row in known],
            )
        if following:
            self._steps.follow([row.slot for row in following], [row.start for row in following])
        for row in every:
            sequence, computed = row.sequence, row.sequence.computed
            if row.follows:
                inputs.append(last_tokens(row.read, self._max_drafts + 1))
            else:
                inputs.append(sequence.tokens[computed : computed + row.read])
            self._forget_written(sequence, row.start + row.read + MAX_DRAFTS)
            if not row.follows:
                sequence.computed += row.read
        room = min((self._longest - row.bound for row in rows), default=0)  # all rows go as far as the longest one
        counts = [min(row.drafts, room) for row in rows]
        first = _first_step([row.slot for row in every], inputs, len(rows), changes)
        found = self._steps.draft(first, counts, read=bool(plan.masked))
        if found is not None:
            counts = list(map(len, found))
        for row, count in zip(rows, counts, strict=True):
            if count:
                row.sequence.proposed[plan.step] = count
                self._drafted.add(plan.step)
        return _by_place(len(plan.sampled_rows), [row.place for row in rows], counts, found)

    def _new_sequence(self, owner: Admitted) -> _Sequence:
        """The sequence of a slot's new owner."""
        if not self._is_head:
            return _Sequence(list(owner.history), owner.num_sampled)
        key = hash((owner.history[0], owner.adapter_slot))  # states differ by both
        return _Sequence(owner.history[1:], owner.num_sampled, key)

    def _moved_blocks(self, plan: Plan) -> set[int]:
        """The blocks to which the plan moves states, which a head would read before they are there."""
        if not self._is_head:
            return set()
        return {target for _, target in plan.copies} | {device for _, device in plan.swap_in}

    def _forget_written(self, sequence: _Sequence, end: int) -> None:
        """Forget what the blocks hold that will change: from the first one that is not computed in full up to the token
        `end`."""
        for index in range(sequence.computed // self._block_size, -(-end // self._block_size)):
            if (block := sequence.blocks.get(index)) is not None:
                self._written.pop(block, None)

    def _find_computed(self, sequence: _Sequence) -> None:
        """Find out how much of a new owner's sequence its blocks hold already."""
        sequence.computed, sequence.keys = 0, []
        size, key = self._block_size, sequence.key
        for index in range((len(sequence.tokens) - 1) // size):
            key = hash((key, *sequence.tokens[index * size : (index + 1) * size]))
            if index not in sequence.blocks or self._written.get(sequence.blocks[index]) != key:
                return
            sequence.keys.append(key)
            sequence.computed += size

    def _note_written(self, sequence: _Sequence) -> None:
        """Note what the blocks hold that have become full."""
        size, keys = self._block_size, sequence.keys
        while (len(keys) + 1) * size <= sequence.computed:
            index = len(keys)
            keys.append(hash((keys[-1] if keys else sequence.key, *sequence.tokens[index * size : (index + 1) * size])))
            self._written[sequence.blocks[index]] = keys[-1]


class _Changes:
    """Collects changes of the draft worker's slots until it runs next, so that it has nothing to do while nothing is
    drafted."""

    def __init__(self) -> None:
        self._owners: dict[int, Admitted] = {}  # by slot
        self._blocks: dict[int, dict[int, int]] = {}  # by slot, block ids by index

    def add(self, plan: Plan, places: list[int]) -> None:
        """Add a plan's new owners of slots, and its entries of block tables at these places."""
        for owner in plan.admitted:
            self._owners[owner.slot] = owner
            self._blocks[owner.slot] = {}
        for place in places:
            self._blocks.setdefault(plan.block_slots[place], {})[plan.block_indices[place]] = plan.block_ids[place]

    def take(self) -> Plan | None:
        """Take all changes, as a plan without rows; None: there are none."""
        if not self._blocks:
            return None
        entries = [(slot, *each) for slot, own in self._blocks.items() for each in own.items()]
        slots, indices, ids = ([each[column] for each in entries] for column in range(3))
        owners = list(map(_drafting, self._owners.values()))
        self._owners, self._blocks = {}, {}
        return Plan(
            step=0,
            admitted=owners,
            block_slots=slots,
            block_groups=[0] * len(slots),
            block_indices=indices,
            block_ids=ids,
        )


def _drafting(owner: Admitted) -> Admitted:
    """The slot's owner as the draft worker takes it: with those sampling settings that decide which token a random
    number stands for, and nothing else."""
    asked = owner.sampling
    sampling = SamplingParams(
        temperature=asked.temperature, top_p=asked.top_p, top_k=asked.top_k, min_p=asked.min_p, max_tokens=1
    )
    return replace(
        owner, length=0, sampling=sampling, stop_ids=[], bad_words=[], history=[], rope_length=0, adapter_slot=0
    )


def _first_step(slots: list[int], inputs: list[list[int]], sampled: int, changes: Plan | None) -> Plan:
    """The plan that makes these changes, then computes these tokens of all slots; the first `sampled` of them
    sample."""
    tokens = [token for own in inputs for token in own]
    rows = list(range(len(slots)))
    plan = Plan(
        step=0,
        slots=slots,
        counts=list(map(len, inputs)),
        token_rows=rows,
        tokens=tokens,
        sampled_rows=rows[:sampled],
    )
    if changes is None:
        return plan
    return replace(
        plan, block_slots=changes.block_slots, block_groups=changes.block_groups, block_indices=changes.block_indices,
        block_ids=changes.block_ids,
    )  # fmt: skip


def _by_place(number: int, places: list[int], counts: list[int], found: Tokens | None) -> StepDrafts:
    """The drafts of a plan with `number` sampled rows: those at `places` have `counts`, and the tokens in `found` if
    the host knows them."""
    if found is None:
        all_counts = [0] * number
        for place, count in zip(places, counts, strict=True):
            all_counts[place] = count
        return named_drafts(tuple(all_counts))
    proposed: list[Sequence[int]] = [()] * number
    for place, tokens in zip(places, found, strict=True):
        proposed[place] = tokens
    return StepDrafts.of(proposed)
