"""Repetition is found as it is defined, at a cost per token that does not grow with the output."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from quire.sampling_params import RepetitionDetectionParams
from quire.scheduling.kvcache.block_hashes import BlockHashes
from quire.scheduling.kvcache.block_pool import BlockPool
from quire.scheduling.kvcache.block_table import BlockTable
from quire.scheduling.kvcache.cache_groups import FULL_ATTENTION
from quire.scheduling.scheduler.lengths import Lengths
from quire.scheduling.scheduler.output_processing import NewTokens, check_stops
from quire.scheduling.scheduler.request import Request
from quire.scheduling.scheduler.request_table import RequestTable
from tests.engine.harness import add


class CountingList(list[int]):
    """Counts the elements that are read."""

    reads = 0

    def __getitem__(self, item: Any) -> Any:
        found = super().__getitem__(item)
        if isinstance(item, slice):
            found = CountingList(found)
            CountingList.reads += len(found)
        else:
            CountingList.reads += 1
        return found


class Output:
    """One request that gets a token at a time."""

    def __init__(self, params: RepetitionDetectionParams, output: list[int] | None = None) -> None:
        message = add(1, [1], 1_000_000, repetition_detection=params)
        message.tokens.extend(output or [])
        self.lengths, self.table = Lengths(), RequestTable(1)
        blocks = BlockTable(BlockPool(1, 16), FULL_ATTENTION)
        self.request = Request(message, blocks, BlockHashes(16), (0.0, 1), self.lengths)
        self.table.add(self.request)
        self.request.tokens = CountingList(self.request.tokens)

    def append(self, token: int) -> bool:
        """Whether the output is over with this token."""
        self.request.tokens.append(token)
        index = np.array([self.request.index])
        return bool(check_stops(NewTokens([self.request], index, [1], [token], []), self.lengths, self.table))


def repeats(output: list[int], params: RepetitionDetectionParams) -> bool:
    """The definition: the output ends with `min_count` copies of a pattern of an allowed size."""
    sizes = range(params.min_pattern_size, params.max_pattern_size + 1)
    return any(
        len(output) >= size * params.min_count
        and output[-size * params.min_count :] == output[-size:] * params.min_count
        for size in sizes
    )


@pytest.mark.parametrize("known", [0, 1, 30])
def test_repetition_is_found_at_the_token_that_completes_it(known: int) -> None:
    rng = random.Random(known)
    for _ in range(200):
        low = rng.randint(1, 4)
        params = RepetitionDetectionParams(
            min_pattern_size=low, max_pattern_size=rng.randint(low, 6), min_count=rng.randint(2, 4)
        )
        output = [rng.randint(1, 5) for _ in range(known)]
        outputs = Output(params, list(output))
        for _ in range(60):
            output.append(rng.randint(1, 2))
            found = outputs.append(output[-1])
            assert found == repeats(output, params)
            if found:
                assert outputs.request.ended == "repetition"
                break


def test_a_token_costs_no_more_than_the_window() -> None:
    """Also where many pattern sizes almost match: the last 180 tokens are equal, and patterns have 100 to 200."""
    params = RepetitionDetectionParams(min_pattern_size=100, max_pattern_size=200, min_count=2)
    output = Output(params, [*range(20_000), *[7] * 178])
    output.append(7)
    CountingList.reads = 0
    output.append(7)
    assert CountingList.reads <= 2 * params.max_pattern_size * params.min_count
