"""The prefix cache's tier on the host: conversations get the tokens of a cold engine, and planted bugs are found.

The fake executor stores tokens in blocks, on the host as well, so a stale block, another key's and one that was read
before it was written change what is sampled, or fail an assertion.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from quire.foundation.clock import SystemClock
from quire.foundation.messages.workers import BlocksLoaded, BlocksSaved, LoadBlocks, OrderDone, Result
from quire.scheduling.kvcache.block_pool import BlockPool
from quire.scheduling.kvcache.block_table import PrefixMatch
from quire.scheduling.kvcache.cache_groups import FULL, CacheGroup, Chunk, Reach, Window
from quire.scheduling.kvcache.disk_pool import DiskPool
from quire.scheduling.kvcache.host_index import HostIndex
from quire.scheduling.kvcache.host_pool import HostPool
from quire.scheduling.kvcache.host_tier import HostTier, HostTierStats
from quire.scheduling.scheduler.preemption import Preemption
from quire.scheduling.scheduler.scheduler import Scheduler
from quire.scheduling.scheduler.token_budget import TokenBudget
from tests.engine.harness import add
from tests.executor.fake import FakeExecutor, FakeHostMemory, hash_token
from tests.executor.fake_blocks import FakeDisk, FakeOrders

BLOCK = 4
SEEDS = range(8)
KINDS: list[tuple[Reach, ...]] = [(FULL,), (FULL, Window(11)), (Window(9),), (FULL, Chunk(12))]


class FixedCost:
    """What a token costs to compute, in milliseconds; swapping is free."""

    def __init__(self, token_ms: float) -> None:
        self._token_ms = token_ms

    def recompute_ms(self, tokens: int) -> float:
        return tokens * self._token_ms

    def swap_ms(self, blocks: int) -> float:
        return 0.0


class Stage:
    """A scheduler with few blocks and a tier over the fake executor."""

    def __init__(
        self, host: int = 60, reaches: Sequence[Reach] = (FULL,), cost: FixedCost | None = None,
        memory: FakeHostMemory | None = None, disk: FakeDisk | None = None,
        ahead: int = 0, **settings: Any,
    ) -> None:  # fmt: skip
        groups, blocks = [CacheGroup(reach=reach) for reach in reaches], 22 * len(reaches)
        index = None if memory is None else HostIndex(memoryview(memory.index), bytes(range(32)))
        self.pool, self.host, self.reaches = BlockPool(blocks, BLOCK), HostPool(index=index), reaches
        if memory is not None:
            self.host.inherit(host)
        elif disk is not None:
            self.host.grow(host)
        pool = None
        if disk is not None:
            pool = DiskPool(disk.num_blocks, [(slot, (group, key)) for slot, group, key in disk.contents().entries])
        self.tier = HostTier(self.pool, self.host, load_ms=1.0, disk=pool, saved_ahead=ahead)
        self.executor = FakeExecutor(blocks, BLOCK, groups=groups, num_host_blocks=host, host_memory=memory, disk=disk)
        luck = random.Random(blocks)
        self.executor.orders.delay = lambda: luck.randint(1, 4)
        preemption = Preemption(self.host, settings.pop("mode", "swap"), cost, self.tier)
        self.scheduler = Scheduler(self.pool, 3, TokenBudget(24), preemption, SystemClock(), groups=groups)
        self.got: dict[int, list[int]] = {}
        self.cached: dict[int, int] = {}
        self._next = 1

    def alone(self, prompt: Sequence[int], most: int) -> list[int]:
        history = list(prompt)
        for drawn in range(most):
            first = min(reach.first_visible(len(history) - 1) for reach in self.reaches)
            history.append(hash_token(history[first:], drawn, 512))
        return history[len(prompt) :]

    def begin(self, prompt: Sequence[int], most: int, **fields: Any) -> int:
        number, self._next = self._next, self._next + 1
        self.got[number] = []
        self.scheduler.add(add(number, prompt, most, **fields))
        return number

    def run(self, most: int = 10_000) -> None:
        """Two plans ahead, until nothing is left, or as many results have come."""
        for _ in range(most):
            if not self.scheduler.has_work and not self.scheduler.moves_blocks:
                return
            self._take_orders()
            while self.scheduler.steps_in_flight < 2 and (plan := self.scheduler.plan()):
                self.executor.submit(plan)
            for order in self.scheduler.take_orders():
                self.executor.orders.post(order)
            self.scheduler.cache_blocks()
            if not self.scheduler.steps_in_flight:
                continue
            result = self.executor.collect(None)
            assert isinstance(result, Result)
            outputs = self.scheduler.process_result(result)
            tokens = iter(outputs.tokens)
            for number, count in zip(outputs.ids, outputs.counts, strict=True):
                self.got[number] += [next(tokens) for _ in range(count)]
            self.cached |= dict(outputs.cached_tokens)

    def _take_orders(self) -> None:
        for done in self.executor.orders.done():
            self.scheduler.moved(done)

    def answer(self, prompt: Sequence[int], most: int = 1, **fields: Any) -> list[int]:
        number = self.begin(prompt, most, **fields)
        self.run()
        assert self.got[number] == self.alone(prompt, most)
        return self.got[number]


def converse(
    seed: int, rounds: int = 12, memory: FakeHostMemory | None = None, disk: FakeDisk | None = None, **settings: Any
) -> HostTierStats:
    """Hold several conversations at a time, and compare every answer with that of a cold engine. With a memory or disk
    that outlives engines, some of them die between, with plans in flight."""
    rng, stage = random.Random(seed), Stage(memory=memory, disk=disk, **settings)
    sessions: list[list[int]] = [[]]
    for _ in range(rounds):
        turns = {}
        for _ in range(rng.randint(1, 3)):
            history = rng.choice(sessions) if rng.random() < 0.8 else []
            prompt = [*history[: rng.choice((40, 40, 13))], *(rng.randrange(512) for _ in range(rng.randint(1, 12)))]
            most = rng.randint(1, 12)
            salt = rng.choice(("", "", "", "x"))
            turns[stage.begin(prompt, most, cache_salt=salt, priority=0)] = (prompt, most)
        stage.run()
        for number, (prompt, most) in turns.items():
            assert stage.got[number] == stage.alone(prompt, most), f"sequence {number} of seed {seed} got other tokens"
            sessions.append([*prompt, *stage.got[number]])
        sessions = sessions[-8:]
        if (memory is not None or disk is not None) and rng.random() < 0.5:
            for session in sessions[-2:]:
                stage.begin([*session[:40], 1, 2], 5)
            stage.run(rng.randint(0, 6))
            stage.executor.tear()
            lost = stage.tier.stats
            stage = Stage(memory=memory, disk=disk, **settings)
            for name, count in vars(lost).items():
                setattr(stage.tier.stats, name, count)
    assert stage.pool.num_free == stage.pool.num_blocks
    assert stage.host.num_free == stage.host.num_blocks
    return stage.tier.stats


def found(seeds: Iterable[int] = SEEDS, **settings: Any) -> str:
    """What the first seed that shows a planted bug says; empty if none does."""
    for seed in seeds:
        try:
            converse(seed, **{"host": (60, 9)[seed % 2], "reaches": KINDS[seed % 2]} | settings)
        except (AssertionError, KeyError) as error:
            return str(error) or "an assertion"
    return ""


@pytest.mark.parametrize("reaches", KINDS)
@pytest.mark.parametrize(("host", "ahead"), [(60, 0), (9, 0), (60, 8), (9, 8)])
def test_conversations_are_answered_as_if_nothing_were_cached(
    reaches: tuple[Reach, ...], host: int, ahead: int
) -> None:
    for seed in SEEDS:
        stats = converse(seed, reaches=reaches, host=host, ahead=ahead)
        assert stats.stored > 0
        assert stats.hit_tokens > 0 or host == 9


def test_what_leaves_the_device_is_found_on_the_host() -> None:
    stage = Stage()
    prompt = list(range(40))
    stage.answer(prompt, 1)
    for other in range(100, 400, 50):  # needs all blocks
        stage.answer(range(other, other + 45), 1)
    number = stage.begin([*prompt, 7], 1)
    stage.run()
    assert stage.cached[number] == 40
    assert stage.tier.stats.hit_tokens == 40
    assert stage.got[number] == stage.alone([*prompt, 7], 1)


def test_another_salt_finds_nothing() -> None:
    stage = Stage(host=200)
    prompt = list(range(40))
    stage.answer(prompt, 1, cache_salt="a")
    for other in range(100, 400, 50):
        stage.answer(range(other, other + 45), 1)
    stage.answer([*prompt, 7], 1, cache_salt="b")
    assert stage.tier.stats.hit_tokens == 0
    stage.answer([*prompt, 8], 1, cache_salt="a")
    assert stage.tier.stats.hit_tokens == 40


def test_steps_go_on_while_a_request_awaits_its_blocks() -> None:
    """It runs once they have come, and no plan waits for them."""
    stage = Stage()
    prompt = list(range(40))
    stage.answer(prompt, 1)
    for other in range(100, 400, 50):
        stage.answer(range(other, other + 45), 1)
    stage.executor.orders.delay = lambda: 8
    late = stage.begin([*prompt, 7], 1)
    other = stage.begin([500, 501], 12)
    stage.run(7)
    assert stage.scheduler.moves_blocks
    assert len(stage.got[other]) >= 5
    assert not stage.got[late]
    stage.run()
    assert stage.cached[late] == 40
    assert stage.got[late] == stage.alone([*prompt, 7], 1)
    assert stage.got[other] == stage.alone([500, 501], 12)


def test_who_ends_while_its_blocks_come_leaves_them_to_others() -> None:
    stage = Stage()
    prompt = list(range(40))
    stage.answer(prompt, 1)
    for other in range(100, 400, 50):
        stage.answer(range(other, other + 45), 1)
    stage.executor.orders.delay = lambda: 4
    number = stage.begin([*prompt, 7], 1)
    stage.run(1)
    assert stage.scheduler.moves_blocks
    stage.scheduler.abort(number)
    follower = stage.begin([*prompt, 8], 1)
    stage.run()
    assert stage.tier.stats.loaded == 10
    assert stage.cached[follower] == 40
    assert stage.pool.num_free == stage.pool.num_blocks


@pytest.mark.parametrize(("token_ms", "loads"), [(0.3, True), (0.2, False)])
def test_a_tier_that_does_not_pay_is_not_used(token_ms: float, loads: bool) -> None:
    """Loading a block of four tokens takes a millisecond."""
    stage = Stage(cost=FixedCost(token_ms))
    prompt = list(range(40))
    stage.answer(prompt, 1)
    for other in range(100, 400, 50):
        stage.answer(range(other, other + 45), 1)
    stage.answer([*prompt, 7], 1)
    assert (stage.tier.stats.hit_tokens, stage.tier.stats.too_slow > 0) == ((40, False) if loads else (0, True))


def test_broken_blocks_are_not_found_on_the_host() -> None:
    stage = Stage()
    prompt = list(range(40))
    stage.answer(prompt, 1)
    for other in range(100, 400, 50):
        stage.answer(range(other, other + 45), 1)
    number = stage.begin([*prompt, 7], 1)
    request = stage.scheduler.get(number)
    assert request is not None
    request.block_hashes.hash_up_to(request.tokens, 40)
    before = stage.host.num_cached
    request.invalidate()
    assert stage.host.num_cached == before - 10
    stage.run()
    assert stage.tier.stats.hit_tokens == 0


def test_a_reset_forgets_the_host_too() -> None:
    stage = Stage()
    for start in range(0, 400, 50):
        stage.answer(range(start, start + 45), 1)
    assert stage.host.num_cached > 0
    stage.scheduler.reset_prefix_cache()
    assert (stage.host.num_cached, stage.host.num_free) == (0, stage.host.num_blocks)
    stage.answer(range(45), 1)
    assert stage.tier.stats.hit_tokens == 0


def test_the_host_outlives_engines() -> None:
    for seed in SEEDS:
        assert converse(seed, memory=FakeHostMemory(), host=(60, 9)[seed % 2], reaches=KINDS[seed % 4]).stored > 0


def test_a_successor_finds_what_was_computed() -> None:
    """All but what the last two plans have filled, though nothing has left the device."""
    memory, prompt = FakeHostMemory(), list(range(60))
    stage = Stage(memory=memory)
    stage.answer(prompt, 8)
    successor = Stage(memory=memory)
    number = successor.begin([*prompt, 7], 1)
    successor.run()
    assert successor.got[number] == successor.alone([*prompt, 7], 1)
    assert successor.cached[number] == successor.tier.stats.hit_tokens >= 48


def test_an_index_of_another_model_is_forgotten() -> None:
    memory = FakeHostMemory()
    Stage(memory=memory).answer(range(60), 8)
    assert HostIndex(memoryview(memory.index), bytes(range(32))).entries()
    assert not HostIndex(memoryview(memory.index), bytes(32)).entries()
    assert not HostIndex(memoryview(memory.index), bytes(range(32))).entries()


def test_an_entry_that_was_half_written_is_left_out() -> None:
    memory = FakeHostMemory()
    Stage(memory=memory).answer(range(60), 8)
    entries = HostIndex(memoryview(memory.index), bytes(range(32))).entries()
    at = memory.index.index(entries[0][1][1])
    memory.index[at] ^= 1
    assert HostIndex(memoryview(memory.index), bytes(range(32))).entries() == entries[1:]


# --- the disk ---------------------------------------------------------------------------------------------------------


def faulty_disk(seed: int, num_blocks: int = 80) -> FakeDisk:
    luck = random.Random(seed)
    return FakeDisk(num_blocks, full=lambda: luck.random() < 0.05, tears=lambda: luck.random() < 0.1)


@pytest.mark.parametrize("reaches", KINDS)
def test_conversations_go_on_over_disks_that_fail_and_engines_that_die(reaches: tuple[Reach, ...]) -> None:
    for seed in SEEDS:
        memory = FakeHostMemory() if seed % 2 else None
        disk = faulty_disk(seed, (80, 9)[seed % 3 == 0])
        stats = converse(seed, memory=memory, disk=disk, host=(30, 9)[seed % 2], reaches=reaches)
        assert stats.disk_stored > 0


def test_a_restart_finds_on_disk_what_was_computed() -> None:
    disk, prompt = FakeDisk(80), list(range(60))
    Stage(disk=disk).answer(prompt, 8)
    successor = Stage(disk=disk)
    number = successor.begin([*prompt, 7], 1)
    successor.run()
    assert successor.got[number] == successor.alone([*prompt, 7], 1)
    assert successor.cached[number] == 60
    assert successor.tier.stats.disk_loaded == 15


def test_what_an_engine_has_left_on_the_host_comes_to_the_disk() -> None:
    memory, disk = FakeHostMemory(), FakeDisk(80)
    Stage(memory=memory).answer(list(range(60)), 8)
    Stage(memory=memory, disk=disk).answer([500], 1)
    assert {key for key, _ in disk.slots.values()} == set(
        dict(HostIndex(memoryview(memory.index), bytes(range(32))).entries()).values()
    )


def test_blocks_that_were_torn_are_computed_again() -> None:
    disk, prompt = FakeDisk(80), list(range(60))
    Stage(disk=disk).answer(prompt, 8)
    slot = [slot for slot, _ in disk.slots.items()][4]
    disk.slots[slot] = disk.slots[slot][0], None
    successor = Stage(disk=disk)
    number = successor.begin([*prompt, 7], 1)
    successor.run()
    assert successor.got[number] == successor.alone([*prompt, 7], 1)
    assert successor.cached[number] == 16
    assert successor.tier.stats.disk_unread == 1


def test_a_slow_disk_keeps_no_request_waiting_for_ever() -> None:
    disk, prompt = FakeDisk(80), list(range(60))
    Stage(disk=disk).answer(prompt, 8)
    successor = Stage(disk=disk)
    successor.executor.orders.delay = lambda: 10**9
    number = successor.begin([*prompt, 7], 1)
    successor.run(3)
    assert not successor.got[number]
    (read,) = successor.tier._reads.values()
    read.until = 0.0  # as long as it has waited
    successor.scheduler.expire()
    successor.run(30)
    assert successor.got[number] == successor.alone([*prompt, 7], 1)


def test_what_is_evicted_or_reset_is_not_found_after_a_restart() -> None:
    disk, prompt = FakeDisk(80), list(range(60))
    stage = Stage(disk=disk)
    stage.answer(prompt, 8)
    assert len(disk.slots) >= 15
    stage.scheduler.reset_prefix_cache()
    stage.answer([500], 1)
    assert not disk.slots


def test_a_disk_that_is_full_keeps_what_it_has() -> None:
    disk = FakeDisk(80)
    stage = Stage(disk=disk)
    stage.answer(list(range(60)), 8)
    held = len(disk.slots)
    disk.full = lambda: True
    for other in range(100, 400, 50):
        stage.answer(range(other, other + 45), 1)
    assert stage.tier.stats.disk_unwritten > 0
    assert len(disk.slots) == held


def test_a_slot_that_is_read_before_it_is_written_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The index of the disk is stale: a slot is found under the key of what it held before, and nobody checks."""
    allocate = DiskPool.allocate

    def keep_key(disk: DiskPool) -> int | None:
        keys, slots = dict(disk._slot_of), dict(disk._key_of)
        slot = allocate(disk)
        for key in keys.keys() - disk._slot_of.keys():
            disk._slot_of[key] = keys[key]
        disk._key_of |= slots
        return slot

    monkeypatch.setattr(DiskPool, "allocate", keep_key)
    monkeypatch.setattr(FakeDisk, "read", lambda disk, block: disk.slots.get(block.slot, (0, None))[1])
    assert any(found_on_disk(seed) for seed in range(20))


