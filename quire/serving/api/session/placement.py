"""Which engine each prompt goes to, and how long each engine's queue is, as one API process knows it.

The engine says how long its queue is (`Load`); what this process has sent since is added, because the engine may not
have it yet. `Placement` hashes a prompt's blocks as engines do, and asks `quire.serving.replica_chooser`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from quire.foundation.clock import Clock
from quire.foundation.messages.from_engine import Load
from quire.foundation.messages.to_engine import Add
from quire.scheduling.kvcache.block_hashes import BlockHashes
from quire.serving.replica_chooser import MAX_BLOCKS, ReplicaChooser, ReplicaLoad

_UNKNOWN_BLOCKS = 2**20
"""Supposed of an engine that has not said how many it has."""


class EngineQueue:
    """The queue of one engine.

    Args:
        slots: Sequences that it runs at once.

    Attributes:
        load: What the engine said last.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self.load = Load()
        self._unseen = OrderedDict[int, tuple[int, int]]()  # Adds after `load`, by last id: sequences, tokens
        self._unseen_sequences = self._unseen_tokens = 0

    # --- what the engine says ---------------------------------------------------------------------------------------

    def observe(self, load: Load, last_add: int) -> None:
        """What the engine has to do, everything up to the Add `last_add` of this process included."""
        self.load = load
        while self._unseen and (first := next(iter(self._unseen))) <= last_add:
            self._forget_unseen(first)

    def restart(self) -> None:
        """Another engine takes over. It has been sent nothing yet, and is as fast as the one before."""
        before = self.load
        self.load = Load(tokens_per_s=before.tokens_per_s, expected_output=before.expected_output)
        self._unseen.clear()
        self._unseen_sequences = self._unseen_tokens = 0

    # --- what it is sent --------------------------------------------------------------------------------------------

    def expect(self, add: Add) -> None:
        """An Add goes to the engine, whose load does not include it yet."""
        self._forget_unseen(add.last_id)
        tokens = add.queued_tokens(self.load.expected_output)
        self._unseen[add.last_id] = 1 + len(add.forks), tokens
        self._unseen_sequences += 1 + len(add.forks)
        self._unseen_tokens += tokens

    # --- how long it is ---------------------------------------------------------------------------------------------

    @property
    def sequences(self) -> int:
        """Sequences in the queue. The latest ones find free slots first."""
        free = 0 if self.load.waiting else self._slots - self.load.running
        return self.load.waiting + max(0, self._unseen_sequences - free)

    @property
    def open_sequences(self) -> int:
        """Sequences that run or wait."""
        return self.load.running + self.load.waiting + self._unseen_sequences

    @property
    def tokens(self) -> int:
        """Tokens that are to be computed for them, see `messages.to_engine.queued_tokens`."""
        unseen = 0 if self._unseen_run_at_once else self._unseen_tokens
        return self.load.queued_tokens + unseen

    @property
    def _unseen_run_at_once(self) -> bool:
        """Whether the engine has slots and blocks for all that it has been sent since its last news: that is no queue,
        and a long prompt turns nobody away while its first step runs."""
        load = self.load
        return (
            not (load.waiting or load.paused)
            and self._unseen_sequences <= self._slots - load.running
            and self._unseen_tokens <= load.free_blocks * load.block_size
        )

    def _forget_unseen(self, last_id: int) -> None:
        sequences, tokens = self._unseen.pop(last_id, (0, 0))
        self._unseen_sequences -= sequences
        self._unseen_tokens -= tokens


class Placement:
    """Places prompts on engines.

    Args:
        queues: What is known of each engine's.
        block_size: Tokens in a KV block.
        clock: For what was sent lately.
    """

    def __init__(self, queues: Sequence[EngineQueue], block_size: int, clock: Clock) -> None:
        self._queues = queues
        self._block_size = block_size
        self._chooser = ReplicaChooser(len(queues), block_size, clock)

    def blocks(self, add: Add) -> list[bytes]:
        """The hash chain of a prompt, as far as it matters; empty where there is nothing to choose."""
        if len(self._queues) == 1:
            return []
        adapter = add.adapter.digest if add.adapter else ""
        hashes = BlockHashes(self._block_size, add.cache_salt, adapter=adapter)
        return hashes.hash_up_to(add.tokens, min(len(add.tokens), MAX_BLOCKS * self._block_size))

    def place(self, add: Add, blocks: Sequence[bytes], able: Sequence[bool]) -> int:
        """The number of the engine for a prompt, whose queue expects it from now on.

        Args:
            blocks: What `blocks` has returned for it.
            able: Which engines take it; at least one does.
        """
        number = 0
        if len(self._queues) > 1:
            loads = [_load(queue) if can else None for queue, can in zip(self._queues, able, strict=True)]
            mean = sum(queue.load.expected_output for queue in self._queues) / len(self._queues)
            output = min(add.sampling.max_tokens or 0, mean) * (1 + len(add.forks))
            number = self._chooser.choose(loads, blocks, len(add.tokens), output)
        self._queues[number].expect(add)
        return number

    def forget(self, engine: int) -> None:
        """An engine was started again: its cache is empty."""
        self._chooser.forget(engine)


def _load(queue: EngineQueue) -> ReplicaLoad:
    load = queue.load
    if not load.num_blocks:
        return ReplicaLoad(queue.open_sequences, queue.tokens, _UNKNOWN_BLOCKS, _UNKNOWN_BLOCKS)
    return ReplicaLoad(queue.open_sequences, queue.tokens, load.free_blocks, load.num_blocks)
