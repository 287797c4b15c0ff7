"""Drafts from a smaller model, or from an EAGLE-3 head of the main model, one after another before each step.

The draft model's KV cache has as many blocks as the main model's, and a sequence's keys are in blocks of the same ids,
so the engine plans one set of block tables for both. A sequence is computed only when it first has drafts, and then as
far as it has grown since. On a device that runs ahead, drafts may follow a step with drafts that still runs: the draft
model reads that step's tokens from the device (`draft_steps.py`).

A head differs in three ways:

- At each position it reads the next token, so its sequences lack their first token.
- It also reads the main model's state at that position (`hidden_states.py`). After a draft it uses a state of its own,
  so these positions are computed again once the main model's state is known.
- A plan moves states together with their blocks when it is launched, so a sequence whose blocks are moved has no drafts
  until then.
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
"""Maximum number of steps without drafts that are kept before their tokens are added to the sequences."""
_FEW = 16
"""A sequence with up to this many unread tokens is always read."""


@dataclass
class _Sequence:
    """The sequence that a slot holds.

    Attributes:
        tokens: All of its tokens; a head's sequence lacks the first one.
        sampled: How many tokens were sampled.
        key: Hash of whatever else the keys of its tokens depend on.
        computed: How many tokens have the draft model's keys in its blocks.
        blocks: Block ids by index.
        keys: Hashes of its full computed blocks, as described at DraftModel.
        proposed: Number of drafts by step, until the step is recorded.
    """

    tokens: list[int]
    sampled: int
    key: int = 0
    computed: int = 0
    blocks: dict[int, int] = field(default_factory=dict)
    keys: list[int] = field(default_factory=list)
    proposed: dict[int, int] = field(default_factory=dict)

    def put_block(self, index: int, block: int, block_size: int) -> None:
        """Set a block of the sequence. If it replaces another block, the tokens from there on count as not computed."""
        if self.blocks.get(index, block) != block and self.computed > index * block_size:
            self.computed = index * block_size
            del self.keys[index:]
        self.blocks[index] = block


class _Row(NamedTuple):
    """A row of a draft model's step, which gets drafts or only reads tokens.

    Attributes:
        read: How many tokens the draft model reads.
        bound: Maximum tokens that the sequence may have, without drafts.
        place: Index of the row among the plan's sampled rows.
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
        """Maximum number of tokens that have their keys already."""
        return self.bound - self.read if self.follows else self.sequence.computed


