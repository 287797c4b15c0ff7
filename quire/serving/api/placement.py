"""Which engine each prompt goes to: hashes its blocks as engines do, and asks `quire.serving`."""

from __future__ import annotations

from collections.abc import Sequence

from quire.foundation.clock import Clock
from quire.foundation.messages.to_engine import Add
from quire.scheduling.kvcache.block_hashes import BlockHashes
from quire.serving.api.engine_queue import EngineQueue
from quire.serving.replica_chooser import MAX_BLOCKS, ReplicaChooser, ReplicaLoad

_UNKNOWN_BLOCKS = 2**20
"""Supposed of an engine that has not said how many it has."""


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
