"""A frame says what the engine holds: totals as /debug/counts does, and block by block over a few frames."""

from __future__ import annotations

from typing import Any

from quire.engine.commands import counts
from quire.engine.frames import (
    BLOCKS,
    FIRST_BLOCKS,
    LATE_S,
    MAX_RUNNING,
    MAX_WAITING,
    NEW_S,
    ROWS_A_STEP,
    TABLE_BLOCKS,
    EngineFrames,
)
from quire.engine.step_stats import StepStats
from quire.foundation.messages.from_engine import Done
from quire.foundation.messages.to_engine import CLIENT_SHIFT, NONE_SEEN, Control
from quire.scheduling.kvcache.block_pool import BlockPool
from quire.scheduling.kvcache.cache_groups import FULL_ATTENTION, CacheGroup, Window
from tests.engine.harness import Engine, add
from tests.executor.fake import FakeExecutor


class ManualClock:
    time = 100.0

    def now(self) -> float:
        return self.time


class Viewer:
    """Asks an engine for a new frame each time."""

    def __init__(self, engine: Engine) -> None:
        self.clock = ManualClock()
        self.scheduler = engine.client._core._scheduler
        self.steps = StepStats()
        self.frames = EngineFrames(self.scheduler, self.steps, self.clock, counts)

    def frame(self) -> dict[str, Any]:
        self.clock.time += LATE_S
        return self.frames.frame(seen=0)


def states_of(frame: dict[str, Any]) -> str:
    first, states = frame["blocks"]
    assert first == 1
    return str(states)


def test_totals_are_those_of_the_counts() -> None:
    engine = Engine(max_num_seqs=2)
    for number in range(3):
        engine.client.send(add(number, range(20 + number), 30))
    engine.step()
    engine.client.send(Control(7, "frame"))
    while not isinstance(done := engine.client.receive(0), Done):
        pass
    frame = done.value
    now = engine.client.counts()
    assert frame["counts"] == {**now, "in_flight": frame["counts"]["in_flight"]}
    assert frame["running"]["id"] == [0, 1]
    assert frame["running"]["prompt"] == [20, 21]
    assert frame["running"]["limit"] == [50, 51]
    assert frame["waiting"]["id"] == [2]
    assert all(20 <= known <= 24 for known in frame["running"]["known"])


def test_each_of_two_clients_that_ask_in_turn_sees_all_blocks() -> None:
    """As API processes do whose pages look at the same engine."""
    engine = Engine(FakeExecutor(num_blocks=2 * BLOCKS))
    clock = engine.client._core._clock = ManualClock()  # type: ignore[assignment]
    seen: dict[int, set[int]] = {1: set(), 2: set()}
    for _ in range(4):
        for client in seen:
            clock.time += LATE_S
            engine.client.send(Control(client << CLIENT_SHIFT | 1, "frame"))
            while not isinstance(done := engine.client.receive(0), Done):
                pass
            seen[client].add(done.value["blocks"][0])
    assert seen == {1: {1, 1 + BLOCKS}, 2: {1, 1 + BLOCKS}}


def test_who_has_seen_nothing_gets_the_map_at_once() -> None:
    viewer = Viewer(Engine(FakeExecutor(num_blocks=FIRST_BLOCKS + 5)))
    for _ in range(3):
        viewer.frame()
    first, letters = viewer.frames.frame(seen=NONE_SEEN)["blocks"]
    assert (first, len(letters)) == (1, FIRST_BLOCKS)
    first, letters = viewer.frame()["blocks"]
    assert (first, len(letters)) == (1 + FIRST_BLOCKS, 5)


def test_each_block_is_free_held_shared_or_cached() -> None:
    engine = Engine(FakeExecutor(num_blocks=64), max_num_seqs=4)
    prompt = list(range(33))  # two full blocks, which are cached, and a third one
    engine.run([add(1, prompt, 1)])
    states = states_of(Viewer(engine).frame())
    assert states.count("c") == 2
    assert states.count(".") == 62
    for number in (2, 3):
        engine.client.send(add(number, prompt, 200))
    engine.step()
    engine.step()
    frame = Viewer(engine).frame()
    states = states_of(frame)
    assert states.count("S") == 2
    held = sum(state in "hHsS" for state in states)
    assert held == frame["counts"]["blocks"] - frame["counts"]["free_blocks"] >= 4
    tables = {number: blocks for number, _, blocks in frame["tables"]}
    assert tables.keys() == {2, 3}
    assert {block for blocks in tables.values() for block in blocks} == {
        block for block, state in enumerate(states, start=1) if state in "hHsS"
    }
    assert set(tables[2]) & set(tables[3]) == {block for block, state in enumerate(states, start=1) if state == "S"}


