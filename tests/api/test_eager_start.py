"""A coroutine that is started without a task: what has run, and what is left."""

from __future__ import annotations

import asyncio

import pytest

from quire.serving.api.stream_response import start_eagerly


@pytest.mark.parametrize("waits", [0, 1, 2])
def test_a_coroutine_runs_up_to_its_first_suspension_and_the_rest_is_awaited(waits: int) -> None:
    async def run() -> None:
        gates = [asyncio.Event() for _ in range(waits)]
        done = list[str]()

        async def send() -> None:
            done.append("begun")
            for gate in gates:
                await gate.wait()
            done.append("ended")

        rest = start_eagerly(send())
        assert done == (["begun"] if waits else ["begun", "ended"])
        assert (rest is None) == (waits == 0)
        if rest is not None:
            for gate in gates:
                asyncio.get_running_loop().call_soon(gate.set)
            await rest
        assert done == ["begun", "ended"]

    asyncio.run(run())


def test_a_rest_that_is_cancelled_closes_the_coroutine() -> None:
    async def run() -> None:
        closed = list[bool]()

        async def send() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                closed.append(True)

        rest = start_eagerly(send())
        assert rest is not None
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await rest
        assert closed == [True]

    asyncio.run(run())