def test_a_read_that_nobody_checks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torn blocks are taken for whole."""
    monkeypatch.setattr(FakeDisk, "read", lambda disk, block: disk.slots[block.slot][1] or ([None] * BLOCK, ""))
    assert any(found_on_disk(seed) for seed in range(20))


def found_on_disk(seed: int) -> str:
    try:
        converse(seed, disk=faulty_disk(seed, 20), host=9)
    except (AssertionError, KeyError) as error:
        return str(error) or "an assertion"
    return ""


# --- planted bugs -----------------------------------------------------------------------------------------------------


def test_no_bug_is_found_where_none_is_planted() -> None:
    assert not found()


def test_a_lost_write_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last block that a plan should copy to the host is not copied."""
    end_step = HostTier.end_step
    monkeypatch.setattr(HostTier, "end_step", lambda tier: end_step(tier)[:-1])
    assert found()


def test_a_block_of_another_key_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks that are loaded change places."""
    take_orders = HostTier.take_orders

    def crossed(tier: HostTier) -> list[LoadBlocks]:
        orders = take_orders(tier)
        for order in orders:
            if len(order.loads) > 1:
                (a, first), (b, second) = order.loads[:2]
                order.loads[:2] = [(b, first), (a, second)]
        return orders

    monkeypatch.setattr(HostTier, "take_orders", crossed)
    assert found()


def test_a_stale_block_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host blocks are found under the key of what they held before."""
    allocate = HostPool.allocate

    def keep_keys(host: HostPool, count: int) -> list[int]:
        keys = dict(host._block_of)
        blocks = allocate(host, count)
        host._block_of = keys | host._block_of
        return blocks

    monkeypatch.setattr(HostPool, "allocate", keep_keys)
    monkeypatch.setattr(HostPool, "cache_block", lambda host, block, key: _enter(host, block, key))
    assert found()


