"""What must hold between any two turns of an engine's loop, whatever has happened.

Recomputes from the requests themselves what the scheduler, the pools and the queues keep account of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from quire.engine.core import EngineCore
from quire.foundation.messages.from_engine import Deltas
from quire.foundation.messages.to_engine import CLIENT_SHIFT
from quire.scheduling.kvcache.block_pool import DUMMY_BLOCK, BlockPool
from quire.scheduling.kvcache.host_pool import HostPool
from quire.scheduling.scheduler.lengths import Lengths
from quire.scheduling.scheduler.request import Request
from quire.scheduling.scheduler.request_table import RequestTable
from quire.scheduling.scheduler.scheduler import Scheduler
from quire.scheduling.scheduler.sequence_states import SequenceStates
from quire.scheduling.scheduler.waiting_queue import WaitingQueue
from tests.simulation.settings import MAX_SEQUENCES, Settings
from tests.simulation.world import World


class Violation(Exception):
    """Something does not hold."""


class LastMessages:
    """What one engine says of each sequence: its one End is the last.

    Args:
        world: Where a violation is reported.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._ended: set[int] = set()

    def said(self, message: Deltas) -> None:
        """The engine sends this."""
        if late := self._ended.intersection((*message.ids, *(number for number, _ in message.prompt_logprobs))):
            self._world.fail(f"engine: sequences {sorted(late)} gain something after their End")
        for end in message.ends:
            if end.id in self._ended:
                self._world.fail(f"engine: sequence {end.id} ends twice")
            self._ended.add(end.id)


def check_engine(core: EngineCore, world: World, settings: Settings) -> None:
    """Fail the run if something of an engine does not hold."""
    try:
        check_scheduler(core._scheduler, settings.max_in_flight)
        _check_queue_limit(core._scheduler, settings)
        _check_alone(core._scheduler)
    except Violation as violation:
        world.fail(f"engine: {violation}")


def check_scheduler(scheduler: Scheduler, max_in_flight: int) -> None:
    """Everything that is known about requests, blocks and slots.

    Raises:
        Violation: Something does not hold.
    """
    requests = list(scheduler.requests())
    _check_membership(scheduler._request_table, requests)
    moving, read = ([], []) if scheduler.tier is None else scheduler.tier.held
    _check_blocks(scheduler.pool, requests, moving)
    _check_sharing(scheduler.pool, requests)
    _check_host_blocks(scheduler.host, requests, read)
    if scheduler.states is not None:
        _check_states(scheduler.states, requests)
    _check_lengths(scheduler._lengths, requests)
    _check_in_flight(scheduler, requests, max_in_flight)
    _check_sums(scheduler._waiting)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


def _check_membership(table: RequestTable, requests: list[Request]) -> None:
    """Every request is either waiting or running; every slot has one owner or is free."""
    waiting, running = list(table.waiting), list(table.running)
    _require(not {r.id for r in waiting} & {r.id for r in running}, "a request waits and runs")
    _require(
        sorted(r.id for r in requests) == sorted(r.id for r in (*waiting, *running)), "running + waiting is not all"
    )
    _require(all(r.slot is None for r in waiting), "a waiting request has a slot")
    slots = [r.slot for r in running if r.slot is not None]
    _require(len(slots) == len(running), "a running request has no slot")
    _require(sorted([*slots, *table._free_slots]) == list(range(table.num_slots)), "slots do not add up")
    _require(all(r.ended is None for r in requests), "a request that is over is still there")
    keys = [r.queue_key for r in running]
    _require(keys == sorted(keys), "the running are out of order")
    stops = Counter(token for r in requests for token in r.stop_ids)
    _require(table._stop_counts == stops, "stop tokens are miscounted")


