"""The way past the inbox: what comes while its reader waits is handed over at once, in order, and nothing is lost."""

from __future__ import annotations

import asyncio

import pytest

from quire.api.delivery import _begin
from quire.api.request_stream import RequestStream
from quire.errors import GenerationError
from quire.messages import Add
from quire.sampling import SamplingParams
from quire.text.choice import Delta


def stream() -> RequestStream:
    return RequestStream([Add(7, [1], 1, SamplingParams(max_tokens=9), [], seed=0, arrival=0.0)], [])


def test_a_reader_that_waits_gets_tokens_in_the_moment_they_come() -> None:
    async def run() -> None:
        inbox, had = stream(), list[int]()

        def at_once(index: int, delta: Delta) -> bool:
            had.extend(delta.tokens)
            return len(had) < 3

        inbox.put(7, Delta([1]))
        assert [delta.tokens for _, delta in await inbox.read(at_once)] == [[1]]
        reading = asyncio.ensure_future(inbox.read(at_once))
        await asyncio.sleep(0)
        for token in (2, 3, 4):
            inbox.put(7, Delta([token]))
        assert had == [2, 3, 4]  # without a turn of the loop
        inbox.put(7, Delta([5]))  # the reader can take no more: it is kept, and joined with what follows
        inbox.put(7, Delta([6]))
        assert [delta.tokens for _, delta in await reading] == [[5, 6]]
        assert had == [2, 3, 4]

    asyncio.run(run())


def test_what_a_reader_raises_is_its_own() -> None:
    async def run() -> None:
        inbox = stream()

        def at_once(index: int, delta: Delta) -> bool:
            raise LookupError("broken reader")

        reading = asyncio.ensure_future(inbox.read(at_once))
        await asyncio.sleep(0)
        inbox.put(7, Delta([1]))  # whoever puts does not see it
        with pytest.raises(LookupError):
            await reading

    asyncio.run(run())


def test_a_failed_request_hands_nothing_over() -> None:
    async def run() -> None:
        inbox, had = stream(), list[int]()
        reading = asyncio.ensure_future(inbox.read(lambda index, delta: bool(had.append(index)) or True))
        await asyncio.sleep(0)
        inbox.fail(GenerationError("it failed"))
        inbox.put(7, Delta([1]))
        with pytest.raises(GenerationError):
            await reading
        assert had == []

    asyncio.run(run())


@pytest.mark.parametrize("waits", [0, 1, 2])
def test_a_write_is_begun_at_once_and_finished_by_whoever_waits_for_it(waits: int) -> None:
    async def run() -> None:
        gates = [asyncio.Event() for _ in range(waits)]
        done = list[str]()

        async def send() -> None:
            done.append("begun")
            for gate in gates:
                await gate.wait()
            done.append("ended")

        rest = _begin(send())
        assert done == (["begun"] if waits else ["begun", "ended"])
        assert (rest is None) == (waits == 0)
        if rest is not None:
            for gate in gates:
                asyncio.get_running_loop().call_soon(gate.set)
            await rest
        assert done == ["begun", "ended"]

    asyncio.run(run())


def test_a_write_that_is_given_up_is_closed() -> None:
    async def run() -> None:
        closed = list[bool]()

        async def send() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                closed.append(True)

        rest = _begin(send())
        assert rest is not None
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await rest
        assert closed == [True]

    asyncio.run(run())