def _enter(host: HostPool, block: int, key: Any) -> None:
    host._block_of[key], host._key_of[block] = block, key


def test_a_block_that_is_overwritten_before_it_is_read_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host blocks are not held until they are loaded."""
    begin_load, loaded = HostTier.begin_load, HostTier.loaded

    def begin(tier: HostTier, request: int, hosts: Sequence[int], prefix: Sequence[int]) -> None:
        before = tier._last_order
        begin_load(tier, request, hosts, prefix)
        if tier._last_order > before:
            tier.host.free(hosts)

    def end(tier: HostTier, done: BlocksLoaded) -> list[int]:
        tier.host.share(host for host in tier._loads[done.number].sources if tier.host.key_of(host) is not None)
        return loaded(tier, done)

    monkeypatch.setattr(HostTier, "begin_load", begin)
    monkeypatch.setattr(HostTier, "loaded", end)
    assert found(range(60), host=14)


def test_a_load_that_does_not_wait_for_the_plan_before_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps in flight still use the blocks that it fills, or copy them to the host."""
    order = HostTier.order
    monkeypatch.setattr(HostTier, "order", lambda tier, step, now: order(tier, 0, now))
    assert found()


def test_a_block_that_is_found_although_it_did_not_come_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    done = FakeOrders.done

    def nothing(orders: FakeOrders) -> list[OrderDone]:
        orders._move = lambda host, block: None
        return done(orders)

    monkeypatch.setattr(FakeOrders, "done", nothing)
    assert found()


