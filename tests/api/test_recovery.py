"""An engine that is replaced: its requests go on in the next one, and clients see nothing but a pause."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from quire.foundation.messages.from_engine import Dead, Deltas, End, EngineId, Load
from quire.foundation.messages.to_engine import CLIENT_SHIFT, Add
from quire.foundation.messages.workers import TokenLogprobs
from quire.serving.api.session.open_requests import PROVEN_TOKENS
from tests.api.scripted import READY, ScriptedClient
from tests.api.server import Server, resolved
from tests.api.test_lifetimes import LONG, eventually, in_background

SECOND = EngineId(0, 1)


def post(server: Server, body: dict[str, Any]) -> Any:
    return in_background(lambda: httpx.post(server.url + "/v1/completions", json=body, timeout=60))


def replace_engine(client: ScriptedClient, engine: EngineId, in_flight: Sequence[int] = ()) -> None:
    """The engine dies, and the next one is ready."""
    client.say(Dead("planted", engine, list(in_flight), source=client.engine))
    eventually(lambda: client.engine == engine)
    client.say(replace(READY, source=engine))


def by_prompt(adds: list[Add]) -> list[Add]:
    return sorted(adds, key=lambda add: (add.tokens[0], add.id))


def test_a_stream_goes_on_where_it_was(scripted: tuple[Server, ScriptedClient]) -> None:
    server, client = scripted
    thread, result = post(server, LONG | {"stream": True, "max_tokens": 5, "seed": 9})
    (add,) = client.wait_for_adds(1)
    client.tokens(add, [70, 71])
    client.say(Dead("planted", SECOND, [add.id]))
    client.say(Deltas([add.id], [1], [99]))  # the dead engine's, late
    eventually(lambda: server.session.state == "recovering")
    assert server.get("/health").json()["state"] == "recovering"
    assert "is being started again" in server.get("/ready").json()["reason"]
    assert server.get("/debug/counts").status_code == 503
    client.say(replace(READY, source=SECOND))
    (again,) = client.wait_for_adds(1)
    assert again == replace(add, tokens=[*add.tokens, 70, 71])
    assert server.get("/health").status_code == 200
    client.say(replace(READY, source=SECOND))  # it was silent for a while: nothing is sent twice
    client.say(Deltas([add.id], [3], [72, 73, 74], ends=[client.end(add, "length")], source=SECOND))
    thread.join()
    texts = [json.loads(line[6:])["choices"][0]["text"] for line in result[0].text.split("\n\n")[:-2]]
    assert "".join(texts) == "defgh"
    assert client.adds == [again]
    assert "quire:sequences_replayed_total" in server.get("/metrics").text
    assert server.session.stats.engines[0].replayed == 1


def test_of_several_choices_only_those_that_are_open_go_on(scripted: tuple[Server, ScriptedClient]) -> None:
    server, client = scripted
    thread, result = post(server, LONG | {"n": 3, "max_tokens": 9, "prompt": ["a", "b"]})
    adds = client.wait_for_adds(6)
    first, second, third, *others = adds
    client.say(Deltas([second.id, first.id], [2, 1], [70, 71, 80], ends=[client.end(first, "stop")]))
    replace_engine(client, SECOND, [second.id])
    again = by_prompt(client.wait_for_adds(5))
    assert [(add.id, add.seed, add.tokens[1:]) for add in again] == [
        (second.id, second.seed, [70, 71]),
        (third.id, third.seed, []),
        *((add.id, add.seed, []) for add in others),
    ]
    assert client.prompts == 2, "the first that is open carries the others"
    ends = [client.end(add, "stop") for add in again]
    client.say(Deltas([third.id], [1], [90], ends=ends, source=SECOND))
    thread.join()
    texts = [choice["text"] for choice in result[0].json()["choices"]]
    assert texts == ["n", "de", "x", "", "", ""]


def test_prompt_logprobs_come_once(scripted: tuple[Server, ScriptedClient]) -> None:
    server, client = scripted
    prompt = [10, 11, 12, 13]
    body = {"prompt": [prompt, [20, 21, 22]], "prompt_logprobs": 0, "max_tokens": 2}
    thread, result = post(server, body)
    whole, part = client.wait_for_adds(2)[::-1]
    entries = [TokenLogprobs(-float(i), 1, [], []) for i in range(1, 4)]
    client.say(Deltas([], [], [], prompt_logprobs=[(whole.id, entries[:2]), (part.id, entries[:1])]))
    replace_engine(client, SECOND)
    again = {add.id: add for add in client.wait_for_adds(2)}
    assert again[whole.id].sampling.prompt_logprobs is None, "all of them are known"
    assert again[part.id].sampling.prompt_logprobs == 0
    client.say(Deltas([], [], [], prompt_logprobs=[(part.id, entries[:2])], source=SECOND))
    client.say(Deltas([], [], [], prompt_logprobs=[(part.id, entries[2:])], source=SECOND))
    ends = [client.end(whole, "stop"), client.end(part, "stop")]
    client.say(Deltas([whole.id, part.id], [1, 1], [70, 70], ends=ends, source=SECOND))
    thread.join()
    choices = result[0].json()["choices"]
    got = [[next(iter(entry.values()))["logprob"] for entry in choice["prompt_logprobs"][1:]] for choice in choices]
    assert got == [[-1.0, -2.0, -3.0], [-1.0, -2.0]]


def test_a_new_request_waits_for_the_next_engine_but_not_for_ever(
    scripted: tuple[Server, ScriptedClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = scripted
    client.say(Dead("planted", SECOND))
    eventually(lambda: server.session.state == "recovering")
    thread, result = post(server, LONG)
    eventually(lambda: server.session.num_sequences == 1)
    monkeypatch.setattr("quire.serving.api.session.state.NEW_WORK_WAIT_S", 0.0)
    refused = server.post("/v1/completions", LONG)
    assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
    assert client.adds == []
    client.say(replace(READY, source=SECOND))
    (add,) = client.wait_for_adds(1)
    client.say(Deltas([add.id], [1], [70], ends=[client.end(add, "stop")], source=SECOND))
    thread.join()
    assert result[0].json()["choices"][0]["text"] == "d"
    assert server.session.stats.engines[0].replayed == 0, "no other engine has known it"


def test_a_pause_outlives_its_engine_but_not_a_drain(scripted: tuple[Server, ScriptedClient]) -> None:
    server, client = scripted
    pausing, paused = in_background(lambda: server.post("/pause?mode=keep", {}))
    eventually(lambda: client.controls == [("pause:keep", 0)])
    thread, result = post(server, LONG)
    (add,) = client.wait_for_adds(1)
    replace_engine(client, SECOND)
    pausing.join()
    assert paused[0].status_code == 503, "the engine that was to answer is gone"
    client.wait_for_adds(1)
    assert client.controls == [("pause:keep", 0)], "the next engine is paused before it gets any request"
    server.loop.call_soon_threadsafe(server.session.begin_drain)
    eventually(lambda: client.controls == [("pause:keep", 0), ("resume", 1)])
    replace_engine(client, EngineId(0, 2))
    client.wait_for_adds(1)
    assert client.controls == [], "a third one is not paused"
    client.say(Deltas([add.id], [1], [70], ends=[client.end(add, "stop")], source=client.engine))
    thread.join()
    assert result[0].status_code == 200


def test_a_pause_outlives_the_api_process_and_then_the_engine(tmp_path: Path) -> None:
    client = ScriptedClient()
    with Server(resolved(tmp_path), lambda: client) as server:
        client.say(replace(READY, paused="wait"))  # as another API process has told it
        server.wait_ready()
        assert client.controls == [], "it knows"
        replace_engine(client, SECOND)
        eventually(lambda: client.controls == [("pause:wait", 0)])


def test_while_there_is_no_engine_the_metrics_say_that_its_requests_wait(
    scripted: tuple[Server, ScriptedClient],
) -> None:
    server, client = scripted
    thread, result = post(server, LONG | {"n": 2, "temperature": 1, "max_tokens": 9})
    add, other = client.wait_for_adds(2)
    client.say(Deltas([add.id], [1], [70], load=Load(running=2, num_blocks=9, free_blocks=1, preemptions=5)))
    eventually(lambda: server.session.stats.engines[0].load.running == 2)
    client.say(Dead("planted", SECOND, [add.id]))
    eventually(lambda: server.session.state == "recovering")
    load = server.session.stats.engines[0].load
    assert (load.running, load.waiting, load.free_blocks, load.queued_tokens > 0) == (0, 2, 9, True)
    assert server.get("/load").json() == {"server_load": 2}
    client.say(replace(READY, source=SECOND))
    client.wait_for_adds(2)
    ends = [client.end(add, "stop"), client.end(other, "stop")]
    client.say(Deltas([], [], [], ends=ends, load=Load(num_blocks=7, free_blocks=7, preemptions=1), source=SECOND))
    thread.join()
    assert result[0].status_code == 200
    load = server.session.stats.engines[0].load
    assert (load.running, load.waiting, load.num_blocks, load.preemptions) == (0, 0, 7, 1)
    assert server.get("/load").json() == {"server_load": 0}


def test_when_no_engine_follows_everything_ends(scripted: tuple[Server, ScriptedClient]) -> None:
    server, client = scripted
    client.say(Dead("planted", SECOND))
    eventually(lambda: server.session.state == "recovering")
    thread, result = post(server, LONG)
    eventually(lambda: server.session.num_sequences == 1)
    client.say(Dead("again", source=SECOND))
    thread.join()
    assert result[0].status_code == 500
    assert server.session.state == "dead"


class Dying:
    """A server with open requests of one prompt each, whose engine dies again and again."""

    def __init__(self, scripted: tuple[Server, ScriptedClient], count: int, **body: Any) -> None:
        self.server, self.client = scripted
        self.runs = []
        for number in range(count):
            self.runs.append(post(self.server, LONG | {"prompt": [30 + number], "max_tokens": 20} | body))
            self.client.wait_for_adds((number + 1) * body.get("n", 1))
        self.ids = [add.id for add in self.client.adds]

    def die(self, in_flight: Sequence[int]) -> list[tuple[int, int]]:
        """The engine dies, and the next one is ready. Returns the prompts that it gets, each with `alone`."""
        replace_engine(self.client, EngineId(0, self.client.engine.epoch + 1), in_flight)
        eventually(lambda: self.server.session.state == "ready")
        return [
            (add.id, add.alone)
            for add in self.client.wait_for_adds(self.server.session.num_sequences)
            if add.fork_of is None
        ]

    def moves_on(self, *sequences: int) -> None:
        for number in sequences:
            self.client.say(Deltas([number], [4], [70] * 4, source=self.client.engine))

    def finish(self) -> list[int]:
        """All that is open ends; the status of each answer."""
        for number in self.ids:
            end = End(number, "stop")
            self.client.say(Deltas([number], [1], [70], ends=[end], source=self.client.engine))
        for thread, _ in self.runs:
            thread.join(60)
        return [answer[0].status_code for _, answer in self.runs]


def test_what_was_in_flight_at_two_deaths_runs_alone_and_fails_when_it_kills_a_third_engine(
    scripted: tuple[Server, ScriptedClient],
) -> None:
    dying = Dying(scripted, 3)
    first, second, third = dying.ids
    assert dying.die([first, second]) == [(first, 0), (second, 0), (third, 0)]
    assert dying.die([second, third]) == [(second, PROVEN_TOKENS), (first, 0), (third, 0)], "it comes first"
    assert dying.die([second]) == [(first, 0), (third, 0)]
    assert dying.finish() == [200, 500, 200]
    assert "each time it worked on this request" in dying.runs[1][1][0].json()["error"]["message"]


def test_who_gets_past_the_token_of_the_death_runs_beside_others_again(
    scripted: tuple[Server, ScriptedClient],
) -> None:
    dying = Dying(scripted, 2)
    first, second = dying.ids
    dying.die(dying.ids)
    assert dying.die(dying.ids) == [(first, PROVEN_TOKENS), (second, PROVEN_TOKENS)]
    dying.moves_on(first)
    assert dying.die([second, first]) == [(second, PROVEN_TOKENS), (first, 0)], "nobody ran alone: nobody is blamed"
    assert dying.die([]) == [(second, PROVEN_TOKENS), (first, 0)], "it died for another reason"
    dying.moves_on(second)
    assert dying.finish() == [200, 200]


def test_choices_of_one_prompt_run_alone_together_and_fail_together(scripted: tuple[Server, ScriptedClient]) -> None:
    dying = Dying(scripted, 2, n=2, temperature=1)
    first, fork, *_ = dying.ids
    dying.die([first, fork])
    assert dying.die([fork])[0] == (first, PROVEN_TOKENS)
    dying.die([first, fork])
    assert dying.finish() == [500, 200]


def test_a_death_beside_a_request_of_another_process_blames_nobody(scripted: tuple[Server, ScriptedClient]) -> None:
    dying = Dying(scripted, 1)
    foreign = 5 << CLIENT_SHIFT | 1
    for _ in range(4):
        dying.die([*dying.ids, foreign])
    assert dying.finish() == [200]
