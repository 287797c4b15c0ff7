"""Which server gets a prompt: by session, by its beginning and by load, through the same code as replicas."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import uvloop

from benchmarks.replica_routing import Trace, round_robin, router, run
from quire.errors import ConfigError, UnavailableError
from quire.foundation.config.router import RouterConfig
from quire.serving.replica_chooser import BOUND, SLACK
from quire.serving.router.backend import Backend, ScrapedLoad
from quire.serving.router.backend_list import BackendAddress
from quire.serving.router.fleet import Fleet
from quire.serving.router.routed_request import RoutedRequest, prefix_blocks, read_fields, session_blocks
from tests.engine.test_client_liveness import ManualClock
from tests.router.stubs import StubBackend, running_router

SYSTEM = "You answer in one word. " * 40


def fleet_of(*urls: str, **settings: object) -> Fleet:
    fleet = Fleet(RouterConfig(**settings), ManualClock())  # type: ignore[arg-type]
    fleet.update([BackendAddress(url) for url in urls])
    for backend in fleet.backends:
        backend.learn_cards({"m": {"id": "m"}})
        backend.complaint = ""
    return fleet


def asked(text: str, **fields: object) -> RoutedRequest:
    body = json.dumps({"model": "m", "prompt": text} | fields).encode()
    parsed = read_fields(body)
    return RoutedRequest(b"/v1/completions", [], body, "m", prefix_blocks(parsed), parsed.num_tokens, 0.0)


def conversation(*turns: str) -> list[bytes]:
    messages = [{"role": ("user", "assistant")[number % 2], "content": turn} for number, turn in enumerate(turns)]
    return prefix_blocks(read_fields(json.dumps({"model": "m", "messages": messages}).encode()))


def test_a_session_stays_with_one_server() -> None:
    settings = {"routing_logic": "session", "session_key": "X-User-Id", "health_check_interval": 3_600.0}

    async def check() -> None:
        async with (
            StubBackend("one") as one,
            StubBackend("two") as two,
            StubBackend("three") as three,
            running_router(one, two, three, **settings) as router,
        ):
            for user in range(SLACK // 2):  # so few requests that no server can have more than its share
                headers = {"X-User-Id": f"user-{user}"}
                served = {(await router.ask(f"{n} " * 300, headers=headers)).json()["from"] for n in range(2)}
                assert len(served) == 1, "whatever it asks"

    uvloop.run(check())


def test_sessions_are_spread() -> None:
    fleet = fleet_of("http://one", "http://two", "http://three")
    body = json.dumps({"model": "m", "prompt": SYSTEM}).encode()
    fields = read_fields(body)
    sessions = Counter(
        fleet.choose(
            RoutedRequest(b"/v1/completions", [], body, "m", session_blocks(f"user-{user}", fields), 300, 0.0)
        ).address.url
        for user in range(30)
    )
    assert len(sessions) == 3
    assert max(sessions.values()) <= BOUND * 10 + SLACK


def test_requests_of_no_session_go_by_load_alone() -> None:
    settings = {"routing_logic": "session", "session_key": "X-User-Id", "health_check_interval": 3_600.0}

    async def check() -> None:
        async with StubBackend("one") as one, StubBackend("two") as two, running_router(one, two, **settings) as router:
            served = [(await router.ask(SYSTEM)).json()["from"] for _ in range(6)]
            assert sorted(served) == ["one"] * 3 + ["two"] * 3

    uvloop.run(check())


def test_a_session_whose_server_is_gone_moves_to_another() -> None:
    async def check() -> None:
        settings = {"routing_logic": "session", "session_key": "X-User-Id"}
        async with StubBackend("one") as one, StubBackend("two") as two, running_router(one, two, **settings) as router:
            headers = {"X-User-Id": "u"}
            first = (await router.ask(headers=headers)).json()["from"]
            await (one if first == "one" else two).kill()
            moved = [(await router.ask(headers=headers)).json()["from"] for _ in range(3)]
            assert set(moved) == {"one", "two"} - {first}

    uvloop.run(check())


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs --session-key"):
        RouterConfig(routing_logic="session")
    with pytest.raises(ConfigError, match="no meaning"):
        RouterConfig(routing_logic="roundrobin", session_key="X-User-Id")


def test_prompts_with_the_same_beginning_go_to_one_server() -> None:
    fleet = fleet_of("http://a", "http://b", "http://c")
    chosen = [fleet.choose(asked(SYSTEM + f"Question {number}?")) for number in range(SLACK)]
    assert len(set(chosen)) == 1
    others = [fleet.choose(asked(f"Another beginning, {number}. " * 20)) for number in range(30)]
    assert set(others) == set(fleet.backends)


def test_a_hot_beginning_spreads_before_one_server_has_more_than_its_share() -> None:
    fleet = fleet_of("http://a", "http://b", "http://c", "http://d")
    counts = Counter(fleet.choose(asked(SYSTEM + str(number))) for number in range(400))
    assert len(counts) == 4
    assert max(counts.values()) <= BOUND * 100 + SLACK + 1


def test_two_routers_that_list_servers_differently_agree() -> None:
    urls = [f"http://{name}" for name in "abcd"]
    one, two = fleet_of(*urls), fleet_of(*reversed(urls))
    two.update([BackendAddress(url) for url in urls[2:]])
    two.update([BackendAddress(url) for url in urls])
    for backend in two.backends:
        backend.learn_cards({"m": {}})
        backend.complaint = ""
    for number in range(30):
        request = asked(f"Document {number}. " * 30)
        assert one.choose(request).address == two.choose(request).address


def test_a_conversation_keeps_its_blocks_as_it_grows() -> None:
    first = conversation("Tell me about prefix caches. " * 20)
    grown = conversation("Tell me about prefix caches. " * 20, "They keep KV blocks. " * 20, "Why?")
    assert len(first) >= 4
    assert grown[: len(first)] == first
    assert conversation("Another question about caches, " * 20)[0] != first[0]


def test_what_engines_do_not_share_has_other_blocks() -> None:
    text = {"prompt": "x" * 500}
    plain = prefix_blocks(read_fields(json.dumps(text | {"model": "m"}).encode()))
    assert prefix_blocks(read_fields(json.dumps({"temperature": 0.3, "model": "m"} | text).encode())) == plain
    for other in ({"model": "adapter"}, {"model": "m", "cache_salt": "s"}):
        assert prefix_blocks(read_fields(json.dumps(text | other).encode()))[0] != plain[0]


def load(running: int = 0, waiting: int = 0, usage: float = 0.0) -> ScrapedLoad:
    return ScrapedLoad(running, waiting, cache_tokens=64_000, cache_usage=usage)


def by_url(fleet: Fleet) -> dict[str, Backend]:
    return {backend.address.url: backend for backend in fleet.backends}


def test_new_prompts_go_to_who_has_little_to_do_and_room() -> None:
    fleet = fleet_of("http://a", "http://b")
    one, two = by_url(fleet).values()
    one.load, two.load = load(running=30, waiting=9), load()
    assert {fleet.choose(asked(f"{n} " * 200)) for n in range(6)} == {two}
    one.load, two.load = load(), load()
    two.in_flight = 20
    assert {fleet.choose(asked(f"{n}, " * 200)) for n in range(6)} == {one}, "sent since it was asked for its load"
    two.in_flight = 0
    for _ in range(2):
        kept = fleet.choose(asked(SYSTEM))
    kept.load = load(usage=1.0)
    assert fleet.choose(asked(SYSTEM)) is not kept, "no free blocks, and another one has some"


def test_a_server_that_came_back_is_taken_to_have_an_empty_cache() -> None:
    fleet = fleet_of("http://a", "http://b")
    kept = fleet.choose(asked(SYSTEM))
    (other,) = set(fleet.backends) - {kept}
    kept.complaint = "away"
    assert fleet.choose(asked(SYSTEM)) is other
    fleet.forget_cache(kept)
    kept.complaint = ""
    assert fleet.choose(asked(SYSTEM + "longer")) is other


def test_requests_are_sent_in_turn_if_that_is_asked_for() -> None:
    fleet = fleet_of("http://a", "http://b", "http://c", routing_logic="roundrobin")
    chosen = [fleet.choose(asked(SYSTEM)) for _ in range(9)]
    assert chosen == list(fleet.backends) * 3


def test_a_request_that_was_tried_everywhere_has_no_server() -> None:
    fleet = fleet_of("http://a", "http://b")
    with pytest.raises(UnavailableError):
        fleet.choose(asked("x"), list(fleet.backends))


def test_a_router_keeps_the_prefix_hits_of_one_engine_and_shares_its_work() -> None:
    trace = Trace(prefixes=64, prefix_tokens=160, requests=1_000)
    one = run(round_robin, 1, 120, trace, speed=4)
    outcome = run(router, 4, 120, trace)
    assert outcome.hits >= 0.93 * one.hits
    assert outcome.max_requests <= 1.25
    assert outcome.max_computed <= 1.25
