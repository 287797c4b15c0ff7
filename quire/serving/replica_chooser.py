"""Chooses among replicas of one model: the one that has most of the prompt's prefix, unless it has too much to do.

Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2018) works below a record of the prefixes that
each replica was sent. A prefix that nobody has goes where rendezvous hashing says (Thaler, Ravishankar 1998), so
several choosers mostly agree without talking to each other. A prefix that is asked for more often than one replica may
answer spreads to the next replica, and stays on both.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from quire.foundation.clock import Clock

BOUND = 1.2
"""A replica gets at most this many times the mean."""
HALF_LIFE_S = 30.0
"""Seconds after which what was sent counts half."""
SLACK = 8
"""Requests of the usual size beyond the bound: few requests are not worth spreading."""
MAX_BLOCKS = 512
"""Blocks of a prompt that decide; a longer common prefix makes no difference any more."""


@dataclass(frozen=True)
class ReplicaLoad:
    """What a replica has to do: sequences that run or wait, and tokens to be computed for requests that wait. Its free
    blocks hold nothing that is in use; cached prefixes may be in them."""

    sequences: int
    waiting_tokens: int
    free_blocks: int
    num_blocks: int


@dataclass
class _Sent:
    """What one replica was sent lately; older things count less."""

    requests: float = 0.0
    tokens: float = 0.0


class ReplicaChooser:
    """Chooses a replica for each request, and remembers what it chose. `block_size` is in tokens."""

    def __init__(self, num_replicas: int, block_size: int, clock: Clock) -> None:
        self._block_size = block_size
        self._clock = clock
        self._record = PrefixRecord(num_replicas)
        self._names = [replica.to_bytes(4, "big") for replica in range(num_replicas)]
        self._unused: list[int] = []
        self._sent = [_Sent() for _ in range(num_replicas)]
        self._decayed_at = clock.now()

    @property
    def num_replicas(self) -> int:
        """How many loads `choose` is given; removed replicas count."""
        return len(self._names)

    def choose(
        self, loads: Sequence[ReplicaLoad | None], blocks: Sequence[bytes], prompt_tokens: int, output_tokens: float
    ) -> int:
        """Choose the replica for a request, and count the request as sent to it.

        Args:
            loads: By replica; None for one that takes nothing now. Some replica takes something.
            blocks: Hash chain over the prompt's full blocks, of which MAX_BLOCKS are looked at.
            output_tokens: How many tokens the answer is expected to have.
        """
        blocks = blocks[:MAX_BLOCKS]
        matches = self._record.matches(blocks)
        work = [prompt_tokens - match * self._block_size + output_tokens for match in matches]
        self._decay()
        able = {replica: load for replica, load in enumerate(loads) if load is not None}
        allowed = [replica for replica in able if self._may_take(replica, able, work[replica])]
        if allowed:
            longest = max(matches[replica] for replica in allowed)
            best = [replica for replica in allowed if matches[replica] == longest]
            few = _least_busy(best, able)
            chosen = self._by_rendezvous(few, blocks, longest) if blocks else self._least_sent(few)
        else:
            least = min(load.waiting_tokens for load in able.values())
            chosen = self._least_sent([replica for replica in able if able[replica].waiting_tokens == least])
        self._record.add(chosen, blocks, able[chosen].num_blocks)
        self._sent[chosen].requests += 1
        self._sent[chosen].tokens += work[chosen]
        return chosen

    def forget(self, replica: int) -> None:
        """Take a replica's cache to be empty, because the replica was started again."""
        self._record.clear(replica)
        self._sent[replica] = _Sent()

    def add(self, name: bytes) -> int:
        """Add a replica, and return its number, which may have been that of a removed one.

        Rendezvous hashing knows it by its name: choosers that list the same replicas differently still agree.
        """
        if self._unused:
            number = self._unused.pop()
            self._names[number] = name
            return number
        self._record.add_replica()
        self._names.append(name)
        self._sent.append(_Sent())
        return len(self._names) - 1

    def remove(self, replica: int) -> None:
        """Remove a replica. `choose` gets no load for it until another replica has its number."""
        self.forget(replica)
        self._unused.append(replica)

    def _may_take(self, replica: int, able: Mapping[int, ReplicaLoad], work: float) -> bool:
        """Whether a replica may get the request: it has room, and not much more to do than the others."""
        load, sent = able[replica], self._sent[replica]
        max_free = max(other.free_blocks for other in able.values())
        if load.free_blocks * self._block_size < work and load.free_blocks < max_free:
            return False
        share = BOUND / len(able)
        requests = sum(self._sent[other].requests for other in able)
        tokens = sum(self._sent[other].tokens for other in able)
        waiting = sum(other.waiting_tokens for other in able.values())
        slack = SLACK * (tokens / requests if requests >= 1 else work)
        return (
            sent.requests <= share * requests + SLACK
            and sent.tokens <= share * tokens + slack
            and load.waiting_tokens <= share * waiting + slack
        )

    def _by_rendezvous(self, replicas: Sequence[int], blocks: Sequence[bytes], matched: int) -> int:
        """The replica with the highest hash of the prompt's first block that was not sent before."""
        key = blocks[min(matched, len(blocks) - 1)]
        return max(replicas, key=lambda replica: blake2b(key + self._names[replica], digest_size=8).digest())

    def _least_sent(self, replicas: Sequence[int]) -> int:
        return min(replicas, key=lambda replica: self._sent[replica].tokens)

    def _decay(self) -> None:
        now = self._clock.now()
        factor = 0.5 ** ((now - self._decayed_at) / HALF_LIFE_S)
        self._decayed_at = now
        for sent in self._sent:
            sent.requests *= factor
            sent.tokens *= factor