def test_a_copy_of_a_block_that_was_allocated_meanwhile_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not found(ahead=8)
    store, saved = HostTier._store, HostTier.saved

    def waiting(tier: HostTier, block: int) -> None:
        key = tier._pool.key_of(block)
        if key in tier._being_saved:
            tier._pool.evict(block)
        else:
            store(tier, block)

    def trusting(tier: HostTier, done: BlocksSaved) -> None:
        for _, host, key in tier._saves[done.number]:
            if tier._being_saved.get(key) == done.number and tier.host.get_cached_block(key) is None:
                tier.host.cache_block(host, key)
        saved(tier, done)

    monkeypatch.setattr(HostTier, "_store", waiting)
    monkeypatch.setattr(HostTier, "saved", trusting)
    assert found(ahead=8)


def test_a_swapped_block_that_is_let_go_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others of the same plan get it before it is read."""
    monkeypatch.setattr(HostTier, "unpin", lambda tier, hosts: tier.host.free(hosts))
    assert found(range(60), host=14, reaches=(FULL,))


def test_a_match_that_is_a_block_too_long_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of the tier are taken for one place further on."""
    loaded = HostTier.loaded

    def shifted(tier: HostTier, done: BlocksLoaded) -> list[int]:
        blocks = tier._loads[done.number].targets
        blocks[:] = [*blocks[1:], *blocks[:1]]
        return loaded(tier, done)

    monkeypatch.setattr(HostTier, "loaded", shifted)
    assert found()


