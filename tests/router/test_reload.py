"""The list may change at any time: servers come, go and drain, keys too, and nothing that runs is lost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import uvloop

from quire.errors import ConfigError
from quire.foundation.config.router import RouterConfig
from quire.serving.router import router_process
from quire.serving.router.backend_list import parse_url, read_backend_list
from tests.router.stubs import RouterUnderTest, StubBackend, chunked, raw, running_router, until


class ListFile:
    """The file of --dynamic-config-yaml."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "list.yaml"

    def write(self, *backends: dict[str, Any], keys: tuple[dict[str, Any], ...] = ()) -> None:
        """Put another file in its place, as ConfigMaps and editors do."""
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({"backends": backends, "keys": keys}))
        new.replace(self.path)

    @asynccontextmanager
    async def router(self, **settings: Any) -> AsyncIterator[RouterUnderTest]:
        """A router that follows it."""
        async with running_router(static_backends=(), dynamic_config_yaml=str(self.path), **settings) as router:
            yield router


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ListFile:
    monkeypatch.setattr(router_process, "WATCH_S", 0.02)
    return ListFile(tmp_path)


async def only(router: RouterUnderTest, *stubs: StubBackend) -> bool:
    states = await router.states()
    return set(states) == {stub.url for stub in stubs} and all(state["ready"] for state in states.values())


def test_a_server_that_is_added_is_used_and_one_that_is_removed_finishes_its_streams(listed: ListFile) -> None:
    async def check() -> None:
        going_on = asyncio.Event()

        async def slow(_: object, writer: asyncio.StreamWriter, seen: object) -> None:
            head, first, last = chunked(b"data: 1\n\n", b"data: 2\n\n")
            writer.write(head + first)
            await going_on.wait()
            writer.write(last + b"0\r\n\r\n")
            await writer.drain()

        async with StubBackend("one", behaviour=slow) as one, StubBackend("two") as two:
            listed.write({"url": one.url})
            async with listed.router() as router:
                streaming = asyncio.create_task(router.ask())
                await until(lambda: len(one.seen) == 1)
                listed.write({"url": two.url})
                await until(lambda: only(router, two))
                assert {(await router.ask(str(n))).json()["from"] for n in range(6)} == {"two"}
                assert await router.metric(f'quire:router_backend_ready{{backend="{one.url}"}}') == 0
                assert one.url not in (await router.client.get("/metrics")).text
                going_on.set()
                assert (await streaming).content == b"data: 1\n\ndata: 2\n\n"
                assert len(one.seen) == 1

    uvloop.run(check())


