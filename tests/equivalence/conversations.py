"""Random conversations of many turns on one engine: their prompts begin like earlier ones, and are edited, forked and
aborted. Each answer is compared with that of a run without anything cached.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

from quire.foundation.messages.to_engine import Abort
from quire.scheduling.kvcache.block_table import BlockTable, PrefixMatch
from quire.scheduling.kvcache.host_tier import HostTier
from tests.engine.harness import Engine, add

Alone = Callable[[Sequence[int], int], list[int]]
"""Returns the output tokens of a prompt that is computed by itself."""


@dataclass
class Hits:
    """Blocks of prompts that were cached, and those of them that were shared, in prompts that shared any."""

    cached: int = 0
    shared: int = 0


@contextmanager
def counted_hits() -> Iterator[Hits]:
    """Count what lookups find, and what they would find if a prefix could end at any block."""
    hits, match_prefix = Hits(), BlockTable.match_prefix

    def counted(table: BlockTable, hashes: Iterator[bytes], length: int, tier: HostTier | None = None) -> PrefixMatch:
        read = list(hashes)
        match = match_prefix(table, read, length, tier)
        if tier is not None:
            return match
        hits.cached += match_prefix(BlockTable(table._pool, table._groups), read, length).num_tokens
        hits.shared += match.num_tokens
        return match

    with mock.patch.object(BlockTable, "match_prefix", counted):
        yield hits


class Conversations:
    """Conversations that a script holds with an engine.

    Args:
        longest: Maximum tokens of a prompt with its answer.
        is_tie: Whether two tokens behind a text are equally good but for rounding.
    """

    def __init__(
        self,
        rng: random.Random,
        engine: Engine,
        alone: Alone,
        vocab_size: int,
        longest: int,
        is_tie: Callable[[Sequence[int], int, int], bool] = lambda text, first, second: False,
    ) -> None:
        self._rng = rng
        self._engine = engine
        self._alone = alone
        self._vocab_size = vocab_size
        self._longest = longest
        self._is_tie = is_tie
        self._system = self._text(30)
        self._open: list[list[int]] = []
        self._next_id = 1

    def hold(self, rounds: int) -> None:
        """Hold so many rounds, in each of which some conversations have a turn at the same time."""
        for _ in range(rounds):
            turns = [self._prompt() for _ in range(self._rng.choice((1, 1, 2, 4)))]
            self._answer(turns)
        self._engine.assert_all_free()

    def _text(self, most: int) -> list[int]:
        return [self._rng.randrange(self._vocab_size) for _ in range(self._rng.randint(1, most))]

    def _prompt(self) -> list[int]:
        """A new conversation, or the next turn of one, which may be edited before."""
        rng = self._rng
        if self._open and rng.random() < 0.8:
            history = rng.choice(self._open)
            if rng.random() < 0.2:
                history = history[: rng.randint(1, len(history))]
        else:
            history = self._system if rng.random() < 0.5 else []
        return [*history[: self._longest - 60], *self._text(30)]

    def _answer(self, prompts: Sequence[Sequence[int]]) -> None:
        rng, engine, expected, aborted = self._rng, self._engine, dict[int, list[int]](), set[int]()
        texts: dict[int, Sequence[int]] = {}
        for prompt in prompts:
            first, number, most = self._next_id, rng.choice((1, 1, 1, 3)), rng.randint(1, 25)
            ids = list(range(first, first + number))
            self._next_id += number
            expected |= dict.fromkeys(ids, self._alone(prompt, most))
            texts |= dict.fromkeys(ids, prompt)
            engine.client.send(add(first, prompt, most, forks=ids[1:]))
            if rng.random() < 0.15:
                aborted.add(rng.choice(ids))
            self._open.append([*prompt, *expected[first]])
        wait = rng.randint(0, 12)
        for _ in range(5_000):
            if expected.keys() <= engine.outcome.ends.keys():
                break
            if wait == 0 and aborted:
                engine.client.send(Abort(sorted(aborted)))
            wait -= 1
            engine.step()
        engine.finish_steps()
        for number, tokens in expected.items():
            assert number in engine.outcome.ends, f"sequence {number} has not ended"
            got = engine.outcome.tokens.get(number, [])
            expected_now = tokens[: len(got)] if number in aborted else tokens
            if got != expected_now:
                self._check_tie(texts[number], got, expected_now, f"sequence {number}")
        self._open = self._open[-5:]

    def _check_tie(self, prompt: Sequence[int], got: Sequence[int], expected: Sequence[int], name: str) -> None:
        """Both answers differ first where two tokens are equally good; behind that nothing is compared."""
        assert len(got) == len(expected), name
        at = next(place for place, pair in enumerate(zip(got, expected, strict=True)) if pair[0] != pair[1])
        assert self._is_tie([*prompt, *expected[:at]], got[at], expected[at]), name
