"""Messages over ZMQ between an engine's port and its clients."""

from __future__ import annotations

import select
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from quire.engine.build import ModelRuntimeInfo
from quire.engine.client import (
    INTAKE_BYTES,
    SEQUENCE_BYTES,
    DeathNotices,
    Lost,
    ZmqClient,
    ZmqPort,
    client_address,
    engine_address,
)
from quire.engine.core import EngineCore
from quire.foundation.clock import SystemClock
from quire.foundation.messages.from_engine import Dead, Deltas, Done, End, EngineId, FromEngine
from quire.foundation.messages.to_engine import Abort, ClientGone, ClientHeartbeat, Control
from tests.engine.harness import add, config
from tests.executor.fake import FakeExecutor

ENGINE = EngineId()
WAIT_S = 60.0
"""What only a failure needs."""


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="q-") as name:  # short: the path of a Unix socket has 107 bytes
        yield Path(name)


@pytest.fixture
def port(directory: Path) -> Iterator[ZmqPort]:
    port = ZmqPort(directory, ENGINE)
    yield port
    port.close()


@pytest.fixture
def client(directory: Path) -> Iterator[ZmqClient]:
    client = ZmqClient(directory, 3, ENGINE)
    yield client
    client.close()


def test_messages_arrive_as_they_were_sent_and_in_order(port: ZmqPort, client: ZmqClient) -> None:
    sent = [add(3 << 48 | 1, range(500), 7, stop=["x"], seed=9), Abort([1, 2]), ClientHeartbeat(3)]
    for message in sent:
        client.send(message)
    got = port.drain(WAIT_S)
    while len(got) < 3:
        got += port.drain(WAIT_S)
    assert got == sent
    answers: list[FromEngine] = [Done(i, {"a": i}) for i in range(100)]
    for answer in answers:
        port.send(3, answer)
    assert [client.receive(WAIT_S) for _ in answers] == answers


def test_a_turn_takes_a_part_of_a_crowd_and_none_is_lost(port: ZmqPort, client: ZmqClient) -> None:
    sent = [add(3 << 48 | i, [60_000] * 5_000, 7) for i in range(1, 41)]  # 15 KB each
    for message in sent:
        client.send(message)
    turns = []
    while sum(map(len, turns)) < len(sent):
        turns.append(port.drain(WAIT_S))
    assert [message for turn in turns for message in turn] == sent
    assert max(map(len, turns)) <= INTAKE_BYTES // 15_000 + 1
    whole = add(3 << 48 | 99, [60_000] * 500_000, 7)
    client.send(whole)
    assert port.drain(WAIT_S) == [whole]


@pytest.mark.parametrize("forks", [0, 15])
def test_a_turn_takes_few_sequences_however_small_their_messages(port: ZmqPort, client: ZmqClient, forks: int) -> None:
    each = 1 + forks
    sent = [add(3 << 48 | i, [5], 1, forks=range(i + 1, i + each)) for i in range(1, 1_024, each)]
    for message in sent:
        client.send(message)
    sent_aborts = [Abort(list(range(i, i + 64))) for i in range(0, 1_024, 64)]
    for abort in sent_aborts:
        client.send(abort)
    turns = []
    while sum(map(len, turns)) < len(sent) + len(sent_aborts):
        turns.append(port.drain(WAIT_S))
    assert [message for turn in turns for message in turn] == [*sent, *sent_aborts]
    most = INTAKE_BYTES // SEQUENCE_BYTES + 64
    for turn in turns:
        sequences = sum(len(m.ids) if isinstance(m, Abort) else 1 + len(m.forks) for m in turn)  # type: ignore[union-attr]
        assert sequences <= most


def test_every_message_says_which_engine_sent_it_and_another_one_listens_elsewhere(
    directory: Path, client: ZmqClient
) -> None:
    client.send(Abort([1]))  # to the engine that is gone: no later one gets it
    later = ZmqPort(directory, EngineId(0, 1))
    later.send(3, Done(5))
    answer = client.receive(WAIT_S)
    assert answer == Done(5, source=EngineId(0, 1))
    assert later.drain(0.1) == []
    later.close()


def test_an_idle_wait_ends_in_time(port: ZmqPort, client: ZmqClient) -> None:
    assert port.drain(0.0) == []
    assert port.drain(0.01) == []
    assert client.receive(0.01) is None


def test_an_event_loop_can_wait_for_a_clients_messages(port: ZmqPort, client: ZmqClient) -> None:
    answers: list[FromEngine] = [Done(i, {"a": i}) for i in range(100)]
    for some in (answers[:1], answers[1:]):
        assert client.receive(0.0) is None
        for answer in some:
            port.send(3, answer)
        got = list[object]()
        while len(got) < len(some):
            assert select.select([client.fileno()], [], [], 20.0)[0], "nothing announces a message"
            while (message := client.receive(0.0)) is not None:
                got.append(message)
        assert got == some
    assert not select.select([client.fileno()], [], [], 0.05)[0], "an event loop would spin"


