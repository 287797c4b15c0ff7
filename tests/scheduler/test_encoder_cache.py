"""Images that steps compute and the worker keeps: never more of them at once than there is room for."""

from __future__ import annotations

import random
from collections import deque

from quire.foundation.messages.from_engine import MediaLoad
from quire.foundation.messages.to_engine import Add, MediaSpan, Medium
from quire.foundation.messages.workers import Plan, Result
from quire.sampling_params import SamplingParams
from quire.scheduling.kvcache.block_pool import BlockPool
from quire.scheduling.kvcache.host_pool import HostPool
from quire.scheduling.scheduler.encoder_cache import EncoderCache
from quire.scheduling.scheduler.preemption import Preemption
from quire.scheduling.scheduler.scheduler import Scheduler
from quire.scheduling.scheduler.token_budget import TokenBudget
from tests.engine.test_client_liveness import ManualClock

SIZE = 40
IMAGE = 7


class Worker:
    """Keeps what plans add and drop, as the worker does, and the scheduler that makes the plans."""

    def __init__(self, tokens: int = 32, blocks: int = 200, answers: int = 2) -> None:
        self.media = EncoderCache(SIZE)
        self.scheduler = Scheduler(
            BlockPool(blocks, 8), 16, TokenBudget(tokens), Preemption(HostPool(), "recompute"), ManualClock(),
            media=self.media,
        )  # fmt: skip
        self.kept: dict[bytes, int] = {}
        self.most = self.computed = 0
        self._answers = answers
        self._plans = deque[Plan]()
        self._ids = iter(range(1, 10_000))

    def add(self, *parts: int | Medium) -> None:
        """A prompt of so many tokens of text, and images."""
        tokens, spans = list[int](), list[MediaSpan]()
        for part in parts:
            if isinstance(part, Medium):
                spans.append(MediaSpan(len(tokens), part))
            tokens += [IMAGE] * part.count if isinstance(part, Medium) else range(100, 100 + part)
        params = SamplingParams(max_tokens=self._answers)
        self.scheduler.add(Add(next(self._ids), tokens, len(tokens), params, [], 0, 0.0, media=spans))

    def step(self) -> Plan | None:
        """The next step, done while one more is planned; all images that its rows need are there."""
        while len(self._plans) < 2 and (planned := self.scheduler.plan()) is not None:
            self._plans.append(planned)
        if not self._plans:
            return None
        plan = self._plans.popleft()
        for digest in plan.media_dropped:
            del self.kept[digest]
        for medium in plan.media_added:
            assert medium.digest not in self.kept
            self.kept[medium.digest] = medium.count
        self.computed += len(plan.media_added)
        self.most = max(self.most, sum(self.kept.values()))
        for row in plan.media_rows:
            for piece in row.pieces:
                assert piece.first + piece.count <= self.kept[piece.digest]
        self.scheduler.process_result(Result(plan.step, [1] * len(plan.sampled_rows), [5] * len(plan.sampled_rows)))
        return plan

    def finish(self) -> None:
        while self.scheduler.has_work:
            assert self.step() is not None


def image(number: int, count: int) -> Medium:
    return Medium(f"{number} {count}".encode(), 1, 1, count, b"")


def test_an_image_is_computed_once_while_it_is_kept() -> None:
    worker = Worker()
    first, large = image(1, 10), image(2, SIZE)
    for _ in range(3):
        worker.add(3, first, 9)
        worker.finish()
        worker.scheduler.reset_prefix_cache()
    assert (worker.computed, worker.media.load()) == (1, MediaLoad(3, 2))
    worker.add(large, 4)
    worker.finish()
    worker.add(3, first, 9)
    worker.finish()
    assert worker.computed == 3


def test_rows_that_begin_within_images_wait_for_room() -> None:
    """Of each of these prompts the prefix cache has all but the end of its image, which must be computed whole."""
    worker = Worker(tokens=64)
    prompts = [(image(number, 28), 2) for number in range(4)]
    for prompt in prompts:
        worker.add(*prompt)
        worker.finish()
    worker.add(image(9, SIZE), 2)
    worker.finish()
    before = worker.computed
    for prompt in prompts:
        worker.add(*prompt)
    plan = worker.step()
    assert plan is not None
    assert len(plan.media_added) == 1
    worker.finish()
    assert worker.computed == before + 4
    assert worker.most <= SIZE


def test_no_load_needs_more_than_there_is_room_for_and_all_ends() -> None:
    rng = random.Random(3)
    worker = Worker(tokens=24, blocks=40, answers=40)
    media = [image(number, rng.randint(1, SIZE)) for number in range(12)]
    for _ in range(150):
        for _ in range(rng.randint(0, 3)):
            worker.add(rng.randint(1, 9), *rng.choices(media, k=rng.randint(0, 3)), rng.randint(1, 9))
        worker.step()
    worker.finish()
    assert worker.most <= SIZE
    assert worker.scheduler.stats.preemptions
    assert worker.media.load().hits


def test_tokens_that_see_one_another_are_computed_in_one_step() -> None:
    worker = Worker(tokens=16)
    whole = Medium(b"whole", 1, 1, 12, b"", two_sided=True)
    worker.add(9, whole, 9)
    worker.add(3, whole, whole, 2)
    worker.add(14, image(1, 20), 3)
    pieces = []
    while worker.scheduler.has_work:
        plan = worker.step()
        assert plan is not None
        pieces += [piece for row in plan.media_rows for piece in row.pieces if piece.two_sided]
    assert [(piece.first, piece.count) for piece in pieces] == [(0, 12)] * 3
