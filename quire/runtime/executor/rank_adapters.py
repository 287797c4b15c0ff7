"""The adapters of ranks that divide one model: each rank reads the files and keeps its part.

The engine decides which adapter goes to which slot, and tells all ranks in the order of the plans. Knows nothing about
tensors and files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from quire.foundation.messages.to_engine import Adapter
from quire.foundation.messages.workers import AdapterLoaded
from quire.runtime.executor.rank_messages import LoadAdapter


class RankAdapters:
    """An AdapterLoader for ranks that divide one model: an adapter is loaded once all of them have loaded it.

    Args:
        ranks: How many ranks there are.
        broadcast: Sends a message to all of them.
        listen: Takes in what they have said meanwhile; raises if one is lost.
        name: Returns what a rank is called in messages.
    """

    def __init__(
        self,
        ranks: int,
        broadcast: Callable[[LoadAdapter], None],
        listen: Callable[[], None],
        name: Callable[[int], str],
    ) -> None:
        self._broadcast = broadcast
        self._listen = listen
        self._name = name
        self._answers: list[deque[AdapterLoaded]] = [deque() for _ in range(ranks)]
        self._loading = 0

    def load(self, adapter: Adapter, slot: int) -> None:
        self._loading += 1
        self._broadcast(LoadAdapter(adapter, slot))

    def take(self, rank: int, answer: AdapterLoaded) -> None:
        """Take in a rank's answer. Each rank answers in the order in which it was told."""
        self._answers[rank].append(answer)

    def loaded(self) -> list[AdapterLoaded]:
        done: list[AdapterLoaded] = []
        if self._loading:
            self._listen()
            while all(self._answers):
                done.append(self._agreed([answers.popleft() for answers in self._answers]))
            self._loading -= len(done)
        return done

    def _agreed(self, answers: Sequence[AdapterLoaded]) -> AdapterLoaded:
        """Sum up what all ranks say of one adapter: it is loaded if it is in all of them, with the same contents."""
        first = answers[0]
        failed = [(rank, answer) for rank, answer in enumerate(answers) if answer.error]
        if failed:
            rank, answer = failed[0]
            return answer if len(failed) == len(answers) else _refused(answer, f"{self._name(rank)}: {answer.error}")
        if any(answer.adapter != first.adapter for answer in answers):
            name, path = first.adapter.name, first.adapter.path
            return _refused(first, f"The files of adapter '{name}' in {path} differ from rank to rank: load it again.")
        return first


def _refused(answer: AdapterLoaded, error: str) -> AdapterLoaded:
    return msgspec.structs.replace(answer, error=error)