def test_a_match_holds_blocks_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    match = PrefixMatch(12, [[3, ~0, 5]], [])
    assert (match.held_blocks, match.host_blocks) == ([3, 5], [0])


def test_a_block_that_is_entered_before_it_is_whole_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine dies between."""

    def at_once(tier: HostTier, stores: Sequence[tuple[int, int]]) -> None:
        for _, host in stores:
            key = tier.host.key_of(host)
            if key is not None and tier.host.index is not None:
                tier.host.index.enter(host, key)

    monkeypatch.setattr(HostTier, "planned", at_once)
    monkeypatch.setattr(HostTier, "computed", lambda tier: None)
    assert found(range(60), memory=FakeHostMemory())


def test_an_entry_that_stays_when_its_block_is_overwritten_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostIndex, "forget", lambda index, blocks: None)
    assert found(range(60), memory=FakeHostMemory(), host=9)


def test_a_block_that_is_copied_before_it_is_filled_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the plan that fills it."""

    def too_early(tier: HostTier) -> None:
        tier._whole, tier._filled = tier._filled, []
        for block, key in tier._whole:
            if tier._pool.key_of(block) == key:
                tier._copy(block, key)

    monkeypatch.setattr(HostTier, "_store_whole", too_early)
    assert found(range(60), memory=FakeHostMemory())
