"""Several engines behind one address: who gets what, and that one's trouble is not the others'."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from quire.engine.client import Lost
from quire.errors import UnavailableError
from quire.foundation.messages.from_engine import Dead, Deltas, Done, EngineId, FromEngine, Heartbeat, Load
from quire.foundation.messages.to_engine import Add
from tests.api.scripted import READY, ScriptedClient
from tests.api.server import Server, resolved
from tests.api.test_lifetimes import LONG, eventually, in_background
from tests.checkpoints import make_llama

TWO_BLOCKS = list(range(5, 38))


class Engine(ScriptedClient):
    """One of several."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.engine = EngineId(number)

    def say(self, message: FromEngine | Lost | Exception) -> None:
        super().say(message if isinstance(message, Lost | Exception) else replace(message, source=self.engine))

    def die(self, *in_flight: int) -> EngineId:
        successor = EngineId(self.engine.engine, self.engine.epoch + 1)
        self.say(Dead("planted", successor, list(in_flight)))
        eventually(lambda: self.engine == successor)
        return successor


Two = tuple[Server, Engine, Engine]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "model"
    make_llama(path, tokenizer=True)
    return path


@pytest.fixture
def two(directory: Path) -> Iterator[Two]:
    first, second = Engine(0), Engine(1)
    with Server(resolved(directory), lambda: first, more=[second]) as server:
        first.say(READY)
        assert server.get("/ready").status_code == 503, "the other one is still loading"
        second.say(replace(READY, capacity=READY.capacity - 8))
        eventually(lambda: server.session.state == "ready")
        yield server, first, second


def post(server: Server, prompt: Any, **body: Any) -> Any:
    return in_background(
        lambda: server.post("/v1/completions", LONG | {"prompt": prompt, "stream": False, "max_tokens": 9, **body})
    )


def finish(engine: Engine, add: Add) -> None:
    engine.say(Deltas([add.id], [1], [70], ends=[ScriptedClient.end(add, "length")]))


def test_two_prompts_that_arrive_together_go_to_two_engines(two: Two) -> None:
    server, *engines = two
    waiting = []
    for prompt in ([5, 6], [7, 8]):
        waiting.append(post(server, prompt))
        eventually(lambda: sum(len(engine.adds) for engine in engines) == len(waiting))
    assert [len(engine.adds) for engine in engines] == [1, 1]
    for engine in engines:
        finish(engine, engine.adds[0])
    assert all((thread.join(), answer[0].status_code)[1] == 200 for thread, answer in waiting)


def test_a_prefix_goes_where_it_was_sent_before(two: Two) -> None:
    server, *engines = two
    for number in range(4):
        thread, _ = post(server, [*TWO_BLOCKS, 40 + number])
        eventually(lambda number=number: sum(engine.prompts for engine in engines) == number + 1)
        (engine,) = [engine for engine in engines if engine.prompts]
        finish(engine, engine.adds[-1])
        thread.join()
    assert sorted(engine.prompts for engine in engines) == [0, 4]


def test_the_prompts_of_one_request_may_go_to_several_engines_and_choices_of_one_stay_together(two: Two) -> None:
    server, *engines = two
    thread, answer = post(server, [[token] * 20 for token in range(5, 11)], n=2)
    eventually(lambda: sum(len(engine.adds) for engine in engines) == 12)
    assert all(engine.prompts for engine in engines)
    for engine in engines:
        assert len(engine.adds) == 2 * engine.prompts
        for add in engine.adds:
            finish(engine, add)
    thread.join()
    assert len(answer[0].json()["choices"]) == 12


def test_what_one_engine_cannot_hold_is_refused(two: Two) -> None:
    server, *_ = two
    refused = server.post("/v1/completions", {"prompt": [5] * (READY.capacity - 7), "max_tokens": 1})
    assert refused.status_code == 400
    assert f"maximum context length is {READY.capacity - 8} tokens" in refused.text


def test_while_one_is_replaced_the_other_serves_and_probes_say_which(two: Two) -> None:
    server, first, second = two
    successor = first.die()
    eventually(lambda: server.get("/health").json()["engines"][0]["state"] == "recovering")
    health, ready = server.get("/health"), server.get("/ready")
    assert (health.status_code, ready.status_code) == (200, 200)
    states = ready.json()["engines"]
    assert [state["state"] for state in states] == ["recovering", "ready"]
    assert "being started again" in states[0]["reason"]
    waiting = [post(server, [5, number]) for number in range(5, 9)]
    eventually(lambda: second.prompts == 4)
    assert not first.adds
    for add in list(second.adds):
        finish(second, add)
    assert [(thread.join(), answer[0].status_code)[1] for thread, answer in waiting] == [200] * 4
    first.say(replace(READY, source=successor))
    eventually(lambda: server.get("/ready").json()["engines"][0]["state"] == "ready")
    thread, _ = post(server, [9, 9])
    eventually(lambda: first.prompts == 1)
    finish(first, first.adds[0])
    thread.join()
    page = server.get("/metrics").text
    lines = [line for line in page.splitlines() if line.startswith("quire:process_restarts_total")]
    assert [line.rsplit(" ", 1)[1] for line in lines if 'process="engine"' in line] == ["1.0", "0.0"]


def test_when_all_are_being_replaced_the_server_is_not_ready(two: Two) -> None:
    server, first, second = two
    first.die()
    second.die()
    eventually(lambda: server.session.state == "recovering")
    assert server.get("/health").status_code == server.get("/ready").status_code == 503


def has_generated(server: Server, number: int) -> bool:
    sequence = server.session.requests.get(number)
    return sequence is not None and len(sequence.generated) == 1