def test_what_is_no_message_is_dropped_and_the_next_one_arrives(
    port: ZmqPort, client: ZmqClient, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = zmq.Context()
    stranger = context.socket(zmq.PUSH)
    stranger.connect(engine_address(directory, ENGINE))
    for garbage in (b"", b"\xc1", b"\x92\xa3Add\xa1x", b"\x00" * 10_000, b"\x92\xa1\xff\x01"):
        stranger.send(garbage)
    stranger.close()
    context.term()
    client.send(Abort([5]))
    got = port.drain(WAIT_S)
    while not got:
        got = port.drain(WAIT_S)
    assert got == [Abort([5])]
    deadline = time.monotonic() + WAIT_S
    while caplog.text.count("DROPPED") < 5 and time.monotonic() < deadline:
        assert port.drain(0.1) == []
    assert caplog.text.count("DROPPED") == 5


def test_who_watches_tells_each_side_about_the_others_death(port: ZmqPort, client: ZmqClient, directory: Path) -> None:
    notices = DeathNotices(directory)
    dead = Dead("seen from outside", EngineId(0, 1), [5], source=ENGINE)
    notices.engine_died(3, dead)
    assert client.receive(WAIT_S) == dead
    notices.client_died(ENGINE, 3)
    assert port.drain(WAIT_S) == [ClientGone(3)]
    notices.engine_died(4, dead)  # before it listens
    later = ZmqClient(directory, 4, ENGINE)
    assert later.receive(WAIT_S) == dead
    later.close()
    notices.close()


def test_a_client_goes_on_with_the_next_engine(port: ZmqPort, client: ZmqClient, directory: Path) -> None:
    client.connect(EngineId(0, 1))
    client.send(Abort([1]))
    later = ZmqPort(directory, EngineId(0, 1))
    assert later.drain(WAIT_S) == [Abort([1])]
    assert port.drain(0.1) == []
    port.send(3, Done(1))  # late
    later.send(3, Done(2))
    answers = [client.receive(WAIT_S), client.receive(WAIT_S)]
    assert {(answer.id, answer.source) for answer in answers if isinstance(answer, Done)} == {
        (1, ENGINE),
        (2, EngineId(0, 1)),
    }
    later.close()


def broken(message: object, **wrong: object) -> bytes:
    """A message as it is sent, with something of another type in some of its fields."""
    name, *values = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    fields = dict(zip(message.__struct_fields__, values, strict=True)) | wrong  # type: ignore[attr-defined]
    return msgspec.msgpack.encode([name, *fields.values()])


FIRST = 3 << 48 | 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": ["1"]},
        {"sampling": {"temperature": -1.0}},
        {"sampling": None},
        {"seed": "x"},
        {"forks": [[FIRST + 1, 0], [FIRST + 2, "seed"]]},
        {"bad_words": 3},
    ],
)
def test_a_request_that_does_not_decode_ends_with_an_error(
    port: ZmqPort, client: ZmqClient, wrong: dict[str, object]
) -> None:
    executor = FakeExecutor()
    core = EngineCore(config(), executor.start(), ModelRuntimeInfo(), executor, port, SystemClock())
    client._outbox.send(broken(add(FIRST, [1], 4, forks=[FIRST + 1, FIRST + 2]), **wrong))
    client.send(add(FIRST + 7, [1], 1))
    ends: dict[int, End] = {}
    for _ in range(1_000):
        if len(ends) == 4:
            break
        core.turn(0.05)
        if isinstance(message := client.receive(0.05), Deltas):
            ends |= {end.id: end for end in message.ends}
    assert sorted(ends) == [FIRST, FIRST + 1, FIRST + 2, FIRST + 7]
    assert [ends[FIRST + i].reason for i in (0, 1, 2, 7)] == ["error", "error", "error", "length"]
    assert "could not read" in ends[FIRST].message


def test_a_control_that_does_not_decode_is_answered(port: ZmqPort, client: ZmqClient) -> None:
    executor = FakeExecutor()
    core = EngineCore(config(), executor.start(), ModelRuntimeInfo(), executor, port, SystemClock())
    client._outbox.send(broken(Control(FIRST, "counts"), action=3))
    core.turn(WAIT_S)
    answer = client.receive(WAIT_S)
    assert isinstance(answer, Done)
    assert (answer.id, answer.error != "") == (FIRST, True)


def test_a_client_says_that_something_was_lost(client: ZmqClient, directory: Path) -> None:
    context = zmq.Context()
    stranger = context.socket(zmq.PUSH)
    stranger.connect(client_address(directory, 3, 0))
    for garbage in (b"\xc1", b"\x92\xa1\xff\x01"):
        stranger.send(garbage)
    stranger.close()
    context.term()
    notices = DeathNotices(directory)
    notices.engine_died(3, Dead("real"))
    got = [client.receive(WAIT_S) for _ in range(3)]
    assert Dead("real") in got
    assert sum(isinstance(message, Lost) for message in got) == 2
    notices.close()
