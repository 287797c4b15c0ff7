"""Models whose keys all turn into others beyond a length: a request that grows beyond it starts over, just there."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quire.clock import SystemClock
from quire.executor.fake import FakeExecutor
from quire.kvcache.host import HostPool
from quire.kvcache.keys import KeysByLength
from quire.kvcache.pool import BlockPool
from quire.scheduler.budget import Budget
from quire.scheduler.preempt import Preemption
from quire.scheduler.scheduler import Scheduler
from tests.engine.harness import add, alone, drafts_of

ORIGINAL = 24


class TurningExecutor(FakeExecutor):
    """Insists that no key beyond the length belongs to a sequence that counts as shorter, and no turned one to a
    sequence that was not longer when it was admitted."""

    def _write(self, slot: Any, position: int, token: int) -> None:
        assert position < ORIGINAL or slot.owner.rope_length > ORIGINAL, "an old key beyond the length"
        super()._write(slot, position, token)


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("blocks", [60, 14])
def test_requests_start_over_where_their_keys_turn(max_in_flight: int, mode: Any, blocks: int) -> None:
    rng, pool, host = random.Random(blocks), BlockPool(blocks, 4), HostPool(blocks)
    executor = TurningExecutor(
        blocks, 4, num_host_blocks=blocks, accept=lambda most: rng.randint(most == 1, most), max_in_flight=max_in_flight
    )
    keys = KeysByLength(ORIGINAL, "turn")
    scheduler = Scheduler(
        pool, 4, Budget(32), Preemption(host, mode), SystemClock(), keys=keys, drafts=drafts_of
    )  # fmt: skip
    prompts = {
        number: [rng.randrange(512) for _ in range(rng.choice([3, 9, 20, 23, 24, 25, 30]))] for number in range(12)
    }
    for number, prompt in prompts.items():
        scheduler.add(add(number, prompt, 20, extra_args={"drafts": number % 4}))
    got: dict[int, list[int]] = {number: [] for number in prompts}
    over: dict[int, tuple[int, int]] = {}
    guesses_beyond = 0
    while scheduler.has_work:
        while scheduler.in_flight < max_in_flight and (plan := scheduler.plan()):
            executor.submit(plan)
            guesses_beyond += sum(plan.drafts)
        result = executor.collect(None)
        assert result is not None
        settled = scheduler.settle(result)
        tokens = iter(settled.tokens)
        for number, count in zip(settled.ids, settled.counts, strict=True):
            got[number] += [next(tokens) for _ in range(count)]
        for request in settled.ended:
            over[request.id] = (request.counts_as, request.preemptions)
    assert got == {number: alone(prompt, 20) for number, prompt in prompts.items()}
    for number, (counts_as, preemptions) in over.items():
        length = len(prompts[number])
        assert (counts_as > ORIGINAL) == (length + 20 > ORIGINAL + 1), "the last token's key is never computed"
        assert preemptions >= (length <= ORIGINAL < length + 19)
        assert blocks < 60 or preemptions == (length <= ORIGINAL < length + 19)
    assert guesses_beyond > 0
    assert pool.num_free == blocks
    assert host.num_free == blocks