def _check_blocks(pool: BlockPool, requests: list[Request], moving: list[int]) -> None:
    """Each block has as many references as holders; the free list is what nobody holds."""
    held = Counter(block for r in requests for blocks in r.table._blocks for block in blocks if block > DUMMY_BLOCK)
    held.update(moving)
    counted = {block: count for block, count in enumerate(pool._ref_counts) if count}
    if counted != held:
        block = next(block for block in sorted({*counted, *held}) if counted.get(block, 0) != held[block])
        raise Violation(f"block {block} has {counted.get(block, 0)} references and {held[block]} holders")
    _require(pool._free.keys().isdisjoint(held), "a block is free and held")
    _require(len(pool._free) + len(held) == pool.num_blocks, "blocks are neither free nor held")
    _require(DUMMY_BLOCK not in pool._free, "the dummy block was handed out")
    _require(
        {key: block for block, key in pool._key_of.items()} == pool._block_of, "the prefix cache contradicts itself"
    )
    idle = [r for r in requests if r.slot is None and not r.swapped]
    _require(not any(any(r.table._blocks) for r in idle), "a waiting request holds blocks")


def _check_sharing(pool: BlockPool, requests: list[Request]) -> None:
    """Several holders of a block have it at the same place, with the same tokens before its end."""
    holders: dict[int, tuple[Request, int, int]] = {}
    for request in requests:
        for group, blocks in enumerate(request.table._blocks):
            for entry, block in enumerate(blocks):
                if block <= DUMMY_BLOCK:
                    continue
                other, *place = holders.setdefault(block, (request, group, entry))
                if other is request and place == [group, entry]:
                    continue
                if place != [group, entry]:
                    raise Violation(f"block {block} is in two places")
                end = (entry + 1) * pool.block_size
                mine, theirs = request.tokens[:end], other.tokens[:end]
                same = min(len(mine), len(theirs))
                if mine[:same] != theirs[:same]:
                    raise Violation(f"block {block} is shared by different tokens")


def _check_host_blocks(host: HostPool, requests: list[Request], read: list[int]) -> None:
    """Each ready host block is held by swapped requests or orders, or free with or without cached contents."""
    free = [block for run in host._free for block in run] + list(host._unheld)
    held = Counter(~block for r in requests for blocks in r.table._blocks for block in blocks if block < DUMMY_BLOCK)
    held.update(read)
    _require(host._holders == dict(held), "host blocks have other holders")
    _require(sorted([*free, *held]) == list(range(host.num_blocks)), "host blocks do not add up")
    _require(host.num_free == len(free), "free host blocks are miscounted")
    _require({key: block for block, key in host._key_of.items()} == host._block_of, "the host tier contradicts itself")
    swapped = [r for r in requests if r.swapped]
    _require(all(r.slot is None for r in swapped), "a swapped request runs")


def _check_states(states: SequenceStates, requests: list[Request]) -> None:
    """Each state that is held has one holder; who runs or is swapped out has a current one; a slot always finds one."""
    held, pool = Counter[int](), states.pool
    for request in requests:
        own = request.states
        assert own is not None
        _require(bool(own.current) == (request.slot is not None or request.swapped), f"{request}: its state is missing")
        held.update(
            state for state in (own.current, own.fork, *(each for _, each in own.checkpoints + own.marks)) if state
        )
        _require(all(length <= request.planned for length, _ in own.checkpoints), f"{request}: a checkpoint ahead")
    counted = {state: count for state, count in enumerate(pool._ref_counts) if count}
    _require(counted == dict(held), "states are held by several, or by nobody")
    _require(len(held) + pool.num_free == pool.num_blocks, "states are neither free nor held")
    running = sum(request.slot is not None for request in requests)
    _require(states._kept == len(held) - running, "states that are kept are miscounted")
    _require(states._kept <= states._most_kept, "a slot may find no state")
    _require(
        {key: state for state, key in pool._key_of.items()} == pool._block_of, "the cached states contradict themselves"
    )


