"""The states of sequences, in models whose layers keep one state a sequence, and the checkpoints of these states.

A running request has one current state, which its steps read and write in place. A checkpoint is a copy of it behind a
whole number of blocks. It is cached under the hash of the last of these blocks, in the free list of a second
`BlockPool`, as blocks are: so a prefix of blocks can be shared where it ends at a checkpoint. Knows nothing about
tensors, or about blocks being scarce.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.foundation.messages.from_engine import StateLoad
from quire.scheduling.kvcache.block_pool import DUMMY_BLOCK, BlockPool
from quire.scheduling.kvcache.block_table import state_key
from quire.scheduling.scheduler.lengths import IntArray, Lengths
from quire.scheduling.scheduler.request import HeldStates, Request
from quire.scheduling.scheduler.step import Step


@dataclass
class StateStats:
    """Counts since the start.

    Attributes:
        checkpoints: Checkpoints that were made.
        skipped: Those that were not, since running requests and their checkpoints left no state for them.
    """

    checkpoints: int = 0
    skipped: int = 0


@dataclass(frozen=True)
class CheckpointRule:
    """Where checkpoints are made.

    Attributes:
        spacing: Tokens between two of them, a multiple of the block size. Prompts are cut there, and so are they at
            their last whole block. Outputs have one at their newest whole block besides, which moves on with them.
        enabled: Whether any are made for the prefix cache; without them only forks have one.
    """

    spacing: int
    enabled: bool = True


class SequenceStates:
    """Gives requests their states, and decides where checkpoints are made.

    A slot always finds a state: those that requests hold beside their current ones are never so many that one for each
    slot would not be left. What else is free holds checkpoints, of which the one that was used least recently goes
    first.

    Args:
        pool: The states, of the block size of the KV cache's blocks.
        num_slots: Largest number of requests that run at a time; the pool has at least as many states.
        drafts: Whether requests may have drafts, so that only the device knows where steps in flight end.
    """

    def __init__(
        self, pool: BlockPool, num_slots: int, rule: CheckpointRule, lengths: Lengths, *, drafts: bool = False
    ) -> None:
        assert pool.num_blocks >= num_slots, "a slot without a state"
        assert rule.spacing % pool.block_size == 0, "checkpoints within blocks"
        self.pool = pool
        self.stats = StateStats()
        self._rule = rule
        self._lengths = lengths
        self._most_kept = pool.num_blocks - num_slots
        self._kept = 0  # states that requests hold beside the current ones of those that run
        self._drafts = drafts
        self._marked: list[Request] = []  # with marks that they have not passed
        self._settling: list[Request] = []  # whose checkpoints enter the cache once their tokens are known
        self._forking: list[Request] = []  # whose prompts others fork from

    def add(self, request: Request) -> None:
        """Prepare a new request, which may fork from another."""
        request.states = HeldStates()
        parent = request.parent
        if parent is not None and parent.states is not None and parent.planned < request.add.prompt_len - 1:
            request.states.forks_from = parent.states
            parent.states.forks += 1
            if parent.states.forks == 1:
                self._forking.append(parent)

    def begin_step(self) -> None:
        """Cache the checkpoints that earlier steps have made, as far as the host knows their tokens."""
        if self._marked:
            self._marked = [request for request in self._marked if self._take_passed(request)]
        if self._settling:
            self._settling = [request for request in self._settling if self._settle(request)]

    def chunk_tokens(self, request: Request, count: int) -> int:
        """Return how many of the next `count` tokens of a request a step computes, so that it ends at the first
        checkpoint among them."""
        held, start = request.states, request.planned
        assert held is not None
        ends = []
        if self._rule.enabled:
            last = (len(request.tokens) - 1) // self.pool.block_size * self.pool.block_size
            ends += [(start // self._rule.spacing + 1) * self._rule.spacing, last]
        if held.forks:
            ends.append(request.add.prompt_len - 1)
        return min([count, *(end - start for end in ends if end > start)])

    def admit(self, request: Request, step: Step) -> None:
        """Give a request that has a new slot in this step its state: a new one, or the one it kept while its blocks
        were on the host."""
        held = request.states
        assert held is not None
        if held.current:
            self._kept -= 1
        else:
            source = held.source
            if source:
                self._touch(source)
            (held.current,) = self._allocate()
            if source != held.current:  # else nothing else was free
                step.state_loads.append((source, held.current))
        held.source = DUMMY_BLOCK
        self._forked(held)

    def moved(self, requests: Sequence[Request], index: IntArray, step: Step, counts: IntArray) -> None:
        """Make the checkpoints of requests that this step has moved forward by `counts` [requests] at most."""
        planned = self._lengths.planned[index]
        if self._rule.enabled:
            at_end = planned % self.pool.block_size == 0
            if self._drafts:
                unknown = self._lengths.in_flight_tokens[index] > 1
                at_end &= ~unknown
                passes = planned // self.pool.block_size > self._lengths.computed[index] // self.pool.block_size
                for place in (unknown & passes).nonzero()[0].tolist():
                    self._mark(requests[place], int((planned - counts)[place]), step)
            for place in at_end.nonzero()[0].tolist():
                self._checkpoint(requests[place], int(planned[place]), step)
        if self._forking:
            self._forking = [request for request in self._forking if self._awaits_fork(request, step)]

    def load(self) -> StateLoad:
        """Return what is in use, and counts since the start."""
        pool, stats = self.pool, self.stats
        return StateLoad(pool.num_blocks, pool.num_free, stats.checkpoints, stats.skipped)

    def can_keep(self) -> bool:
        """Whether a request that is swapped out can keep its state."""
        return self._kept < self._most_kept

    def release(self, request: Request) -> list[int]:
        """Take back the states of a request that is over or preempted, all but the current one of a swapped request.
        Its checkpoints enter the cache unless it is broken, and are returned."""
        held = request.states
        assert held is not None
        if held.marks:
            self._take_passed(request)
            self.pool.free([state for _, state in held.marks])
            self._kept -= len(held.marks)
            held.marks = []
        checkpoints = [state for _, state in held.checkpoints]
        self._settle(request, at_end=True)
        self._free_fork(held)
        held.forks = 0
        if request.ended is not None:
            self._forked(held)
        if not held.current:
            return checkpoints
        was_kept = request.slot is None
        stays = request.ended is None and request.swapped
        self._kept += stays - was_kept
        if not stays:
            self.pool.free([held.current])
            held.current = DUMMY_BLOCK
        return checkpoints

    # --- below ------------------------------------------------------------------------------------------------------

    def _allocate(self) -> list[int]:
        states = self.pool.allocate(1)
        assert states is not None, "a slot always finds a state"
        return states

    def _keep(self) -> int:
        """Allocate a state beside the current ones; 0 if none is left for that."""
        if self._kept == self._most_kept:
            self.stats.skipped += 1
            return DUMMY_BLOCK
        self._kept += 1
        return self._allocate()[0]

    def _touch(self, state: int) -> None:
        """Note that a cached checkpoint is used."""
        self.pool.share([state])
        self.pool.free([state])

    def _checkpoint(self, request: Request, length: int, step: Step) -> None:
        """Copy the state behind the first `length` tokens, which end at a block. A checkpoint that is not to stay moves
        on."""
        held = request.states
        assert held is not None
        if held.marks:
            self._mark(request, length - 1, step)
            return
        state = DUMMY_BLOCK
        if length <= len(request.tokens) and (cached := self._cached(request, length)):
            self._touch(cached)
            return
        if held.checkpoints and not self._stays(request, held.checkpoints[-1][0]):
            state = held.checkpoints.pop()[1]
        state = state or self._keep()
        if not state:
            return
        self.stats.checkpoints += 1
        step.state_saves.append((held.current, state))
        held.checkpoints.append((length, state))
        if self._stays(request, length) and request not in self._settling:
            self._settling.append(request)

    def _mark(self, request: Request, start: int, step: Step) -> None:
        """Let checkpoints be made at the blocks' ends that the step may pass, which begins at token `start` or earlier.
        One that a step before may have passed already cannot be asked for any more."""
        held, size = request.states, self.pool.block_size
        assert held is not None
        marks = dict(held.marks)
        for length in range((request.computed // size + 1) * size, request.planned + 1, size):
            if length not in marks and length > start and (state := self._keep()):
                marks[length] = state
            if length in marks:
                step.state_marks.append((request.slot or 0, length, marks[length]))
        if marks and not held.marks:
            self._marked.append(request)
        held.marks = sorted(marks.items())

    def _take_passed(self, request: Request) -> bool:
        """Note the checkpoints at marks that a request has passed. Returns whether some are left."""
        held = request.states
        assert held is not None
        while held.marks and held.marks[0][0] <= request.computed:
            if held.checkpoints and not self._stays(request, held.checkpoints[-1][0]):
                self.pool.free([held.checkpoints.pop()[1]])
                self._kept -= 1
            held.checkpoints.append(held.marks.pop(0))
            self.stats.checkpoints += 1
            if self._stays(request, held.checkpoints[-1][0]) and request not in self._settling:
                self._settling.append(request)
        return bool(held.marks)

    def _stays(self, request: Request, length: int) -> bool:
        """Whether a checkpoint is where the rule says, or at the end of a prompt."""
        size = self.pool.block_size
        return length % self._rule.spacing == 0 or length == (request.add.prompt_len - 1) // size * size

    def _cached(self, request: Request, length: int) -> int:
        """Return the cached checkpoint behind so many known tokens; 0: there is none."""
        hashes = request.block_hashes.hash_up_to(request.tokens, length)
        return self.pool.get_cached_block(state_key(hashes[length // self.pool.block_size - 1])) or DUMMY_BLOCK

    def _settle(self, request: Request, *, at_end: bool = False) -> bool:
        """Cache the checkpoints whose tokens the host knows and which stay, or all of them when the request lets go of
        them. Returns whether some are left that stay."""
        held, left = request.states, list[tuple[int, int]]()
        assert held is not None
        for length, state in held.checkpoints:
            known = length <= len(request.tokens)
            if not at_end and not (known and self._stays(request, length)):
                left.append((length, state))
                continue
            if known and request.ended != "error":
                hashes = request.block_hashes.hash_up_to(request.tokens, length)
                self.pool.cache_block(state, state_key(hashes[length // self.pool.block_size - 1]))
            self.pool.free([state])
            self._kept -= 1
        held.checkpoints = left
        return any(self._stays(request, length) for length, _ in left)

    def _awaits_fork(self, request: Request, step: Step) -> bool:
        """Keep the state that forks begin with, once the request is there. Returns whether it is not there yet."""
        held, at = request.states, request.add.prompt_len - 1
        assert held is not None
        if not held.forks:
            return False
        if request.slot is None or request.planned < at:
            return True
        if request.planned == at and not held.fork and (state := self._keep()):
            held.fork = state
            step.state_saves.append((held.current, state))
        return False

    def _forked(self, held: HeldStates) -> None:
        """Note that a fork has begun, or never will; the last one frees the state that it began with."""
        parent, held.forks_from = held.forks_from, None
        if parent is not None and parent.forks:
            parent.forks -= 1
            if not parent.forks:
                self._free_fork(parent)

    def _free_fork(self, held: HeldStates) -> None:
        if held.fork:
            self.pool.free([held.fork])
            self._kept -= 1
            held.fork = DUMMY_BLOCK
