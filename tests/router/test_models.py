"""Requests go to the servers that have their model or adapter; the router has the models of all."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import uvloop

from tests.router.stubs import StubBackend, json_answer, running_router, until


def test_a_model_or_an_adapter_is_asked_of_a_server_that_has_it() -> None:
    async def check() -> None:
        async with (
            StubBackend("one", models=("base", "sql")) as one,
            StubBackend("two", models=("base", "poems")) as two,
            StubBackend("three", models=("other",)) as three,
            running_router(one, two, three) as router,
        ):
            for model, name in (("sql", "one"), ("poems", "two"), ("other", "three")):
                for number in range(4):
                    answer = await router.ask(f"{number}", model=model)
                    assert answer.json() == {"from": name}
            both = {(await router.ask("x" * number, model="base")).json()["from"] for number in range(0, 6_000, 200)}
            assert both == {"one", "two"}

    uvloop.run(check())


def test_v1_models_is_the_union_and_shows_each_servers_own_card() -> None:
    async def check() -> None:
        async with (
            StubBackend("one", models=("base", "sql/v1")) as one,
            StubBackend("two", models=("base", "poems")) as two,
            running_router(one, two) as router,
        ):
            listed = (await router.client.get("/v1/models")).json()
            assert listed["object"] == "list"
            owners = {card["id"]: card["owned_by"] for card in listed["data"]}
            assert owners == {"base": "one", "sql/v1": "one", "poems": "two"}
            for path in ("/v1/models/sql/v1", "/v1/models/sql%2Fv1"):
                assert (await router.client.get(path)).json()["owned_by"] == "one"
            missing = await router.client.get("/v1/models/none")
            assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")

    uvloop.run(check())


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v1/chat/completions", lambda body: body["error"]["code"] == "model_not_found"),
        ("/v1/completions", lambda body: body["error"]["param"] == "model"),
        ("/v1/responses", lambda body: body["error"]["code"] == "model_not_found"),
        ("/v1/messages", lambda body: (body["type"], body["error"]["type"]) == ("error", "not_found_error")),
        ("/api/chat", lambda body: "none" in body["error"]),
    ],
)
def test_an_unknown_model_is_404_in_the_shape_of_the_endpoint(path: str, said: object) -> None:
    async def check() -> None:
        async with StubBackend() as one, running_router(one) as router:
            answer = await router.client.post(path, json={"model": "none"})
            assert answer.status_code == 404
            assert said(answer.json()), answer.text  # type: ignore[operator]
            assert one.seen == []

    uvloop.run(check())


def test_a_model_must_be_named_where_servers_have_different_ones() -> None:
    async def check() -> None:
        async with StubBackend("one") as one, StubBackend("two") as two, running_router(one, two) as router:
            assert (await router.ask(model=None)).status_code == 200
            two.models = ("other",)
            await until(lambda: _models_of(router, two.url, ["other"]))
            answer = await router.ask(model=None)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")

    uvloop.run(check())


async def _models_of(router: object, url: str, models: list[str]) -> bool:
    return bool((await router.states())[url]["models"] == models)  # type: ignore[attr-defined]


def test_an_adapter_that_is_loaded_or_unloaded_is_noticed() -> None:
    async def check() -> None:
        async with StubBackend("one") as one, running_router(one) as router:
            assert (await router.ask(model="late")).status_code == 404
            one.models = ("m", "late")
            await until(lambda: _models_of(router, one.url, ["late", "m"]))
            assert (await router.ask(model="late")).json() == {"from": "one"}
            one.models = ("m",)
            await until(lambda: _models_of(router, one.url, ["m"]))
            assert (await router.ask(model="late")).status_code == 404

    uvloop.run(check())


def test_a_model_whose_servers_are_away_is_503_and_no_unknown_one() -> None:
    async def check() -> None:
        async with (
            StubBackend("one") as one,
            StubBackend("two", models=("other",)) as two,
            running_router(one, two) as router,
        ):
            two.ready = 503
            await until(lambda: _not_ready(router, two.url))
            away = await router.ask(model="other")
            assert (away.status_code, away.headers["retry-after"]) == (503, "5")
            assert (await router.ask(model="none")).status_code == 404
            assert "other" not in (await router.client.get("/v1/models")).text

    uvloop.run(check())


async def _not_ready(router: object, url: str) -> bool:
    return not (await router.states())[url]["ready"]  # type: ignore[attr-defined]


def test_names_in_the_list_take_the_place_of_the_servers_own(tmp_path: Path) -> None:
    async def check() -> None:
        async with StubBackend("one", models=("secret", "m")) as one:
            path = tmp_path / "list.yaml"
            path.write_text(json.dumps({"backends": [{"url": one.url, "models": ["m", "extra"]}]}))
            async with running_router(static_backends=(), dynamic_config_yaml=str(path)) as router:
                cards = (await router.client.get("/v1/models")).json()["data"]
                assert [(card["id"], card["owned_by"]) for card in cards] == [("extra", "unknown"), ("m", "one")]
                assert (await router.ask(model="secret")).status_code == 404
                assert (await router.ask(model="extra")).status_code == 200

    uvloop.run(check())


def test_a_server_whose_models_are_not_understood_gets_nothing_and_keeps_what_waits() -> None:
    async def check() -> None:
        going_on = asyncio.Event()

        async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: object) -> None:
            await going_on.wait()
            await json_answer("one")(reader, writer, seen)  # type: ignore[arg-type]

        async with StubBackend("one", behaviour=behave) as one, running_router(one) as router:
            waiting = asyncio.create_task(router.ask())
            await until(lambda: len(one.seen) == 1)
            one.models_page = b"{}"
            await until(lambda: _not_ready(router, one.url))
            asked = one.probes
            await until(lambda: one.probes > asked + 12)
            assert (await router.states())[one.url]["reason"] == "Its /v1/models is not OpenAI's."
            going_on.set()
            assert (await waiting).json() == {"from": "one"}

    uvloop.run(check())
