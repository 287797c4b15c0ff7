"""The simulation finds what it is for: each of these bugs, planted in the product's code, within a few seeds."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from quire.engine.client import Lost
from quire.engine.core import EngineCore
from quire.engine.outbox import Outbox
from quire.foundation.messages.from_engine import Deltas, End, FromEngine
from quire.foundation.messages.to_engine import Add
from quire.scheduling.kvcache.block_pool import DUMMY_BLOCK
from quire.scheduling.kvcache.block_table import BlockTable
from quire.scheduling.kvcache.cache_groups import CacheGroup
from quire.scheduling.kvcache.host_tier import HostTier
from quire.scheduling.scheduler.request import Request
from quire.scheduling.scheduler.scheduler import Scheduler
from quire.scheduling.scheduler.sequence_states import SequenceStates
from quire.scheduling.scheduler.step import Step
from quire.scheduling.scheduler.tenant_queue import KeyHeap
from quire.scheduling.scheduler.waiting_queue import WaitingQueue
from quire.serving.api.session import engines, open_requests
from quire.serving.api.session.connection import EngineConnection
from quire.serving.api.session.open_requests import OpenRequests, OpenSequence
from quire.serving.api.session.output_collector import OutputCollector
from quire.serving.api.session.queues import AdmissionLimit
from tests.simulation import simulation
from tests.simulation.settings import Settings, settings_of
from tests.simulation.simulation import simulate
from tests.simulation.world import SimulationError

SEEDS = 30
STEPS = 300


def first_violation(*faults: str) -> str:
    """What the first of the seeds that shows the bug says; empty if none does."""
    for seed in range(SEEDS):
        try:
            simulate(seed, STEPS, faults or None)
        except SimulationError as error:
            return str(error).split("\n\n")[0]
    return ""


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces an attribute by what a function makes of it."""

    def replace_by(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        monkeypatch.setattr(owner, name, make(getattr(owner, name)))

    return replace_by


def test_a_double_free_is_found(plant: Callable[..., None]) -> None:
    def make(free: Callable[[BlockTable], None]) -> Callable[[BlockTable], None]:
        def free_twice(table: BlockTable) -> None:
            pool = table._pool
            shared = [b for blocks in table._blocks for b in blocks if b > DUMMY_BLOCK and pool.is_shared(b)]
            free(table)
            pool.free(shared[:1])  # its other holder loses it

        return free_twice

    plant(BlockTable, "free", make)
    assert "references and" in first_violation()


def test_a_block_that_is_still_seen_and_freed_is_found(plant: Callable[..., None]) -> None:
    """A window or a chunk ends a block too early."""

    def make(free: Callable[[BlockTable, int], None]) -> Callable[[BlockTable, int], None]:
        return lambda table, position: free(table, position + table._pool.block_size)

    plant(BlockTable, "free_out_of_window", make)
    found = first_violation()
    assert "was read before it was written" in found or "hold different histories" in found, found


@pytest.fixture
def with_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models with states, much traffic, few blocks, and no faults."""

    def settings(rng: random.Random) -> Settings:
        made = settings_of(rng)
        config = made.config.with_values(max_num_seqs=4, enable_prefix_caching=True, preemption_mode="swap")
        config = dataclasses.replace(config, cache=dataclasses.replace(config.cache, block_size=4, mamba_block_size=4))
        return dataclasses.replace(
            made, config=config, num_states=24, num_blocks=40, num_host_blocks=200, features={"choices"}, faults=(),
            arrival_s=0.003, groups=[CacheGroup()],
        )  # fmt: skip

    monkeypatch.setattr(simulation, "settings_of", settings)


@pytest.mark.usefixtures("with_states")
def test_a_stale_state_is_found(plant: Callable[..., None]) -> None:
    """A new sequence goes on with what the last owner of its state left."""

    def make(admit: Any) -> Any:
        def keep_the_old(states: SequenceStates, request: Request, step: Step) -> None:
            admit(states, request, step)
            step.state_loads = [(source, target) for source, target in step.state_loads if source]

        return keep_the_old

    plant(SequenceStates, "admit", make)
    assert "got" in (found := first_violation()), found


@pytest.mark.usefixtures("with_states")
def test_the_state_of_another_sequence_is_found(plant: Callable[..., None]) -> None:
    """Two checkpoints of a step are copies of each other's states."""

    def make(moved: Any) -> Any:
        def swap(states: SequenceStates, *args: Any) -> None:
            moved(states, *args)
            saves = args[2].state_saves
            if len(saves) > 1:
                (first, a), (second, b) = saves[-2:]
                saves[-2:] = [(second, a), (first, b)]

        return swap

    plant(SequenceStates, "moved", make)
    assert "got" in (found := first_violation()), found


@pytest.mark.usefixtures("with_states")
def test_a_state_that_a_swapped_request_loses_is_found(plant: Callable[..., None]) -> None:
    """Its state is given back while its blocks are on the host."""

    def make(release: Any) -> Any:
        def forget(states: SequenceStates, request: Request) -> None:
            swapped, request.swapped = request.swapped, False
            release(states, request)
            request.swapped = swapped

        return forget

    plant(SequenceStates, "release", make)
    assert "its state is missing" in first_violation()


def test_a_block_that_never_came_to_the_host_is_found(
    plant: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefix cache's tier believes in copies that no plan has made."""

    def tiered(rng: random.Random) -> Settings:
        made = settings_of(rng)
        cache = dataclasses.replace(made.config.cache, kv_offloading_size=1.0, enable_prefix_caching=True)
        return dataclasses.replace(
            made, config=dataclasses.replace(made.config, cache=cache), num_blocks=24, num_host_blocks=200,
            arrival_s=0.003, faults=(),
        )  # fmt: skip

    monkeypatch.setattr(simulation, "settings_of", tiered)
    plant(HostTier, "end_step", lambda end_step: lambda tier: end_step(tier)[:0])
    assert first_violation()


def test_a_wake_up_that_the_queue_loses_is_found(plant: Callable[..., None]) -> None:
    """Requests that were passed over are not looked at again."""
    plant(KeyHeap, "restore_skipped", lambda original: lambda order: order._skipped.clear())
    assert "has brought nothing" in (found := first_violation()) or "not ended" in found


def test_a_wake_up_that_a_grammar_loses_is_found(plant: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a request awaits has come, and nobody notices."""

    def forget(queue: WaitingQueue, request: Request) -> None:
        queue.refresh(request)

    def constrained(rng: random.Random) -> Settings:
        """Little traffic with grammars, and no faults: anything else that happens wakes the request too."""
        return dataclasses.replace(settings_of(rng), features={"grammars"}, arrival_s=0.1, faults=())

    monkeypatch.setattr(simulation, "settings_of", constrained)
    plant(WaitingQueue, "release", lambda original: forget)
    found = first_violation()
    assert any(said in found for said in ("has brought nothing", "not ended", "it was stuck")), found


def test_a_loop_that_sleeps_beside_its_work_is_found(plant: Callable[..., None]) -> None:
    """It goes on with the next message or heartbeat only."""
    plant(EngineCore, "_idle_wait", lambda original: lambda core, wait: wait)
    assert "has brought nothing" in first_violation()


def test_a_stale_token_is_found(plant: Callable[..., None]) -> None:
    """What a dead engine says late is believed."""

    def make(on_message: Any) -> Any:
        def believe(connection: EngineConnection, message: FromEngine | Lost) -> None:
            if isinstance(message, Deltas) and message.source != connection.engine:
                message = replace(message, source=connection.engine, ends=[])
            on_message(connection, message)

        return believe

    plant(EngineConnection, "_on_message", make)
    assert "got tokens" in first_violation("engine killed in a turn", "network slow")


def test_a_request_that_is_lost_at_a_replay_is_found(plant: Callable[..., None]) -> None:
    def make(unsent: Any) -> Any:
        def all_but_one(requests: OpenRequests, engine: int) -> list[OpenSequence]:
            found: list[OpenSequence] = unsent(requests, engine)
            return found[:-1] if len(found) > 1 else found

        return all_but_one

    plant(OpenRequests, "unsent", make)
    assert "not ended" in first_violation()


def test_a_choice_that_is_lost_at_a_replay_is_found(plant: Callable[..., None]) -> None:
    """It counts as sent, and the next engine never hears of it."""

    def make(replay_add: Any) -> Any:
        return lambda sequences: replace(replay_add(sequences), forks=[])

    plant(open_requests, "_replay_add", make)
    assert "lost: [" in first_violation()


def test_a_token_that_comes_twice_after_a_replay_is_found(plant: Callable[..., None]) -> None:
    def make(replay_add: Any) -> Any:
        def forget_the_last(sequences: list[OpenSequence]) -> Add:
            add: Add = replay_add(sequences)
            return replace(add, tokens=add.tokens[: max(add.prompt_len, len(add.tokens) - 1)])

        return forget_the_last

    plant(open_requests, "_replay_add", make)
    assert "got tokens" in first_violation()


def test_an_engine_that_does_not_hold_others_beside_what_runs_alone_is_found(
    plant: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def crowded(rng: random.Random) -> Settings:
        """Much traffic with poison, and no other faults."""
        settings = settings_of(rng)
        return dataclasses.replace(settings, features={"poison"}, arrival_s=0.003, max_open=30, faults=())

    monkeypatch.setattr(simulation, "settings_of", crowded)
    plant(Scheduler, "hold_all", lambda original: lambda scheduler, what: None)
    assert "is to run alone" in first_violation()


def test_an_innocent_request_that_is_blamed_is_found(plant: Callable[..., None]) -> None:
    """Whoever was in flight at two deaths fails, alone or not."""

    def make(engine_died: Any) -> Any:
        def blame(requests: OpenRequests, engine: int, in_flight: Sequence[int]) -> OutputCollector | None:
            engine_died(requests, engine, in_flight)
            found = [requests.get(number) for number in in_flight]
            return next((sequence.collector for sequence in found if sequence and sequence.deaths >= 2), None)

        return blame

    plant(engines, "engine_died", make)
    assert "is blamed" in first_violation("engine killed in a turn", "two deaths")


def test_a_second_last_message_is_found(plant: Callable[..., None]) -> None:
    def make(end: Callable[[Outbox, End], None]) -> Callable[[Outbox, End], None]:
        def end_twice(outbox: Outbox, last: End) -> None:
            end(outbox, last)
            end(outbox, last)

        return end_twice

    plant(Outbox, "end", make)
    assert "ends twice" in first_violation()


def test_a_queue_without_its_limit_is_found(plant: Callable[..., None]) -> None:
    plant(AdmissionLimit, "check", lambda original: lambda limit, sequences, tokens: None)
    assert "sequences wait, where" in first_violation()


def test_a_text_that_shares_a_prefix_it_must_not_is_found(plant: Callable[..., None]) -> None:
    plant(Request, "reads_cache", lambda original: property(lambda each: bool(each.pools) or original.fget(each)))
    assert "a text is not pooled from its beginning" in first_violation()
