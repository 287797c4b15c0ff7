"""A client that falls silent has its requests aborted; one that never beat is not watched."""

from __future__ import annotations

from quire.engine.build import ModelRuntimeInfo
from quire.engine.client_liveness import SILENT_AFTER_S
from quire.engine.core import HEARTBEAT_S, EngineCore
from quire.foundation.messages.from_engine import Deltas, FromEngine, Heartbeat, Ready
from quire.foundation.messages.to_engine import CLIENT_SHIFT, ClientGone, ClientHeartbeat, Control, ToEngine
from tests.engine.harness import add, config
from tests.executor.fake import FakeExecutor


class ManualClock:
    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time


class ListPort:
    def __init__(self) -> None:
        self.inbox: list[ToEngine] = []
        self.forgotten: list[int] = []
        self.sent: list[tuple[int, FromEngine]] = []
        self.waits: list[float | None] = []

    def drain(self, wait: float | None) -> list[ToEngine]:
        self.waits.append(wait)
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, client: int, message: FromEngine) -> None:
        self.sent.append((client, message))

    def forget(self, client: int) -> None:
        self.forgotten.append(client)

    def to(self, client: int, kind: type) -> list[FromEngine]:
        return [message for number, message in self.sent if number == client and isinstance(message, kind)]


def engine(clock: ManualClock, port: ListPort) -> EngineCore:
    executor = FakeExecutor()
    return EngineCore(config(), executor.start(), ModelRuntimeInfo(), executor, port, clock)


def pass_time(core: EngineCore, clock: ManualClock, port: ListPort, seconds: float, alive: int) -> None:
    """Turns of the loop, a second each, in which one client says that it is alive."""
    for _ in range(round(seconds)):
        clock.time += 1.0
        port.inbox.append(ClientHeartbeat(alive))
        core.turn(0)


def test_a_silent_clients_requests_are_aborted_and_others_go_on() -> None:
    clock, port = ManualClock(), ListPort()
    core = engine(clock, port)
    port.inbox = [ClientHeartbeat(1), ClientHeartbeat(2)]
    port.inbox += [add(client << CLIENT_SHIFT | 1, [1, 2, 3], 400) for client in (1, 2, 3)]
    for _ in range(4):
        core.turn(0)
    pass_time(core, clock, port, SILENT_AFTER_S + 2, alive=2)
    for _ in range(450):
        core.turn(0)
    reasons = {end.id >> CLIENT_SHIFT: end.reason for _, m in port.sent if isinstance(m, Deltas) for end in m.ends}
    assert reasons == {1: "abort", 2: "length", 3: "length"}
    assert core.counts()["free_blocks"] == core.counts()["blocks"]


def test_a_request_that_comes_before_the_heartbeat_of_a_client_that_was_silent_is_not_aborted() -> None:
    clock, port = ManualClock(), ListPort()
    core = engine(clock, port)
    port.inbox = [ClientHeartbeat(1)]
    core.turn(0)
    for _ in range(round(SILENT_AFTER_S)):
        clock.time += 1.0
        core.turn(0)
    clock.time += 1.0
    port.inbox = [add(1 << CLIENT_SHIFT | 1, [1, 2, 3], 5)]
    for _ in range(8):
        core.turn(0)
    (end,) = [end for _, m in port.sent if isinstance(m, Deltas) for end in m.ends]
    assert end.reason == "length"


def test_nobody_is_blamed_for_a_pause_of_the_engines_own() -> None:
    clock, port = ManualClock(), ListPort()
    core = engine(clock, port)
    port.inbox = [ClientHeartbeat(1), add(1 << CLIENT_SHIFT | 1, [1, 2, 3], 400)]
    core.turn(0)
    clock.time += 60.0
    core.turn(0)
    assert core.counts()["requests"] == 1
    assert core.pulse().stalled_s <= 2.0
    pass_time(core, clock, port, SILENT_AFTER_S + 2, alive=2)
    assert core.counts()["requests"] == 0, "but it is still silent"


def test_a_client_that_is_gone_leaves_nothing_and_what_it_sent_before_is_dropped() -> None:
    clock, port = ManualClock(), ListPort()
    core = engine(clock, port)
    port.inbox = [ClientHeartbeat(1), add(1 << CLIENT_SHIFT | 1, [1, 2, 3], 400)]
    core.turn(0)
    sent = len(port.sent)
    port.inbox = [ClientGone(1), add(1 << CLIENT_SHIFT | 2, [1, 2, 3], 400), ClientHeartbeat(1)]
    for _ in range(4):
        core.turn(0)
        clock.time += 1.5
    assert core.counts()["requests"] == 0
    assert core.counts()["free_blocks"] == core.counts()["blocks"]
    assert port.forgotten == [1]
    assert port.sent[sent:] == []


def test_each_new_client_gets_ready_once() -> None:
    clock, port = ManualClock(), ListPort()
    core = engine(clock, port)
    for _ in range(3):
        port.inbox = [ClientHeartbeat(4)]
        core.turn(0)
    assert port.to(4, Ready) == [core.ready]


def test_a_client_that_comes_during_a_pause_is_told() -> None:
    clock, port = ManualClock(), ListPort()
    core = engine(clock, port)
    for number, action in enumerate(("pause:keep", "pause:wait", "resume"), start=1):
        port.inbox = [Control(number, action), ClientHeartbeat(number)]
        core.turn(0)
    told = [message.paused for number in (1, 2, 3) for message in port.to(number, Ready) if isinstance(message, Ready)]
    assert told == ["keep", "wait", ""]


def test_heartbeats_say_when_the_engine_last_made_progress() -> None:
    clock, port = ManualClock(), ListPort()
    core = engine(clock, port)
    port.inbox = [ClientHeartbeat(1)]
    for _ in range(3):
        clock.time += 1.5
        core.turn(0)
    beats = port.to(1, Heartbeat)
    assert [beat.now for beat in beats if isinstance(beat, Heartbeat)] == [101.5, 103.0, 104.5]
    assert all(isinstance(beat, Heartbeat) and beat.last_progress == beat.now for beat in beats)


def test_a_paused_engine_counts_as_idle_and_waits_for_messages() -> None:
    clock, port = ManualClock(), ListPort()
    core = engine(clock, port)
    port.inbox = [ClientHeartbeat(1), add(1 << CLIENT_SHIFT | 1, [1, 2], 400), Control(1 << CLIENT_SHIFT, "pause:keep")]
    for _ in range(40):
        clock.time += 2
        core.turn(None)
        port.inbox = [ClientHeartbeat(1)]
    *_, beat = port.to(1, Heartbeat)
    assert isinstance(beat, Heartbeat)
    assert beat.last_progress == beat.now == clock.time
    assert beat.load.paused
    assert port.waits[-1] == HEARTBEAT_S


def test_a_stuck_executor_shows_in_the_heartbeat() -> None:
    class Stuck(FakeExecutor):
        def collect(self, timeout: float | None) -> None:
            clock.time += timeout or 0.0

    clock, port = ManualClock(), ListPort()
    executor = Stuck()
    core = EngineCore(config(), executor.start(), ModelRuntimeInfo(), executor, port, clock)
    port.inbox = [ClientHeartbeat(1), add(1 << CLIENT_SHIFT, [1], 5)]
    began = clock.time
    for _ in range(5):
        core.turn(HEARTBEAT_S)
    last = port.to(1, Heartbeat)[-1]
    assert isinstance(last, Heartbeat)
    assert last.last_progress == began
    assert last.now >= began + 4
