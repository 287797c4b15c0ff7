"""Models with longrope: a request that grows beyond the original length is computed again, exactly there."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quire.foundation.clock import SystemClock
from quire.scheduling.kvcache.block_pool import BlockPool
from quire.scheduling.kvcache.host_pool import HostPool
from quire.scheduling.kvcache.rope_length_mode import RopeLengthMode
from quire.scheduling.scheduler.preemption import Preemption
from quire.scheduling.scheduler.scheduler import Scheduler
from quire.scheduling.scheduler.token_budget import TokenBudget
from tests.engine.harness import add, alone, drafts_of
from tests.executor.fake import FakeExecutor

ORIGINAL = 24


class LongRopeExecutor(FakeExecutor):
    """Insists that no key beyond the original length is rotated for a shorter one."""

    def _write(self, slot: Any, position: int, token: int) -> None:
        assert position < ORIGINAL or slot.owner.rope_length > ORIGINAL, "a key with the wrong factors"
        super()._write(slot, position, token)


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("blocks", [60, 14])
def test_requests_are_computed_again_at_the_rope_switch(max_in_flight: int, mode: Any, blocks: int) -> None:
    rng, pool, host = random.Random(blocks), BlockPool(blocks, 4), HostPool(blocks)
    executor = LongRopeExecutor(
        blocks, 4, num_host_blocks=blocks, accept=lambda most: rng.randint(most == 1, most), max_in_flight=max_in_flight
    )
    mode_of_rope = RopeLengthMode(ORIGINAL, "longrope")
    scheduler = Scheduler(
        pool, 4, TokenBudget(32), Preemption(host, mode), SystemClock(),
        rope_length_mode=mode_of_rope, max_drafts=drafts_of,
    )  # fmt: skip
    prompts = {
        number: [rng.randrange(512) for _ in range(rng.choice([3, 9, 20, 23, 24, 25, 30]))] for number in range(12)
    }
    for number, prompt in prompts.items():
        scheduler.add(add(number, prompt, 20, extra_args={"drafts": number % 4}))
    got: dict[int, list[int]] = {number: [] for number in prompts}
    over: dict[int, tuple[int, int]] = {}
    drafts_planned = 0
    while scheduler.has_work:
        while scheduler.steps_in_flight < max_in_flight and (plan := scheduler.plan()):
            executor.submit(plan)
            drafts_planned += sum(plan.drafts)
        result = executor.collect(None)
        assert result is not None
        outputs = scheduler.process_result(result)
        tokens = iter(outputs.tokens)
        for number, count in zip(outputs.ids, outputs.counts, strict=True):
            got[number] += [next(tokens) for _ in range(count)]
        for request in outputs.ended:
            over[request.id] = (request.rope_length, request.preemptions)
    assert got == {number: alone(prompt, 20) for number, prompt in prompts.items()}
    for number, (rope_length, preemptions) in over.items():
        length = len(prompts[number])
        assert (rope_length > ORIGINAL) == (length + 20 > ORIGINAL + 1), "the last token's key is never computed"
        assert preemptions >= (length <= ORIGINAL < length + 19)
        assert blocks < 60 or preemptions == (length <= ORIGINAL < length + 19)
    assert drafts_planned > 0
    assert pool.num_free == blocks
    assert host.num_free == blocks
