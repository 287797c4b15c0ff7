"""When a request is turned away, and when it may come back."""

from __future__ import annotations

from typing import Any

import pytest

from quire.engine.metrics.stats import Limit
from quire.errors import OverloadedError
from quire.foundation.config import SchedulerConfig
from quire.foundation.messages.from_engine import Load
from quire.foundation.messages.to_engine import Add
from quire.serving.api.session.queues import AdmissionLimit, EngineQueue, QueueLimits
from tests.engine.harness import add
from tests.engine.test_client_liveness import ManualClock

RATE = 1_000.0


class Stage:
    """A limit, and an engine that is told nothing by itself."""

    def __init__(self, requests: int | None = None, tokens: int | None = None, seconds: float = 30.0) -> None:
        self.rejections: dict[Limit, int] = {"requests": 0, "tokens": 0}
        self.queue = EngineQueue(slots=4)
        self.clock = ManualClock()
        limits = QueueLimits(requests, tokens, seconds, overload_seconds=1.0, slots=4)
        self.limit = AdmissionLimit(limits, [self.queue], self.rejections, self.clock, lambda: self.last)
        self.last = 0

    def load(self, **load: Any) -> None:
        """The engine has seen everything, and says this."""
        self.queue.observe(Load(**{"running": 4, "tokens_per_s": RATE, "expected_output": 100.0, **load}), self.last)

    def send(
        self, prompt: int = 400, output: int = 100, forks: int = 0, tenant: str = "", **sampling: Any
    ) -> list[int]:
        """A request of one prompt; its sequences."""
        first = self.last + 1
        self.last += 1 + forks
        message = add(first, [1] * prompt, output, forks=range(first + 1, self.last + 1), tenant=tenant, **sampling)
        self.enter(message)
        return [sequence.id for sequence in message.sequences()]

    def enter(self, message: Add) -> None:
        """A request of one prompt."""
        self.limit.enter(message.sequences())
        self.queue.expect(message)

    def fill(self, most: int = 10_000, **request: Any) -> int:
        """How many requests are let in."""
        for number in range(most):
            try:
                self.send(**request)
            except OverloadedError:
                return number
        return most


def test_the_default_limit_is_what_is_worked_off_in_30_seconds() -> None:
    stage = Stage()
    stage.load()
    assert stage.fill() == 30 * RATE / 500
    assert stage.rejections == {"requests": 0, "tokens": 1}


def test_without_any_knowledge_of_the_speed_nobody_is_turned_away() -> None:
    stage = Stage()
    stage.load(tokens_per_s=0.0)
    assert stage.fill(2_000) == 2_000


def test_retry_after_is_the_queue_over_the_rate() -> None:
    stage = Stage(tokens=10)
    stage.load(waiting=20, queued_tokens=7_100)
    with pytest.raises(OverloadedError) as refused:
        stage.send()
    assert refused.value.retry_after_s == 8
    assert (refused.value.status, refused.value.type) == (429, "rate_limit_error")


def test_what_was_sent_since_the_last_news_counts() -> None:
    stage = Stage(tokens=1_500)
    stage.load()
    assert stage.fill() == 3
    stage.load(waiting=1, queued_tokens=500)
    assert stage.fill() == 2, "the engine has begun two of them"


def test_news_from_before_a_request_does_not_make_it_forgotten() -> None:
    stage = Stage(tokens=1_500)
    stage.load()
    assert stage.fill() == 3
    stage.queue.observe(Load(running=4, tokens_per_s=RATE, expected_output=100.0), last_add=1)
    assert stage.fill() == 1


def test_sequences_are_counted_one_by_one() -> None:
    stage = Stage(requests=10)
    stage.load()
    stage.send(forks=6)
    with pytest.raises(OverloadedError):
        stage.send(forks=3)
    stage.send(forks=2)
    assert stage.rejections == {"requests": 1, "tokens": 0}


def test_free_slots_are_no_queue() -> None:
    stage = Stage(requests=1)
    stage.load(running=1)
    assert stage.fill() == 3 + 1


