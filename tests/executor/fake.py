"""An executor without a model, for tests of everything above it; stricter than a device.

It keeps slots and KV blocks as a worker does, but stores the tokens themselves in the blocks. A sampled token is a
function of the whole history *as read back through the block table*, so a stale block, a wrong position, a write to a
shared block or a read before its write changes the output or fails an assertion. Rejected draft tokens are written too
and stay in the blocks until they are overwritten. Where there are states, a sequence's is a running digest of all its
tokens, and sampled tokens depend on it too: a stale state, another sequence's and one that is a token off change them.
"""

from __future__ import annotations

import time
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate, chain
from typing import cast

import msgspec

from quire.foundation.messages.from_engine import NO_POOLING, PoolingInfo
from quire.foundation.messages.workers import (
    Admitted,
    Bits,
    DeviceLimits,
    Plan,
    PooledRow,
    Result,
    TokenBitmasks,
    TokenLogprobs,
    Vector,
)
from quire.pooling_params import PoolingParams
from quire.runtime.executor.executor import FaultHook, no_faults
from quire.scheduling.kvcache.cache_groups import FULL_ATTENTION, CacheGroup
from quire.scheduling.kvcache.host_index import index_bytes
from tests.executor.fake_adapters import FakeAdapters
from tests.executor.fake_blocks import Contents, FakeDisk, FakeOrders
from tests.executor.fake_pooling import fake_vector