def test_more_blocks_and_tables_than_a_frame_has_come_one_part_after_the_other() -> None:
    blocks = 2 * BLOCKS + 10
    groups = (*FULL_ATTENTION, CacheGroup(reach=Window(64)))
    engine = Engine(
        FakeExecutor(num_blocks=blocks, groups=groups), groups, max_model_len=4096, max_num_batched_tokens=8192
    )
    for number in range(1, 6):
        engine.client.send(add(number, [number] * 16 * 200, 50))
    for _ in range(20):
        engine.step()
    assert engine.outcome.tokens
    states: dict[int, str] = {}
    owned: dict[int, set[int]] = {}
    sizes = set()
    viewer = Viewer(engine)
    for _ in range(4):
        frame = viewer.frame()
        first, letters = frame["blocks"]
        sizes.add(len(letters))
        states.update(enumerate(letters, start=first))
        assert sum(len(part) for _, _, part in frame["tables"]) <= TABLE_BLOCKS
        for number, _, part in frame["tables"]:
            owned.setdefault(number, set()).update(part)
    assert sizes == {BLOCKS, 10}
    assert states.keys() == set(range(1, blocks + 1))
    running = frame["running"]["id"]
    assert len(running) >= 2
    for request in viewer.scheduler.running:
        held = {block for group in request.table._blocks for block in group if block}
        assert len(held - owned[request.id]) <= 8  # what it got since its part was sent


def test_a_frame_is_bounded() -> None:
    engine = Engine(FakeExecutor(num_blocks=4096), max_num_seqs=300, max_num_batched_tokens=2048)
    for number in range(400):
        engine.client.send(add(number, [1, 2, 3], 100))
    for _ in range(12):
        engine.step()
    viewer = Viewer(engine)
    first = viewer.frame()
    assert len(first["running"]["id"]) == MAX_RUNNING
    assert len(first["waiting"]["id"]) == MAX_WAITING


def test_states_end_with_the_pool() -> None:
    pool = BlockPool(5, 16)
    taken = pool.allocate(2)
    assert taken is not None
    pool.share(taken[:1])
    assert pool.states(1, 100) == "sh..."
    assert pool.states(4, 100) == ".."


def test_many_rows_make_frames_rare_and_a_slow_step_does_not_stop_them() -> None:
    engine = Engine(FakeExecutor(num_blocks=256), max_num_seqs=64, max_num_batched_tokens=256)
    viewer = Viewer(engine)
    frames, clock = viewer.frames, viewer.clock
    idle = viewer.frame()
    assert frames.frame(idle["number"]) == {"number": idle["number"]}  # seen already
    for number in range(64):
        engine.client.send(add(number, [1, 2, 3], 100))
    for _ in range(6):
        engine.step()
    clock.time += NEW_S
    for step in range(1, 64 // ROWS_A_STEP):
        viewer.steps.last_step = step
        assert frames.frame(0) is idle
    viewer.steps.last_step = 64 // ROWS_A_STEP
    busy = frames.frame(0)
    assert busy["number"] == idle["number"] + 1
    clock.time += NEW_S / 2
    viewer.steps.last_step = 100
    assert frames.frame(0) is busy
    clock.time += LATE_S
    viewer.steps.last_step = busy["step"]
    assert frames.frame(0) is not busy


def test_a_block_may_have_very_many_holders() -> None:
    pool = BlockPool(3, 16)
    (block,) = pool.allocate(1) or [0]
    for _ in range(300):
        pool.share([block])
    assert pool.states(1, 3) == "s.."
    pool.cache_block(block, (0, b"key"))
    assert pool.states(1, 3) == "S.."