def test_n_and_log_probabilities_are_charged() -> None:
    stage = Stage(tokens=10**9)
    stage.load()

    def charge(**request: Any) -> int:
        before = stage.limit.tokens
        stage.send(**request)
        return stage.limit.tokens - before

    assert charge() == 400 + 100
    assert charge(output=20) == 400 + 20
    assert charge(output=5_000) == 400 + 100, "outputs are as long as usual"
    assert charge(forks=3) == 400 + 100 + 3 * (1 + 100), "forks share the prompt"
    assert charge(logprobs=0) == 400 + 2 * 100
    assert charge(prompt_logprobs=5) == 2 * 400 + 100


def test_a_request_that_meets_no_queue_is_let_in_whatever_it_costs() -> None:
    stage = Stage(tokens=100)
    stage.load()
    stage.send(prompt=5_000)
    with pytest.raises(OverloadedError):
        stage.send(prompt=1, output=1)


def test_a_refused_request_leaves_nothing_behind() -> None:
    stage = Stage(tokens=1_000)
    stage.load()
    assert stage.fill() == 2
    before = stage.limit.tokens, stage.limit.sequences
    for _ in range(5):
        with pytest.raises(OverloadedError):
            stage.send(forks=4)
    assert (stage.limit.tokens, stage.limit.sequences) == before


def test_the_tenants_of_a_queue_share_its_limit() -> None:
    """Who of them is next is for the engine to say."""
    stage = Stage(tokens=10_000)
    stage.load()
    assert stage.fill(tenant="flood") == 20
    assert stage.fill(tenant="light") == 0


def test_what_other_processes_have_sent_is_in_the_queue_as_well() -> None:
    stage = Stage(tokens=10_000)
    stage.load(waiting=18, queued_tokens=9_000)
    assert stage.fill() == 2


def test_the_last_id_of_an_add_is_its_last_forks() -> None:
    message: Add = add(7, [1], 5, forks=[8, 9])
    assert (message.last_id, add(7, [1], 5).last_id) == (9, 7)


def test_a_full_queue_is_known_before_a_request_is() -> None:
    stage = Stage(tokens=16_000)
    stage.load(waiting=1, queued_tokens=100)
    stage.limit.refuse_if_full()
    stage.fill()
    with pytest.raises(OverloadedError):
        stage.limit.refuse_if_full()


def test_a_queue_with_room_for_a_usual_request_is_not_full() -> None:
    stage = Stage(tokens=160_000)
    stage.load(waiting=1, queued_tokens=100)
    stage.fill(most=60)
    usual = stage.limit._usual_tokens
    assert 400 < usual < 500
    stage.load(waiting=60, queued_tokens=int(160_000 - 1.1 * usual))
    stage.limit.refuse_if_full()
    stage.load(waiting=60, queued_tokens=int(160_000 - 0.9 * usual))
    with pytest.raises(OverloadedError):
        stage.limit.refuse_if_full()


def test_large_requests_do_not_make_a_half_empty_queue_full() -> None:
    stage = Stage(tokens=1_600)
    stage.load()
    stage.send(prompt=9_000)
    stage.load(waiting=1, queued_tokens=1_400)
    stage.limit.refuse_if_full()
    stage.load(waiting=1, queued_tokens=1_550)
    with pytest.raises(OverloadedError):
        stage.limit.refuse_if_full()


def test_what_the_engine_begins_at_once_is_no_queue_before_it_says_so() -> None:
    room = {"running": 1, "num_blocks": 100, "free_blocks": 100, "block_size": 16}

    def let_in(**load: Any) -> int:
        stage = Stage(tokens=100)
        stage.load(**{**room, **load})
        return stage.fill()

    assert let_in() == 3 + 1, "into three slots, and one that meets no queue"
    assert let_in(free_blocks=70) == 2 + 1, "1,120 tokens have room"
    assert let_in(free_blocks=40) == 1 + 1
    assert let_in(paused=True) == let_in(waiting=1) == let_in(running=4) == 1


def test_who_sets_the_queue_s_time_has_said_how_long_requests_may_wait() -> None:
    assert QueueLimits.of(SchedulerConfig()).overload_seconds == 1
    assert QueueLimits.of(SchedulerConfig(max_queue_time=60.0)).overload_seconds == 60
    assert QueueLimits.of(SchedulerConfig(max_queue_time=60.0, overload_queue_time=2.0)).overload_seconds == 2