def allowed(token: int, bits: Bits, vocab_size: int) -> int:
    """The first token from `token` on, around the vocabulary, that a row of TokenBitmasks allows."""
    order = chain(range(token, vocab_size), range(token))
    return next(each for each in order if bits[each // 8] >> each % 8 & 1)


def hash_token(history: Sequence[int], num_sampled: int, vocab_size: int) -> int:
    """The fake model: the next token is a checksum of all tokens before it and of how many of them were sampled."""
    return zlib.crc32(array("q", [num_sampled, *history]).tobytes()) % vocab_size


def seeded_counter(seed: int, num_sampled: int) -> int:
    """What a seeded fake model is given in place of how many tokens were sampled."""
    return (seed + num_sampled) % 2**63


def adapted_counter(num_sampled: int, digest: str) -> int:
    """What a fake model is given, for a sequence with an adapter, in place of how many tokens were sampled."""
    return (num_sampled + zlib.crc32(digest.encode())) % 2**63


def next_state(state: int, token: int, adapter: str = "") -> int:
    """The fake model's state of a sequence behind one more token."""
    return zlib.crc32(array("q", [token]).tobytes() + adapter.encode(), state)


def state_of(tokens: Sequence[int]) -> int:
    """The fake model's state of a sequence."""
    return reduce(next_state, tokens, 0)


def stateful_counter(num_sampled: int, state: int) -> int:
    """What a fake model with states is given in place of how many tokens were sampled."""
    return (num_sampled + (state << 8)) % 2**63


@dataclass
class _Slot:
    owner: Admitted
    num_sampled: int
    length: int
    last_token: int | None = None  # of the sequence, once one was sampled
    pooled_to: int | None = None  # of a pooled sequence, once a row was pooled
    types: bytes = b""  # of its tokens
    tables: dict[tuple[int, int], int] = field(default_factory=dict)  # (group, index) → block


@dataclass
class FakeHostMemory:
    """Host blocks that outlive an executor, with what they hold and by which adapter, and an index of their keys."""

    blocks: dict[int, list[int | None]] = field(default_factory=dict)
    written_by: dict[int, str] = field(default_factory=dict)
    index: bytearray = field(default_factory=lambda: bytearray(index_bytes(400)))


class FakeExecutor:
    """Runs plans on the host when they are collected.

    Args:
        num_blocks, block_size, vocab_size: Reported as DeviceLimits; plans are checked against them.
        groups: How far back each KV group looks; only blocks that are seen are checked.
        num_host_blocks: Of the host pool.
        sample: The model: (history, how many of it were sampled, vocab_size) → next token.
        accept: Tokens that a sampled row gains, given the most it may gain; default: all.
        max_in_flight: See Executor.
        step_s: Seconds that every step takes.
        fault: See Executor.
        ready_host_blocks: Says after each step how many blocks of the host pool are ready; default: all.
        seeded: Whether tokens depend on the request's seed as well: its counter starts there.
        adapters: What stands for adapters; None: none are served. Tokens then depend on the sequence's adapter, and
            keys and values are found only by those who computed with the same.
        pooling: What it makes of whole texts. Only vectors of tokens and those that `pools_from_cache` allows may begin
            behind a cached prefix; the others' chunks must be all of the text.
        num_states: Reported as a device limit; with any, the model has states.
        host_memory: Outlives this executor, and is ready at once; None: its own.
        disk: Outlives it as well; None: there is none.
    """

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 16,
        vocab_size: int = 512,
        groups: Sequence[CacheGroup] = FULL_ATTENTION,
        num_host_blocks: int = 0,
        sample: Callable[[Sequence[int], int, int], int] = hash_token,
        accept: Callable[[int], int] | None = None,
        max_in_flight: int = 2,
        step_s: float = 0.0,
        fault: FaultHook = no_faults,
        ready_host_blocks: Callable[[], int] | None = None,
        seeded: bool = False,
        adapters: FakeAdapters | None = None,
        pooling: PoolingInfo = NO_POOLING,
        pools_from_cache: Callable[[PoolingParams], bool] = lambda params: False,
        num_states: int = 0,
        host_memory: FakeHostMemory | None = None,
        disk: FakeDisk | None = None,
    ) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._groups = groups
        self._num_host_blocks = num_host_blocks
        self._ready_host_blocks = ready_host_blocks or (lambda: num_host_blocks)
        self._reported_host_blocks = num_host_blocks if host_memory is not None or disk is not None else 0
        self._sample_token = sample
        self._accept = accept
        self._max_in_flight = max_in_flight
        self._step_s = step_s
        self._fault = fault
        self._seeded = seeded
        self._pooling = pooling
        self._pools_from_cache = pools_from_cache
        self.adapters = adapters
        if adapters is not None:
            adapters.in_flight = self._reads_adapter
        self._written_by: dict[int, str] = {}  # by block: the adapter of what it holds
        self._slots: dict[int, _Slot] = {}
        self._blocks: dict[int, list[int | None]] = {}  # by block: its tokens
        memory = host_memory or FakeHostMemory()
        self._host, self._host_written_by = memory.blocks, memory.written_by
        self._disk = disk
        self._orders = FakeOrders(
            adapters or FakeAdapters({}), self._read_host, self._write_host, self._load_block, self._read_device, disk
        )
        self._num_states = num_states
        self._states = {number: number for number in range(1, num_states + 1)}  # undefined at first
        self._plans: deque[Plan] = deque()
        self._marks: dict[tuple[int, int], int] = {}  # of the plan, by slot and length
        self._masks: dict[int, TokenBitmasks] = {}  # by step

    @property
    def max_in_flight(self) -> int:
        return self._max_in_flight

    @property
    def orders(self) -> FakeOrders:
        return self._orders

    def _read_host(self, host: int) -> Contents:
        return list(self._host[host]), self._host_written_by[host]

    def _write_host(self, host: int, contents: Contents) -> None:
        self._host[host], self._host_written_by[host] = list(contents[0]), contents[1]

    def _read_device(self, block: int) -> Contents:
        return list(self._blocks.get(block, [None] * self._block_size)), self._written_by.get(block, "")

    def _load_block(self, host: int, block: int) -> None:
        self._blocks[block] = list(self._host[host])
        self._written_by[block] = self._host_written_by[host]

    def start(self) -> DeviceLimits:
        return DeviceLimits(
            self._num_blocks, self._vocab_size, self._num_host_blocks, num_states=self._num_states,
            disk=None if self._disk is None else self._disk.contents(), ready_host_blocks=self._reported_host_blocks,
        )  # fmt: skip

    def submit(self, plan: Plan) -> None:
        self._fault("submit", plan.step)
        assert len(self._plans) < self._max_in_flight, "more plans in flight than allowed"
        self._plans.append(plan)

    def submit_bitmasks(self, masks: TokenBitmasks) -> None:
        (plan,) = [plan for plan in self._plans if plan.step == masks.step]
        assert masks.step not in self._masks, "masks come twice"
        assert masks.rows == plan.masked, "masks of other rows than those that wait"
        size = 4 * -(-self._vocab_size // 32)
        assert [len(bits) for bits in masks.bits] == [size] * len(masks.rows), "masks of another vocabulary"
        self._masks[masks.step] = masks

    def collect(self, timeout: float | None) -> Result | None:
        plan = self._plans.popleft()
        self._fault("execute", plan.step)
        if self._step_s:
            time.sleep(self._step_s)
        self._apply_changes(plan)
        self._orders.computed = plan.step
        self._load_states(plan)
        self._move_rows(plan)
        self._save_states(plan)
        prompt_logprobs = self._score_prompts(plan)
        vectors = self._pool(plan)
        self._reported_host_blocks = ready = max(self._reported_host_blocks, self._ready_host_blocks())
        result = msgspec.structs.replace(
            self._sample(plan), prompt_logprobs=prompt_logprobs, ready_host_blocks=ready, vectors=vectors
        )
        self._fault("collect", plan.step)
        return result

    def tear(self) -> None:
        """Die in the middle of plans in flight: what they copy to the host is half written."""
        for plan in self._plans:
            self._host.update({host: [None] * self._block_size for _, host in plan.swap_out})
            self._host_written_by.update({host: "" for _, host in plan.swap_out})

    def check(self) -> None:
        """Do nothing: there is no device that could be lost."""

    def close(self) -> None:
        self._plans.clear()

    def _apply_changes(self, plan: Plan) -> None:
        for admitted in plan.admitted:
            known = len(admitted.history)
            assert known in (0, admitted.prompt_len + admitted.num_sampled), "a history that is not all of the tokens"
            assert known or not admitted.sampling.penalizes, "a history is missing"
            self._slots[admitted.slot] = _Slot(admitted, admitted.num_sampled, admitted.length)
        changes = zip(plan.block_slots, plan.block_groups, plan.block_indices, plan.block_ids, strict=True)
        for slot, group, index, block in changes:
            assert 0 <= group < len(self._groups), group
            assert 1 <= block <= self._num_blocks, block
            self._slots[slot].tables[group, index] = block
        hosts = [host for _, host in plan.swap_out]
        assert len(set(hosts)) == len(hosts), "two blocks are copied to one host block"
        assert self._orders.used.isdisjoint(hosts), "a host block is overwritten while it is used"
        for device, host in plan.swap_out:
            assert 0 <= host < self._reported_host_blocks, "swapped to a host block that is not ready"
            unwritten: list[int | None] = [None] * self._block_size  # taken for draft tokens that were rejected
            self._host[host] = list(self._blocks.get(device, unwritten))
            self._host_written_by[host] = self._written_by.get(device, "")
        sources = {source for source, _ in plan.copies}
        assert sources.isdisjoint(target for _, target in plan.copies), "a copy's target is another one's source"
        for source, target in plan.copies:
            self._blocks[target] = list(self._blocks[source])
            self._written_by[target] = self._written_by[source]
        for host, device in plan.swap_in:
            self._load_block(host, device)

    def _move_rows(self, plan: Plan) -> None:
        """Write each row's known tokens and move its slot past them."""
        assert len(set(plan.slots)) == len(plan.slots), "a slot is in two rows"
        drafts = dict(zip(plan.sampled_rows, plan.drafts, strict=True)) if plan.drafts else {}
        with_tokens, position = set(plan.token_rows), 0
        for row, (number, count) in enumerate(zip(plan.slots, plan.counts, strict=True)):
            slot, count = self._slots[number], count - drafts.get(row, 0)
            if row in with_tokens:
                tokens = plan.tokens[position : position + count]
                position += count
                slot.last_token = tokens[-1]
            else:
                assert count == 1, "the device does not know this row's tokens"
                assert slot.last_token is not None, "the device does not know this row's tokens"
                tokens = [slot.last_token]
            for token in tokens:
                assert 0 <= token < self._vocab_size, token
                self._append(slot, token)
        assert position == len(plan.tokens), "more tokens than the rows take"

    def _append(self, slot: _Slot, token: int) -> None:
        """Compute a token that stays in a slot's sequence."""
        self._write(slot, slot.length, token)
        slot.length += 1
        if state := slot.owner.state:
            self._states[state] = next_state(self._states[state], token, self._adapter(slot))
            if (target := self._marks.get((slot.owner.slot, slot.length))) is not None:
                self._states[target] = self._states[state]

    def _load_states(self, plan: Plan) -> None:
        self._marks = {(slot, length): target for slot, length, target in plan.state_marks}
        assert len(set(self._marks.values())) == len(plan.state_marks), "two states are saved at one place"
        assert {slot for slot, _ in self._marks} <= set(plan.slots), "the state of no row is saved"
        current = [self._slots[number].owner.state for number in plan.slots]
        assert len(set(current)) == (len(current) if self._num_states else min(1, len(current))), "a state of two rows"
        assert all(bool(state) == bool(self._num_states) for state in current), "a row without a state"
        for source, target in plan.state_loads:
            assert 1 <= target <= self._num_states, target
            self._states[target] = self._states[source] if source else 0

    def _save_states(self, plan: Plan) -> None:
        current = {self._slots[number].owner.state for number in plan.slots}
        targets = [*self._marks.values(), *(target for _, target in plan.state_saves)]
        assert {source for source, _ in plan.state_saves} <= current, "the state of no row is saved"
        assert current.isdisjoint(targets), "a state is overwritten"
        assert len(set(targets)) == len(targets), "two states are saved at one place"
        for source, target in plan.state_saves:
            assert 1 <= target <= self._num_states, target
            self._states[target] = self._states[source]

    def _write(self, slot: _Slot, position: int, token: int) -> None:
        index, offset = divmod(position, self._block_size)
        for group in range(len(self._groups)):
            block = slot.tables[group, index]
            assert block not in self._orders.filling, "a block is written while it is filled"
            if offset == 0:
                self._blocks[block] = [None] * self._block_size
                self._written_by[block] = self._adapter(slot)
            self._blocks[block][offset] = token

    def _history(self, slot: _Slot) -> list[int]:
        """The tokens that the layers see: those of the group that looks back farthest; the others must agree."""
        views: list[list[int | None]] = [] if self._groups else [[]]
        for number, group in enumerate(self._groups):
            start = group.reach.first_visible(slot.length - 1)
            first = start // self._block_size
            blocks = [slot.tables[number, index] for index in range(first, -(-slot.length // self._block_size))]
            by = {self._written_by[block] for block in blocks}
            assert by <= {self._adapter(slot)}, "keys and values of another adapter"
            read = list(chain.from_iterable(self._blocks[block] for block in blocks))
            views.append(read[start - first * self._block_size : slot.length - first * self._block_size])
        longest = max(views, key=len)
        for view in views:
            assert view == longest[len(longest) - len(view) :], "KV groups hold different histories"
        assert None not in longest, "a position was read before it was written"
        return cast(list[int], longest)

    def _adapter(self, slot: _Slot) -> str:
        """The digest of what is in its adapter's place now; empty: it has none."""
        if not slot.owner.adapter_slot:
            return ""
        assert self.adapters is not None
        return self.adapters.slots[slot.owner.adapter_slot]

    def _reads_adapter(self, slot: int) -> bool:
        """Whether plans that are not computed yet read this slot of adapters."""
        owners = {number: each.owner.adapter_slot for number, each in self._slots.items()}
        for plan in self._plans:
            owners |= {owner.slot: owner.adapter_slot for owner in plan.admitted}
            if slot and slot in {owners[number] for number in plan.slots}:
                return True
        return False

    def _score_prompts(self, plan: Plan) -> list[list[TokenLogprobs]]:
        """A token's log probability is its position, negated; the likeliest tokens are the ids after it."""
        found = []
        for scored in plan.prompt_logprobs_rows:
            slot, count = self._slots[plan.slots[scored.row]], plan.counts[scored.row]
            first = slot.length - count + scored.skip
            written = [self._blocks[slot.tables[0, at // self._block_size]][at % self._block_size]
                       for at in range(first + 1, slot.length)]  # fmt: skip
            row = [token for token in (*written, scored.next_token)[: scored.count] if token is not None]
            k = slot.owner.sampling.prompt_logprobs or 0
            tops = [[(token + 1 + i) % self._vocab_size for i in range(k)] for token in row]
            found.append([
                TokenLogprobs(-float(first + 1 + i), k + 1, top, [-0.5 - j for j in range(k)])
                for i, top in enumerate(tops)
            ])  # fmt: skip
            assert len(row) == scored.count
        return found

    def _pool(self, plan: Plan) -> list[Vector]:
        pooled = {each.row for each in plan.pooled_rows}
        assert len(pooled) == len(plan.pooled_rows), "a row is pooled twice"
        assert pooled.isdisjoint(plan.sampled_rows), "a pooled row is sampled"
        assert pooled <= set(plan.token_rows), "the host does not know a pooled row's tokens"
        wanted = {row for row, slot in enumerate(plan.slots) if self._slots[slot].owner.pooling is not None}
        assert pooled == wanted, "a row of a pooled sequence is not pooled"
        assert len(plan.token_types) in (0, len(plan.tokens)), "token types of other tokens"
        starts = dict(
            zip(plan.token_rows, accumulate((plan.counts[row] for row in plan.token_rows), initial=0), strict=False)
        )
        return [self._vector(each, plan, starts[each.row]) for each in plan.pooled_rows]

    def _vector(self, row: PooledRow, plan: Plan, at: int) -> Vector:
        slot, count = self._slots[plan.slots[row.row]], plan.counts[row.row]
        params = slot.owner.pooling
        assert params is not None, "a row of a sequence that is not pooled"
        assert params.task in self._pooling.tasks, "a task that is not served"
        begins = slot.pooled_to is None
        assert row.start + count == slot.length, "a row at another position"
        assert row.start == (slot.owner.length if begins else slot.pooled_to), "a chunk is missing"
        assert not begins or row.start == 0 or self._pools_from_cache(params), "a text is not pooled from its beginning"
        slot.pooled_to = slot.length
        slot.types += plan.token_types[at : at + count] or bytes(count)
        history, skipped = self._history(slot), slot.length - row.total
        assert row.skip + row.count == count, "tokens of other rows are pooled"
        assert row.total == row.count or (row.total > row.count and row.skip == 0), "a sum of other tokens"
        if params.per_token:
            ends = range(row.start + 1, slot.length + 1)
            rows = [fake_vector(history[:end], params, self._pooling, skipped, slot.types[:end]) for end in ends]
            return Vector(b"".join(each.tobytes() for each in rows), [count, len(rows[0])])
        if not row.is_last:
            return Vector()
        vector = fake_vector(history, params, self._pooling, skipped, slot.types)
        return Vector(vector.tobytes(), [len(vector)])

    def _sample(self, plan: Plan) -> Result:
        counts, tokens, logprobs = [], [], []
        masks = self._masks.pop(plan.step, TokenBitmasks(plan.step, [], []))
        assert masks.rows == plan.masked, "a row samples before its mask came"
        bits = dict(zip(masks.rows, masks.bits, strict=True))
        drafts = plan.drafts or [0] * len(plan.sampled_rows)
        for row, num_drafts in zip(plan.sampled_rows, drafts, strict=True):
            slot = self._slots[plan.slots[row]]
            gained = self._sample_with_drafts(slot, 1 + num_drafts, bits.get(row))
            counts.append(len(gained))
            tokens += gained
            logprobs += [self._report(slot, token) for token in gained]
        asked = any(entry is not None for entry in logprobs)
        return Result(
            plan.step, counts, tokens, logprobs if asked else [], device_ms=self._step_s * 1e3, drafted=plan.drafts
        )

    def _sample_with_drafts(self, slot: _Slot, most: int, bits: Bits | None) -> list[int]:
        """The tokens a row gains: accepted drafts and one more. Rejected drafts are written too, with wrong ids."""
        count, end = most if self._accept is None else self._accept(most), slot.length + most - 1
        gained: list[int] = []
        for number in range(count):
            if number:
                self._append(slot, gained[-1])
            counter = seeded_counter(slot.owner.seed, slot.num_sampled) if self._seeded else slot.num_sampled
            if state := slot.owner.state:
                counter = stateful_counter(counter, self._states[state])
            if adapter := self._adapter(slot):
                counter = adapted_counter(counter, adapter)
            token = self._sample_token(self._history(slot), counter, self._vocab_size)
            gained.append(token if bits is None else allowed(token, bits, self._vocab_size))
            slot.num_sampled += 1
        for position in range(slot.length, end):
            self._write(slot, position, (slot.owner.slot + position) % self._vocab_size)
        if gained:
            slot.last_token = gained[-1]
        else:
            assert not self._num_states, "a row with a state that gains nothing"
            slot.length -= 1  # its last token is the next row's input once more
        return gained

    def _report(self, slot: _Slot, token: int) -> TokenLogprobs | None:
        wanted = slot.owner.sampling.num_reported
        if wanted is None:
            return None
        top = slot.owner.sampling.logprob_token_ids or [(token + i) % self._vocab_size for i in range(wanted)]
        return TokenLogprobs(-0.5, 1, top, [-0.5 - i for i in range(len(top))])