def test_a_server_that_drains_gets_nothing_new_and_finishes_what_it_has(listed: ListFile) -> None:
    async def check() -> None:
        waiting = asyncio.Event()
        async with StubBackend("one") as one, StubBackend("two") as two:
            listed.write({"url": one.url}, {"url": two.url})
            async with listed.router(routing_logic="roundrobin") as router:
                one.behaviour = raw(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n", b"la", b"te", close=False)
                assert {(await router.ask()).text for _ in range(4)} == {"late", '{"from": "two"}'}
                one.behaviour = raw(wait=waiting)
                before = len(one.seen)
                begun = asyncio.create_task(router.ask(timeout=20))
                other = asyncio.create_task(router.ask(timeout=20))
                await until(lambda: len(one.seen) == before + 1)
                listed.write({"url": one.url, "drain": True}, {"url": two.url})
                await until(lambda: _drains(router, one.url))
                assert {(await router.ask()).json()["from"] for _ in range(6)} == {"two"}
                assert len(one.seen) == before + 1
                assert (await router.states())[one.url]["requests"] == 1, "it still has one"
                assert await router.metric(f'quire:router_backend_draining{{backend="{one.url}"}}') == 1
                waiting.set()
                answers = [answer.status_code for answer in await asyncio.gather(begun, other)]
                assert answers == [200, 200], "closed before its first byte, and tried again at the other"
                listed.write({"url": one.url}, {"url": two.url})
                await until(lambda: _drains(router, one.url, False))
                await router.ask()
                await router.ask()
                assert len(one.seen) > before + 1

    uvloop.run(check())


async def _drains(router: RouterUnderTest, url: str, drains: bool = True) -> bool:
    return bool((await router.states())[url]["draining"]) is drains


def test_all_servers_that_drain_are_503_and_not_ready(listed: ListFile) -> None:
    async def check() -> None:
        async with StubBackend("one") as one:
            listed.write({"url": one.url, "drain": True})
            async with listed.router() as router:
                assert (await router.ask()).status_code == 503
                ready = await router.client.get("/ready")
                assert (ready.status_code, ready.json()["reason"]) == (503, "No server takes requests.")

    uvloop.run(check())


def test_a_list_that_is_wrong_changes_nothing_and_sighup_reads_it_again(
    listed: ListFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_process, "WATCH_S", 3_600.0)

    async def check() -> None:
        async with StubBackend("one") as one, StubBackend("two") as two:
            listed.write({"url": one.url})
            async with listed.router() as router:
                for wrong in ("backends: [{url: x}]", "backends: [", "servers: []", "backends: []", ""):
                    listed.path.write_text(wrong)
                    before = await router.metric('quire:router_reloads_total{result="failed"}')
                    os.kill(os.getpid(), signal.SIGHUP)
                    await until(lambda before=before: _counted(router, "failed", before + 1))  # type: ignore[misc]
                    assert (await router.ask()).json() == {"from": "one"}
                listed.write({"url": two.url})
                os.kill(os.getpid(), signal.SIGHUP)
                await until(lambda: only(router, two))
                assert await router.metric('quire:router_reloads_total{result="ok"}') == 1

    uvloop.run(check())


async def _counted(router: RouterUnderTest, result: str, count: float) -> bool:
    return await router.metric(f'quire:router_reloads_total{{result="{result}"}}') == count


def test_a_file_that_is_away_for_a_moment_is_read_when_it_is_back(listed: ListFile) -> None:
    async def check() -> None:
        async with StubBackend("one") as one, StubBackend("two") as two:
            listed.write({"url": one.url})
            async with listed.router() as router:
                listed.path.unlink()
                await until(lambda: _counted(router, "failed", 1))
                assert (await router.ask()).json() == {"from": "one"}
                listed.write({"url": two.url})
                await until(lambda: only(router, two))

    uvloop.run(check())


def test_keys_come_and_go_with_the_list(listed: ListFile) -> None:
    async def check() -> None:
        async with StubBackend("one") as one:
            server = {"url": one.url, "api_key": "servers-own"}
            digest = sha256(b"second").hexdigest()
            listed.write(server)
            async with listed.router(tenant_header="X-Tenant") as router:
                assert (await router.ask(headers={"X-Tenant": "forged"})).status_code == 200
                assert "x-tenant" not in one.seen[-1].headers
                listed.write(server, keys=({"name": "a", "key": "first"}, {"name": "b", "key_sha256": digest}))
                await until(lambda: _refused(router))
                for key, name in (("first", "a"), ("second", "b")):
                    answer = await router.ask(headers={"Authorization": f"Bearer {key}", "X-Tenant": "forged"})
                    assert answer.status_code == 200
                    headers = one.seen[-1].headers
                    assert (headers["x-tenant"], headers["authorization"]) == (name, "Bearer servers-own")
                listed.write(server, keys=({"name": "b", "key_sha256": digest},))
                await until(lambda: _refused(router, "first"))
                assert (await router.ask(headers={"x-api-key": "second"})).status_code == 200
                assert "x-api-key" not in one.seen[-1].headers

    uvloop.run(check())


async def _refused(router: RouterUnderTest, key: str = "") -> bool:
    answer = await router.client.get("/v1/models", headers={"Authorization": f"Bearer {key}"} if key else {})
    return answer.status_code == 401


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "There is no server"),
        ("backends: [{url: 'ftp://x'}]", "no address of a server"),
        ("backends: [{url: 'http://a'}, {url: 'http://a/v1/'}]", "listed twice"),
        ("backends: [{url: 'http://a', weight: 3}]", "unknown field `weight`"),
        ("backends: 3", "Expected `array`"),
        ("backends: {", "is not YAML"),
        ("backends: [{url: 'http://a'}]\nkeys: [{name: 'a b', key: k}]", "no name of a key"),
        ("backends: [{url: 'http://a'}]\nkeys: [{name: a}]", "either key or key_sha256"),
        ("backends: [{url: 'http://a'}]\nkeys: [{name: a, key: ' '}]", "is empty"),
        ("backends: [{url: 'http://a'}]\nkeys: [{name: a, key_sha256: abc}]", "64 hexadecimal digits"),
        ("backends: [{url: 'http://a'}]\nkeys: [{name: a, key: k, requests_per_minute: 0}]", "above 0"),
        ("backends: [{url: 'http://a'}]\nkeys: [{name: a, key: k}, {name: a, key: l}]", "Two keys have the name"),
        ("backends: [{url: 'http://a'}]\nkeys: [{name: a, key: k}, {name: b, key: k}]", "Two keys are the same"),
    ],
)
def test_what_is_wrong_with_a_list_is_said_in_a_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_backend_list(RouterConfig(dynamic_config_yaml=str(path)))
    assert said in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("http://a:8000", "http://a:8000"),
        (" https://a/v1/ ", "https://a"),
        ("http://[::1]:9/x", "http://[::1]:9/x"),
        ("a:8000", None), ("http://", None), ("http://a:0", None), ("http://a:99999", None), ("http://u:p@a", None),
        ("http://a?x", None), ("http://a#x", None), ("http://a b", None), ("http://a\r\nX: y", None),
    ],
)  # fmt: skip
def test_an_address_is_scheme_host_and_port(written: str, read: str | None) -> None:
    if read is None:
        with pytest.raises(ConfigError, match="no address of a server"):
            parse_url(written)
    else:
        assert parse_url(written) == read
