"""A reader that waits gets deltas by a direct call, in order, and nothing is lost."""

from __future__ import annotations

import asyncio

import pytest

from quire.errors import GenerationError
from quire.foundation.messages.to_engine import Add
from quire.sampling_params import SamplingParams
from quire.serving.api.session.output_collector import OutputCollector
from quire.text.deltas import SequenceDelta


def stream() -> OutputCollector:
    return OutputCollector([Add(7, [1], 1, SamplingParams(max_tokens=9), [], seed=0, arrival=0.0)], [])


def test_a_reader_that_waits_gets_tokens_in_the_moment_they_come() -> None:
    async def run() -> None:
        collector, had = stream(), list[int]()

        def on_delta(index: int, delta: SequenceDelta) -> bool:
            had.extend(delta.tokens)
            return len(had) < 3

        collector.put(7, SequenceDelta([1]))
        assert [delta.tokens for _, delta in await collector.read(on_delta)] == [[1]]
        reading = asyncio.ensure_future(collector.read(on_delta))
        await asyncio.sleep(0)
        for token in (2, 3, 4):
            collector.put(7, SequenceDelta([token]))
        assert had == [2, 3, 4]  # without a turn of the loop
        collector.put(7, SequenceDelta([5]))  # the reader can take no more: it is kept, and joined with what follows
        collector.put(7, SequenceDelta([6]))
        assert [delta.tokens for _, delta in await reading] == [[5, 6]]
        assert had == [2, 3, 4]

    asyncio.run(run())


def test_what_a_reader_raises_is_its_own() -> None:
    async def run() -> None:
        collector = stream()

        def on_delta(index: int, delta: SequenceDelta) -> bool:
            raise LookupError("broken reader")

        reading = asyncio.ensure_future(collector.read(on_delta))
        await asyncio.sleep(0)
        collector.put(7, SequenceDelta([1]))  # whoever puts does not see it
        with pytest.raises(LookupError):
            await reading

    asyncio.run(run())


def test_a_failed_request_hands_nothing_over() -> None:
    async def run() -> None:
        collector, had = stream(), list[int]()
        reading = asyncio.ensure_future(collector.read(lambda index, delta: bool(had.append(index)) or True))
        await asyncio.sleep(0)
        collector.fail(GenerationError("it failed"))
        collector.put(7, SequenceDelta([1]))
        with pytest.raises(GenerationError):
            await reading
        assert had == []

    asyncio.run(run())