def test_a_stream_goes_on_in_the_successor_and_the_others_are_not_touched(two: Two) -> None:
    server, *engines = two
    waiting = []
    for token in (5, 6):
        waiting.append(post(server, [token], max_tokens=3))
        eventually(lambda: sum(engine.prompts for engine in engines) == len(waiting))
    dying, other = engines
    (open_add,), (untouched,) = dying.adds, other.adds
    dying.tokens(open_add, [70])
    eventually(lambda: has_generated(server, open_add.id))
    successor = dying.die(open_add.id)
    dying.say(replace(READY, source=successor))
    eventually(lambda: len(dying.adds) == 1)
    assert dying.adds[0].tokens == [*open_add.tokens, 70]
    assert other.adds == [untouched]
    assert other.aborted == []
    finish(dying, dying.adds[0])
    finish(other, untouched)
    assert [(thread.join(), answer[0].status_code)[1] for thread, answer in waiting] == [200, 200]
    assert [stats.replayed for stats in server.session.stats.engines] == [1, 0]


def test_what_only_waited_for_an_engine_that_dies_goes_to_another_at_once(two: Two) -> None:
    server, *engines = two
    waiting = []
    for token in range(5, 11):  # one after the other: the order decides who goes where
        waiting.append(post(server, [token] * 20, n=1 + token % 2))
        eventually(lambda: sum(engine.prompts for engine in engines) == len(waiting))
    dying, other = engines
    begun, in_flight, *rest = [add for add in dying.adds if add.fork_of is None]
    assert rest
    dying.tokens(begun, [70])
    eventually(lambda: has_generated(server, begun.id))
    had = {add.id for add in other.adds}
    moving = {each.id for add in rest for each in add.sequences()}
    successor = dying.die(in_flight.id)
    eventually(lambda: {add.id for add in other.adds} == had | moving)
    assert not dying.adds
    dying.say(replace(READY, source=successor))
    eventually(lambda: len(dying.adds) == len([*begun.sequences(), *in_flight.sequences()]))
    served = [len(engine.adds) for engine in engines]
    for engine in engines:
        for add in list(engine.adds):
            finish(engine, add)
    assert [(thread.join(), answer[0].status_code)[1] for thread, answer in waiting] == [200] * 6
    counted = server.session.stats.engines
    assert [sum(each.ended.values()) for each in counted] == served, "each counts what it has served itself"
    assert [each.generation_tokens for each in counted] == [served[0] + 1, served[1]]
    assert not any(each._groups for each in counted)
    limit = server.session.admission_limit
    for engine in engines:
        engine.say(Heartbeat(0.0, 0.0, last_add=max(add.id for add in engine.adds)))
    eventually(lambda: (limit.tokens, limit.sequences, server.session.num_sequences) == (0, 0, 0))


def test_a_message_that_is_lost_fails_requests_of_its_engine_alone(two: Two) -> None:
    server, *engines = two
    waiting = {}
    for token in (5, 6):
        thread, answer = post(server, [token])
        eventually(lambda: sum(engine.prompts for engine in engines) == len(waiting) + 1)
        (number,) = [n for n, engine in enumerate(engines) if engine.prompts and n not in waiting]
        waiting[number] = thread, answer
    engines[0].say(Lost("planted"))
    waiting[0][0].join()
    assert waiting[0][1][0].status_code == 500
    finish(engines[1], engines[1].adds[0])
    waiting[1][0].join()
    assert waiting[1][1][0].status_code == 200


def test_a_client_that_goes_away_is_aborted_where_its_requests_are(two: Two) -> None:
    server, *engines = two
    waiting = [post(server, [token], timeout=None) for token in (5, 6)]
    eventually(lambda: all(engine.prompts for engine in engines))
    server.in_loop(_abort_all(server))
    assert [len(engine.aborted) for engine in engines] == [1, 1]
    for engine in engines:
        assert engine.aborted == [engine.adds[0].id]
    for thread, _ in waiting:
        thread.join()


async def _abort_all(server: Server) -> None:
    session = server.session
    session.fail_requests(session.requests.collectors(), UnavailableError("gone"), "abort")


def test_a_command_goes_to_all_and_one_that_is_being_replaced_is_paused_when_it_is_back(two: Two) -> None:
    server, first, second = two
    successor = first.die()
    eventually(lambda: server.session.engines.states[0]["state"] == "recovering")
    thread, answer = in_background(lambda: server.post("/pause?clear_cache=false", {}))
    eventually(lambda: len(second.controls) == 1)
    second.say(Done(second.number << 48 | 1))
    thread.join()
    assert answer[0].status_code == 200
    first.say(replace(READY, source=successor))
    eventually(lambda: [action for action, _ in first.controls] == ["pause:abort"])


def test_counts_of_all_engines_are_added_up(two: Two) -> None:
    server, *engines = two
    thread, answer = in_background(lambda: server.get("/debug/counts"))
    for number, engine in enumerate(engines, 1):
        eventually(lambda engine=engine: len(engine.controls) == 1)
        engine.say(Done(engine.number << 48 | 1, {"running": number}))
    thread.join()
    assert answer[0].json()["engine"] == {"running": 3}


def test_the_queue_limit_is_of_all_engines_together(two: Two) -> None:
    server, *engines = two
    for engine in engines:
        engine.say(_busy(2_000))
    limit = server.session.admission_limit
    eventually(lambda: limit.tokens == 4_000)
    assert limit.seconds == 20.0


def _busy(tokens: int) -> Heartbeat:
    return Heartbeat(0.0, 0.0, Load(running=1, waiting=1, queued_tokens=tokens, tokens_per_s=100.0))