def _least_busy(replicas: Sequence[int], loads: Mapping[int, ReplicaLoad]) -> list[int]:
    """The replicas with at most their share of the sequences; if there are none, the one with the fewest."""
    mean = sum(load.sequences for load in loads.values()) / len(loads)
    few = [replica for replica in replicas if loads[replica].sequences <= BOUND * mean]
    return few or [min(replicas, key=lambda replica: loads[replica].sequences)]


class PrefixRecord:
    """The blocks that each replica was sent last, as many as its cache holds; the longest unused are forgotten first.

    Blocks are named by hash chains, so a block's name says what is before it.
    """

    def __init__(self, num_replicas: int) -> None:
        self._holders: dict[bytes, int] = {}  # block → replicas that have it, as bits
        self._blocks = [OrderedDict[bytes, None]() for _ in range(num_replicas)]

    def add_replica(self) -> None:
        """Add a replica with nothing in its cache; its number is the next."""
        self._blocks.append(OrderedDict())

    def matches(self, blocks: Sequence[bytes]) -> list[int]:
        """How many of a prompt's first blocks each replica was sent."""
        found = [0] * len(self._blocks)
        having = (1 << len(self._blocks)) - 1
        for index, block in enumerate(blocks):
            remaining = having & self._holders.get(block, 0)
            if remaining != having:
                _set(found, having & ~remaining, index)
                having = remaining
            if not having:
                return found
        _set(found, having, len(blocks))
        return found

    def add(self, replica: int, blocks: Sequence[bytes], capacity: int) -> None:
        """Record that a replica gets a prompt; its cache holds `capacity` blocks."""
        held, bit = self._blocks[replica], 1 << replica
        # As engines free them: the beginning, which all that follows needs, stays longest.
        for block in reversed(blocks):
            held[block] = None
            held.move_to_end(block)
            self._holders[block] = self._holders.get(block, 0) | bit
        while len(held) > capacity:
            self._forget(held.popitem(last=False)[0], bit)

    def clear(self, replica: int) -> None:
        """Forget a replica's blocks, because its cache is empty."""
        for block in self._blocks[replica]:
            self._forget(block, 1 << replica)
        self._blocks[replica].clear()

    def __len__(self) -> int:
        return len(self._holders)

    def _forget(self, block: bytes, bit: int) -> None:
        left = self._holders[block] & ~bit
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]


def _set(found: list[int], replicas: int, value: int) -> None:
    while replicas:
        lowest = replicas & -replicas
        found[lowest.bit_length() - 1] = value
        replicas ^= lowest
