"""What is kept of an open sequence is what the engine has sent of it."""

from __future__ import annotations

import asyncio

from quire.foundation.messages.from_engine import End
from quire.foundation.messages.workers import TokenLogprobs
from quire.serving.api.session.open_requests import OpenRequests
from quire.serving.api.session.output_collector import OutputCollector
from quire.text.deltas import SequenceDelta
from tests.engine.harness import add


def test_parts_of_a_request_are_one_request() -> None:
    async def run() -> None:
        requests = OpenRequests()
        first = OutputCollector(add(7, [1], 9).sequences(), [])
        second = OutputCollector(add(8, [1], 9).sequences(), [], part_of=first)
        for collector in (first, second, OutputCollector(add(9, [1], 9).sequences(), [])):
            requests.add(collector, [0])
        assert (requests.num_requests, len(requests.collectors())) == (2, 3)
        requests.remove(7)
        assert requests.num_requests == 2
        requests.remove(8)
        assert requests.num_requests == 1

    asyncio.run(run())


def test_a_sequence_keeps_what_it_has_brought_until_it_ends() -> None:
    async def run() -> None:
        requests = OpenRequests()
        message = add(7, [1, 2, 3], 9, forks=[8])
        requests.add(OutputCollector(message.sequences(), []), [0, 0])
        first, second = requests.get(7), requests.get(8)
        assert first is not None
        assert second is not None
        logprobs = [TokenLogprobs(-1.0, 1, [], [])]
        first.record(SequenceDelta(prompt_logprobs=logprobs * 2))
        first.record(SequenceDelta([70, 71]))
        first.record(SequenceDelta([72], end=End(7, "stop")))
        assert (list(first.generated), first.num_prompt_logprobs) == ([70, 71, 72], 2)
        assert (list(second.generated), second.add.fork_of) == ([], 7)
        requests.remove(7)
        assert (requests.get(7), requests.num_sequences, len(requests.collectors())) == (None, 1, 1)
        assert requests.num_requests == 1
        waiting = asyncio.ensure_future(requests.wait_idle())
        await asyncio.sleep(0)
        assert not waiting.done()
        requests.remove(8)
        await waiting
        assert requests.num_requests == 0

    asyncio.run(run())