def _check_lengths(lengths: Lengths, requests: list[Request]) -> None:
    """computed ≤ planned ≤ known + in flight ≤ limit, none is negative, and blocks hold what is planned."""
    for r in requests:
        if (wrong := _wrong_length(lengths, r)) is not None:
            raise Violation(f"{r}: {wrong}")
    used = [r.index for r in requests]
    _require(sorted([*used, *lengths._free]) == list(range(len(lengths.planned))), "indices do not add up")


def _wrong_length(lengths: Lengths, r: Request) -> str | None:
    known, planned, in_flight = len(r.tokens), r.planned, r.in_flight_tokens
    if int(lengths.known[r.index]) != known:
        return "known tokens are miscounted"
    if not 0 <= r.computed <= planned:
        return "computed more than planned"
    if in_flight < 0 or planned > known + in_flight:
        return "planned more than there is"
    if not r.add.prompt_len <= known <= known + in_flight <= r.limit:
        return "longer than its limit"
    if r.slot is None:
        return None
    if r.table.allocated_tokens < planned:
        return "planned tokens without blocks"
    if int(lengths.allocated[r.index]) > r.table.allocated_tokens:
        return "believes in blocks that it does not have"
    return None


def _check_in_flight(scheduler: Scheduler, requests: Iterable[Request], max_in_flight: int) -> None:
    """Tokens in flight are those of the plans in flight."""
    steps = scheduler._steps_in_flight
    _require(len(steps) <= max_in_flight, "too many plans in flight")
    expected: Counter[int] = Counter()
    for step in steps:
        for request, serial, most in zip(step.requests, step.serials, step.max_new_tokens, strict=True):
            if scheduler._lengths.serial[request.index] == serial:
                expected[request.id] += int(most)
    for request in requests:
        if request.in_flight_tokens != expected[request.id]:
            raise Violation(f"{request}: tokens in flight are miscounted")


def _check_sums(waiting: WaitingQueue) -> None:
    """The queue's sums are those of its requests."""
    shares = waiting._shares
    _require(shares.keys() == waiting._requests.keys(), "a waiting request is not counted")
    _require(waiting.num_tokens == sum(len(r.tokens) for r in waiting), "waiting tokens are miscounted")
    _require(waiting.num_uncomputed == sum(s.uncomputed for s in shares.values()), "uncomputed tokens are miscounted")
    _require(waiting.queued_tokens == sum(s.queued for s in shares.values()), "queued tokens are miscounted")
    awaiting = sum(bool(r.awaits) for r in waiting)
    _require(waiting.num_awaiting == awaiting, "awaiting requests are miscounted")
    _require(all(s.uncomputed >= 0 and s.queued > 0 for s in shares.values()), "a share is negative")


def _check_queue_limit(scheduler: Scheduler, settings: Settings) -> None:
    """The queue is at most as long as it may be, beside what ran in an engine that died, and one request that met an
    empty queue.
    """
    limit = settings.config.scheduler.max_queued_requests
    if limit is not None:
        fresh = sum(r.admitted_at is None for r in scheduler._waiting)
        most = limit + scheduler._request_table.num_slots + MAX_SEQUENCES
        _require(fresh <= most, f"{fresh} sequences wait, where {limit} may")


def _check_alone(scheduler: Scheduler) -> None:
    """A prompt that is to run alone is in no step beside another until its sequences have brought so many tokens."""
    for step in scheduler._steps_in_flight:
        prompts = {request.add.prompt_id for request in step.requests}
        alone = [r for r in step.requests if r.ended is None and len(r.tokens) - len(r.add.tokens) < r.add.alone]
        if alone and len(prompts) > 1:
            raise Violation(f"{alone[0]} is to run alone, and is in a step beside others")


def sequences_of(core: EngineCore, client: int) -> set[int]:
    """The sequences of one client that an engine has."""
    return {r.id for r in core._scheduler.requests() if r.id >> CLIENT_SHIFT == client}
