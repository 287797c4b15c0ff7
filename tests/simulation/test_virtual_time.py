"""What the simulation stands on: virtual time, an event loop and threads in it, and sockets."""

from __future__ import annotations

import asyncio

import pytest

from tests.simulation.blocking import BlockingThread
from tests.simulation.event_loop import VirtualLoop
from tests.simulation.network import Network
from tests.simulation.world import World


def run(world: World, until: float) -> None:
    world.at(until, lambda: None)
    while world.now() < until and world.next():
        pass
    assert not world.problem, world.problem


def test_a_loop_sleeps_in_virtual_time() -> None:
    world, seen = World(1), list[tuple[str, float]]()
    loop = VirtualLoop(world, "a loop")

    async def wait_for(name: str, seconds: float) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), seconds)
        seen.append((name, world.now()))

    for name, seconds in (("late", 3600.0), ("soon", 0.5)):
        loop.create_task(wait_for(name, seconds))
    run(world, 10_000.0)
    assert seen == [("soon", 1_000.5), ("late", 4_600.0)]


def test_callbacks_run_in_the_order_in_which_they_were_called_for() -> None:
    world, seen = World(1), list[int]()
    loop = VirtualLoop(world, "a loop")
    for number in range(100):
        loop.call_soon_threadsafe(seen.append, number)
    run(world, 1_001.0)
    assert seen == list(range(100))


def test_a_loop_that_is_held_goes_on_later() -> None:
    world, seen = World(1), list[float]()
    loop = VirtualLoop(world, "a loop")
    loop.call_later(1.0, lambda: seen.append(world.now()))
    loop.held = True
    run(world, 1_005.0)
    assert seen == []
    loop.release()
    run(world, 1_006.0)
    assert seen == [1_005.0]


def test_a_dead_loop_unwinds_its_tasks_and_nothing_goes_on() -> None:
    world, seen = World(1), list[str]()
    loop = VirtualLoop(world, "a loop")

    async def work() -> None:
        try:
            await asyncio.sleep(1.0)
            seen.append("went on")
        finally:
            seen.append("unwound")

    loop.create_task(work())
    run(world, 1_000.5)
    loop.kill()
    run(world, 1_010.0)
    assert seen == ["unwound"]


def test_an_exception_in_a_callback_is_a_violation() -> None:
    world = World(1)
    loop = VirtualLoop(world, "a loop")
    loop.call_soon(lambda: 1 / 0)
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        run(world, 1_001.0)


def test_a_blocking_thread_waits_in_virtual_time_until_it_is_woken() -> None:
    world, seen = World(1), list[float]()

    def main() -> None:
        thread.sleep(2.0)
        seen.append(world.now())
        thread.wait(None)
        seen.append(world.now())
        thread.wait(5.0)
        seen.append(world.now())

    thread = BlockingThread(world, main)
    world.at(1_001.0, thread.wake)  # it sleeps, and goes on sleeping
    world.at(1_010.0, thread.wake)
    run(world, 1_100.0)
    assert seen == [1_002.0, 1_010.0, 1_015.0]


def test_a_thread_that_is_held_or_killed_gets_no_time() -> None:
    world, seen = World(1), list[str]()

    def main() -> None:
        try:
            for _ in range(3):
                thread.sleep(1.0)
                seen.append(f"{world.now():g}")
        finally:
            seen.append("unwound")

    thread = BlockingThread(world, main)
    world.at(1_001.5, thread.hold)
    world.at(1_005.0, thread.release)
    world.at(1_005.5, thread.kill)
    run(world, 1_100.0)
    assert seen == ["1001", "1005", "unwound"]


def test_what_a_dead_process_had_on_its_way_is_lost_from_some_message_on() -> None:
    lost, late = 0, 0
    for seed in range(100):
        world, owner, got = World(seed), object(), list[bytes]()
        network = Network(world)
        inbox = network.bind("there", lambda: None)
        connection = network.connect(owner, "there")
        for number in range(10):
            connection.send(b"%d" % number)
        network.drop(owner)
        connection.send(b"after its death")
        run(world, 1_000.03)
        late += not inbox.messages
        run(world, 1_010.0)
        network.engine_is_ready()
        run(world, 1_011.0)
        got = list(inbox.messages)
        assert got == [b"%d" % number for number in range(len(got))]
        lost += len(got) < 10
    assert 0 < lost < 100
    assert late


def test_messages_wait_for_who_does_not_listen_yet() -> None:
    world = World(1)
    network = Network(world)
    connection = network.connect(object(), "there")
    for number in range(5):
        connection.send(b"%d" % number)
    run(world, 1_002.0)
    inbox = network.bind("there", lambda: None)
    connection.send(b"5")
    run(world, 1_003.0)
    assert list(inbox.messages) == [b"%d" % number for number in range(6)]


def test_a_jump_of_the_clock_makes_things_late() -> None:
    world, seen = World(1), list[float]()
    world.at(1_001.0, lambda: seen.append(world.now()))
    world.at(1_100.0, lambda: seen.append(world.now()))
    world.jump(50.0)
    run(world, 1_200.0)
    assert seen == [1_050.0, 1_100.0]
    assert world.lived == 150.0


def test_what_spins_is_a_violation() -> None:
    world = World(1)

    def spin() -> None:
        world.after(0.0, spin)

    spin()
    with pytest.raises(AssertionError, match="time stands still"):
        run(world, 1_001.0)
