"""Drafts by a smaller model, or by a head of the model itself, which samples them one after another before each step.

Its KV cache lies beside the model's and has as many blocks; a sequence's keys stand in blocks of the same ids, so the
engine plans one set of block tables for both. Only a sequence that may have drafts is computed, when it first has some,
and then as far as it has grown since. Knows nothing about how drafts are verified.

A head differs in three ways:

- At each place it reads the token behind that place, so its sequences lack their first token.
- It also reads the state that the model has computed there (`hidden_states.py`). Behind a draft that is the head's own
  state, so what it has computed there is computed again once the model's is known.
- States that a plan moves, with their block, are there only once the plan is launched: until then there are no drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from quire.config.speculation import MOST_DRAFTS
from quire.messages import Admitted, Plan, Result
from quire.planning.draft_model import DRAFT_TOKENS_A_STEP
from quire.sampling import SamplingParams
from quire.worker.speculation.step_drafts import StepDrafts

_FEW = 16
"""So many tokens of a sequence are always read."""


class DraftWorker(Protocol):
    """A worker with the draft model."""

    def change(self, plan: Plan) -> None:
        """Make the changes of a plan without rows, without waiting for them."""
        ...

    def execute_all(self, plans: Iterable[Plan]) -> list[Result]:
        """Run steps, one launched behind another."""
        ...

    def rewind(self, slots: Sequence[int], lengths: Sequence[int], num_sampled: Sequence[int]) -> None:
        """Set slots to these lengths and counters, whatever they have computed and sampled beyond."""
        ...


@dataclass
class _Sequence:
    """What a slot holds.

    Attributes:
        tokens: All of it; a head's lack the first one.
        sampled: How many of them were sampled.
        key: Stands for what else its keys depend on than these.
        computed: Of how many the draft model's keys are in its blocks.
        blocks: Block ids by index.
        keys: Of its full blocks that are computed, see DraftModel.
        proposed: Drafts in the step that runs.
    """

    tokens: list[int]
    sampled: int
    key: int = 0
    computed: int = 0
    blocks: dict[int, int] = field(default_factory=dict)
    keys: list[int] = field(default_factory=list)
    proposed: int = 0

    def put_block(self, index: int, block: int, block_size: int) -> None:
        """Of another block than before, it is not known what it holds."""
        if self.blocks.get(index, block) != block and self.computed > index * block_size:
            self.computed = index * block_size
            del self.keys[index:]
        self.blocks[index] = block


class DraftModel:
    """A Drafter.

    Whose keys a block holds is known by a hash over all tokens up to its end. So what the prefix cache brings is found
    again, and what other sequences, swaps or copies have left in a block is computed anew.

    Args:
        worker: Loaded, with as many slots and blocks as the model's.
        group: Of the model's KV groups the one that looks back to the beginning.
        block_size: Tokens of a block.
        longest: Tokens of the longest sequence that the draft model can follow.
        most_tokens: Of a step of the worker's.
        is_head: Whether it is a head of the model.
    """

    def __init__(
        self,
        worker: DraftWorker,
        group: int,
        block_size: int,
        longest: int,
        most_tokens: int,
        *,
        is_head: bool = False,
    ) -> None:
        self._worker = worker
        self._group = group
        self._block_size = block_size
        self._longest = longest
        self._most_tokens = min(DRAFT_TOKENS_A_STEP, most_tokens)
        self._is_head = is_head
        self._sequences: dict[int, _Sequence] = {}  # by slot
        self._written: dict[int, int] = {}  # by block
        self._changes = _Changes()
        self.read = 0

    def begin(self, plan: Plan) -> None:
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

    def propose(self, plan: Plan, most_read: int) -> StepDrafts:
        self.read = 0
        proposed: list[list[int]] = [[] for _ in plan.sampled_rows]
        rows: list[tuple[int, int, _Sequence, int]] = []  # place, slot, sequence, drafts
        behind: list[tuple[int, _Sequence, int]] = []  # slot, sequence, tokens
        left = self._most_tokens
        moved = self._moved_blocks(plan)
        for place, most in enumerate(plan.drafts):
            slot = plan.slots[plan.sampled_rows[place]]
            sequence = self._sequences.get(slot) if most else None
            if sequence is None or not left or len(sequence.tokens) + most > self._longest:
                continue
            if moved and not moved.isdisjoint(sequence.blocks.values()):
                continue
            missing = len(sequence.tokens) - sequence.computed
            if missing > max(most_read, _FEW):
                continue
            if missing <= left:
                rows.append((place, slot, sequence, most))
            else:
                behind.append((slot, sequence, left))
            self.read += min(missing, left)
            left -= min(missing, left)
        if rows or behind:
            self._run(rows, behind, proposed)
        return StepDrafts.of(proposed)

    def record(self, plan: Plan, result: Result) -> None:
        at = 0
        for row, count in zip(plan.sampled_rows, result.counts, strict=True):
            sequence = self._sequences.get(plan.slots[row])
            if sequence is not None:
                if sequence.proposed:  # the last draft's keys are not computed; others' stay as far as they were right
                    stay = 0 if self._is_head else max(0, min(count, sequence.proposed) - 1)
                    sequence.computed = len(sequence.tokens) + stay
                    sequence.proposed = 0
                sequence.tokens += result.tokens[at : at + count]
                sequence.sampled += count
                self._note_written(sequence)
            at += count

    def first_guess(self, slot: int) -> None:
        """It would have to compute."""

    def _run(
        self,
        rows: list[tuple[int, int, _Sequence, int]],
        behind: list[tuple[int, _Sequence, int]],
        proposed: list[list[int]],
    ) -> None:
        """Compute what is missing, and with it the first draft of each row; then one draft of each after another."""
        sequences = [(slot, sequence) for _, slot, sequence, _ in rows]
        every = [*sequences, *((slot, sequence) for slot, sequence, _ in behind)]
        slots = [slot for slot, _ in every]
        if (changes := self._changes.take()) is not None:
            self._worker.change(changes)
        self._worker.rewind(slots, [each.computed for _, each in every], [each.sampled for _, each in every])
        inputs = [each.tokens[each.computed :] for _, each in sequences]
        inputs += [each.tokens[each.computed : each.computed + count] for _, each, count in behind]
        for (_, each), tokens in zip(every, inputs, strict=True):
            self._forget_written(each, each.computed + len(tokens) + MOST_DRAFTS)
            each.computed += len(tokens)
        longest = max((most for *_, most in rows), default=0)
        going_on = [[row for row in rows if row[3] > number] for number in range(1, longest)]
        plans = [_first_step(slots, inputs, len(rows)), *(_next_step([row[1] for row in some]) for some in going_on)]
        failed: set[int] = set()
        for some, result in zip([rows, *going_on], self._worker.execute_all(plans), strict=True):
            sampled = iter(result.tokens)
            for (place, _, sequence, _), count in zip(some, result.counts, strict=True):
                token = next(sampled) if count else -1
                if not count or place in failed:
                    failed.add(place)  # what comes behind means nothing
                    continue
                proposed[place].append(token)
                sequence.proposed += 1

    def _new_sequence(self, owner: Admitted) -> _Sequence:
        """Of a slot's new owner."""
        if not self._is_head:
            return _Sequence(list(owner.history), owner.num_sampled)
        key = hash((owner.history[0], owner.adapter_slot))  # states differ by both
        return _Sequence(owner.history[1:], owner.num_sampled, key)

    def _moved_blocks(self, plan: Plan) -> set[int]:
        """Where the plan moves states that a head would read before."""
        if not self._is_head:
            return set()
        return {target for _, target in plan.copies} | {device for _, device in plan.swap_in}

    def _forget_written(self, sequence: _Sequence, end: int) -> None:
        """Blocks from the first one that is not computed in full up to the token `end` change."""
        for index in range(sequence.computed // self._block_size, -(-end // self._block_size)):
            if (block := sequence.blocks.get(index)) is not None:
                self._written.pop(block, None)

    def _find_computed(self, sequence: _Sequence) -> None:
        """What the blocks of a new owner hold already."""
        sequence.computed, sequence.keys = 0, []
        size, key = self._block_size, sequence.key
        for index in range((len(sequence.tokens) - 1) // size):
            key = hash((key, *sequence.tokens[index * size : (index + 1) * size]))
            if index not in sequence.blocks or self._written.get(sequence.blocks[index]) != key:
                return
            sequence.keys.append(key)
            sequence.computed += size

    def _note_written(self, sequence: _Sequence) -> None:
        """Blocks that are full now."""
        size, keys = self._block_size, sequence.keys
        while (len(keys) + 1) * size <= sequence.computed:
            index = len(keys)
            keys.append(hash((keys[-1] if keys else sequence.key, *sequence.tokens[index * size : (index + 1) * size])))
            self._written[sequence.blocks[index]] = keys[-1]


class _Changes:
    """Of the draft worker's slots, until it runs next: where nothing is drafted, it is not bothered."""

    def __init__(self) -> None:
        self._owners: dict[int, Admitted] = {}  # by slot
        self._blocks: dict[int, dict[int, int]] = {}  # by slot, block ids by index

    def add(self, plan: Plan, places: list[int]) -> None:
        """A plan's new owners, and its entries at these places."""
        for owner in plan.admitted:
            self._owners[owner.slot] = owner
            self._blocks[owner.slot] = {}
        for place in places:
            self._blocks.setdefault(plan.block_slots[place], {})[plan.block_indices[place]] = plan.block_ids[place]

    def take(self) -> Plan | None:
        """All of them as a plan without rows; None: there are none."""
        if not self._blocks:
            return None
        entries = [(slot, *each) for slot, own in self._blocks.items() for each in own.items()]
        slots, indices, ids = ([each[column] for each in entries] for column in range(3))
        owners = list(map(_drafting, self._owners.values()))
        self._owners, self._blocks = {}, {}
        return Plan(0, owners, slots, [0] * len(slots), indices, ids, [], [], [], [], [])


def _drafting(owner: Admitted) -> Admitted:
    """With what decides which token a random number stands for, and nothing else."""
    asked = owner.sampling
    sampling = SamplingParams(
        temperature=asked.temperature, top_p=asked.top_p, top_k=asked.top_k, min_p=asked.min_p, max_tokens=1
    )
    return replace(
        owner, length=0, sampling=sampling, stop_ids=[], bad_words=[], history=[], rope_length=0, adapter_slot=0
    )


def _first_step(slots: list[int], inputs: list[list[int]], sampled: int) -> Plan:
    """Tokens of all slots; the first `sampled` of them sample."""
    tokens = [token for own in inputs for token in own]
    rows = list(range(len(slots)))
    return Plan(0, [], [], [], [], [], slots, list(map(len, inputs)), rows, tokens, rows[:sampled])


def _next_step(slots: list[int]) -> Plan:
    """A token more of each."""
    return Plan(0, [], [], [], [], [], slots, [1] * len(slots), [], [], list(range(len(slots))))