class DraftModel:
    """A Drafter that samples drafts from a smaller model, or from a head of the main model.

    A hash over all tokens up to a block's end identifies the keys in the block. This finds keys again that the prefix
    cache brings, and recomputes blocks that other sequences, swaps or copies have overwritten.

    Args:
        steps: Runs the draft model, which has as many slots and blocks as the main model.
        group: The main model's KV group without a sliding window.
        longest: Maximum sequence length of the draft model, in tokens.
        most_tokens: Maximum tokens of a step of the draft model.
        max_drafts: Maximum drafts of a row.
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
        """Whether drafts can be proposed while the step before still runs: no slot is new, the host need not know the
        drafts, and all rows that get drafts had some in that step too."""
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
        """Note what a step has sampled. Steps without drafts are collected and processed several at a time."""
        if plan.step in self._drafted:
            self._drafted.remove(plan.step)
            self._catch_up()
            self._take(plan, result)
        else:
            self._unread.append((plan, result))
            if len(self._unread) == _MAX_UNREAD:
                self._catch_up()

    def _catch_up(self) -> None:
        """Process the collected steps without drafts; steps of the same sequences are processed together."""
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
        """Return None: a guess would have to be computed."""

    def _row(self, slot: int, sequence: _Sequence, most: int, place: int) -> _Row:
        """Make the row by which a slot gets drafts. Behind a step that still runs, a head reads all tokens since that
        step's start again, because it drafted from its own states; a model lacks at most the keys of the last draft."""
        known = len(sequence.tokens)
        if not sequence.proposed:
            return _Row(slot, sequence, known - sequence.computed, most, known, place, follows=False)
        (proposed,) = sequence.proposed.values()
        read = proposed + 1 if self._is_head else 2
        return _Row(slot, sequence, read, most, known + proposed + 1, place, follows=True)

    def _run(self, plan: Plan, rows: list[_Row], behind: list[_Row]) -> StepDrafts:
        """Compute the missing tokens and the first draft of each row, then the further drafts one by one."""
        every, inputs = [*rows, *behind], list[list[int]]()
        changes = self._changes.take()
        if changes is not None and changes.admitted:
            self._steps.runner.launch(changes)  # nobody waits for it
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
        if not self._is_head:
            return _Sequence(list(owner.history), owner.num_sampled)
        key = hash((owner.history[0], owner.adapter_slot))  # states differ by both
        return _Sequence(owner.history[1:], owner.num_sampled, key)

    def _moved_blocks(self, plan: Plan) -> set[int]:
        """Return the blocks to which the plan moves states, which a head would read before they are there."""
        if not self._is_head:
            return set()
        return {target for _, target in plan.copies} | {device for _, device in plan.swap_in}

    def _forget_written(self, sequence: _Sequence, end: int) -> None:
        """Forget the contents of blocks that will change, from the first one not computed in full up to token `end`."""
        for index in range(sequence.computed // self._block_size, -(-end // self._block_size)):
            if (block := sequence.blocks.get(index)) is not None:
                self._written.pop(block, None)

    def _find_computed(self, sequence: _Sequence) -> None:
        """Find out how many tokens of a new owner's sequence its blocks already hold."""
        sequence.computed, sequence.keys = 0, []
        size, key = self._block_size, sequence.key
        for index in range((len(sequence.tokens) - 1) // size):
            key = hash((key, *sequence.tokens[index * size : (index + 1) * size]))
            if index not in sequence.blocks or self._written.get(sequence.blocks[index]) != key:
                return
            sequence.keys.append(key)
            sequence.computed += size

    def _note_written(self, sequence: _Sequence) -> None:
        """Note the contents of blocks that have become full."""
        size, keys = self._block_size, sequence.keys
        while (len(keys) + 1) * size <= sequence.computed:
            index = len(keys)
            keys.append(hash((keys[-1] if keys else sequence.key, *sequence.tokens[index * size : (index + 1) * size])))
            self._written[sequence.blocks[index]] = keys[-1]


class _Changes:
    """Collects changes of the draft worker's slots until it runs next, so that it does no work while nothing is
    drafted."""

    def __init__(self) -> None:
        self._owners: dict[int, Admitted] = {}  # by slot
        self._blocks: dict[int, dict[int, int]] = {}  # by slot, block ids by index

    def add(self, plan: Plan, places: list[int]) -> None:
        """Add the plan's new owners of slots, and the block table entries at the indices `places`."""
        for owner in plan.admitted:
            self._owners[owner.slot] = owner
            self._blocks[owner.slot] = {}
        for place in places:
            self._blocks.setdefault(plan.block_slots[place], {})[plan.block_indices[place]] = plan.block_ids[place]

    def take(self) -> Plan | None:
        """Return all collected changes as a plan without rows, or None if there are none."""
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
    """Return the owner with only the sampling settings that decide which token a random number selects."""
    asked = owner.sampling
    sampling = SamplingParams(
        temperature=asked.temperature, top_p=asked.top_p, top_k=asked.top_k, min_p=asked.min_p, max_tokens=1
    )
    return replace(
        owner, length=0, sampling=sampling, stop_ids=[], bad_words=[], history=[], rope_length=0, adapter_slot=0
    )


def _first_step(slots: list[int], inputs: list[list[int]], sampled: int, changes: Plan | None) -> Plan:
    """Make the plan that applies `changes` and computes `inputs`; the first `sampled` slots sample."""
    tokens = [token for own in inputs for token in own]
    rows = list(range(len(slots)))
    return replace(
        changes or Plan.empty(),
        slots=slots,
        counts=list(map(len, inputs)),
        token_rows=rows,
        tokens=tokens,
        sampled_rows=rows[:sampled],
    )


def _by_place(number: int, places: list[int], counts: list[int], found: Tokens | None) -> StepDrafts:
    """Return the drafts of a plan with `number` sampled rows; the rows at `places` have `counts` drafts, whose tokens
    are `found` if the host knows them."""
    if found is None:
        all_counts = [0] * number
        for place, count in zip(places, counts, strict=True):
            all_counts[place] = count
        return named_drafts(tuple(all_counts))
    proposed: list[Sequence[int]] = [()] * number
    for place, tokens in zip(places, found, strict=True):
        proposed[place] = tokens
    return StepDrafts.of(proposed)
