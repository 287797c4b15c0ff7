"""What the router says of itself: health, readiness, its metrics, and the load it reads from servers' metrics."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from quire.serving.router.backend import ScrapedLoad
from quire.serving.router.prober import parse_load
from tests.router.stubs import RouterUnderTest, StubBackend, json_answer, raw, running_router, until

DOCS = Path(__file__).parents[2] / "docs" / "router.md"
OF_VLLM = b"""\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 4.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000",num_gpu_blocks_override="None"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="500",num_gpu_blocks_override="None"} 1.0
"""


def test_the_page_has_the_documented_names_types_and_labels() -> None:
    async def check() -> str:
        async with StubBackend("one") as one, StubBackend("two") as two, running_router(one, two) as router:
            await router.ask()
            one.behaviour = two.behaviour = raw()
            await router.ask()
            return (await router.client.get("/metrics")).text

    families = [f for f in text_string_to_metric_families(uvloop.run(check())) if f.name.startswith("quire:")]
    found = {}
    for family in families:
        labels = sorted({name for sample in family.samples for name in sample.labels} - {"le"})
        assert family.samples, family.name
        found[family.name] = (family.type, ", ".join(f"`{label}`" for label in labels), family.documentation)
    rows = re.findall(r"^\| `(quire:router_\w+)` \| (\w+) \| (.*?) \| (.*) \|$", DOCS.read_text(), re.M)
    assert {name: tuple(rest) for name, *rest in rows} == found


def test_requests_are_counted_by_server_model_key_and_status() -> None:
    async def check() -> None:
        async with StubBackend() as one, running_router(one, api_key=("k",)) as router:
            headers = {"Authorization": "Bearer k"}
            for _ in range(3):
                await router.ask(headers=headers)
            one.behaviour = json_answer("one", 422)
            await router.ask(headers=headers)
            await router.ask(model="none", headers=headers)
            await router.ask()
            await router.client.get("/v1/models", headers=headers)

            def count(backend: str, model: str, key: str, status: int) -> str:
                labels = f'backend="{backend}",key="{key}",model_name="{model}",status="{status}"'
                return f"quire:router_requests_total{{{labels}}}"

            assert await router.metric(count(one.url, "m", "key-1", 200)) == 3
            assert await router.metric(count(one.url, "m", "key-1", 422)) == 1
            assert await router.metric(count("", "", "key-1", 404)) == 1, "names that exist nowhere are no labels"
            assert await router.metric(count("", "", "", 401)) == 1
            histogram = f'quire:router_request_seconds_count{{backend="{one.url}"}}'
            assert await router.metric(histogram) == 4
            assert await router.metric("quire:router_choice_seconds_count") == 4

    uvloop.run(check())


def test_states_of_servers_are_shown() -> None:
    async def check() -> None:
        async with (
            StubBackend("one", models=("m", "n")) as one,
            StubBackend("two") as two,
            running_router(one, two, cb_failure_threshold=1, routing_logic="roundrobin") as router,
        ):
            waiting = asyncio.Event()
            one.behaviour = raw(wait=waiting)
            asking = asyncio.create_task(router.ask(model="n"))
            await until(lambda: len(one.seen) == 1)
            assert await state(router, "backend_requests", one) == 1
            assert await state(router, "backend_models", one) == 2
            assert await state(router, "backend_connections", one) >= 1
            waiting.set()
            await asking
            assert await state(router, "circuit_open", one) == 1
            assert await state(router, "circuit_open", two) == 0
            two.ready = 503
            await until(lambda: _is(router, two, 0))
            two.ready = 200
            await until(lambda: _is(router, two, 1))

    uvloop.run(check())


async def state(router: RouterUnderTest, name: str, backend: StubBackend) -> float:
    return await router.metric(f'quire:router_{name}{{backend="{backend.url}"}}')


async def _is(router: RouterUnderTest, backend: StubBackend, ready: float) -> bool:
    return await state(router, "backend_ready", backend) == ready


def test_it_is_healthy_as_long_as_it_runs_and_ready_while_a_server_is() -> None:
    async def check() -> None:
        async with StubBackend() as one, running_router(one) as router:
            for path in ("/health", "/ping", "/ready"):
                assert (await router.client.get(path)).status_code == 200
            assert (await router.client.head("/ready")).content == b""
            one.ready = 503
            await until(lambda: _status(router, "/ready", 503))
            assert (await router.client.get("/ready")).headers["retry-after"]
            assert (await router.client.get("/health")).status_code == 200
            one.ready = 404  # vLLM has no /ready: its /health is asked
            await until(lambda: _status(router, "/ready", 200))

    uvloop.run(check())


async def _status(router: RouterUnderTest, path: str, status: int) -> bool:
    return (await router.client.get(path)).status_code == status


def test_a_router_that_is_told_to_end_finishes_what_it_has_and_takes_nothing_new() -> None:
    async def check() -> None:
        going_on = asyncio.Event()

        async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: object) -> None:
            await going_on.wait()
            await json_answer("one")(reader, writer, seen)  # type: ignore[arg-type]

        async with StubBackend(behaviour=slow) as one, running_router(one) as router:
            begun = asyncio.create_task(router.ask())
            await until(lambda: len(one.seen) == 1)
            router.router.stop()
            await until(lambda: _status(router, "/ready", 503))
            refused = await router.ask()
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            going_on.set()
            assert (await begun).json() == {"from": "one"}

    uvloop.run(check())


def test_load_is_read_from_metrics_of_all_engines_under_either_name() -> None:
    assert parse_load(OF_VLLM) == ScrapedLoad(5, 4, 24_000, 0.5)
    older = OF_VLLM.replace(b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc")
    assert parse_load(older) == parse_load(OF_VLLM)


@pytest.mark.parametrize(
    "metrics",
    [
        b"", b"\xff\x00", b"vllm:num_requests_running", b"vllm:num_requests_running{} nan",
        b"vllm:num_requests_running 1e999\nvllm:num_requests_waiting -4\nvllm:kv_cache_usage_perc 1.2.3",
        b'vllm:cache_config_info{block_size="x",num_gpu_blocks="None"} 1.0',
    ],
)  # fmt: skip
def test_metrics_that_say_nothing_are_no_load(metrics: bytes) -> None:
    assert parse_load(metrics) == ScrapedLoad()


def test_a_server_that_others_keep_busy_is_passed_over() -> None:
    async def check() -> None:
        async with StubBackend("one") as one, StubBackend("two") as two, running_router(one, two) as router:
            one.metrics = "vllm:num_requests_running 40\nvllm:num_requests_waiting 10\n"
            (busy, _) = router.router._fleet.backends
            await until(lambda: busy.load.running == 40)
            answers = {(await router.ask(f"{number} " * 100)).json()["from"] for number in range(8)}
            assert answers == {"two"}
            one.metrics = ""
            await until(lambda: busy.load == ScrapedLoad())

    uvloop.run(check())


def test_a_server_of_quire_is_read_as_it_is(tmp_path: Path) -> None:
    from tests.api.server import running

    with running(tmp_path, num_blocks=128) as server:
        server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})  # then it has said how many blocks it has
        load = parse_load(server.get("/metrics").content)
        assert load.cache_tokens == 128 * 16
        assert (load.running, load.waiting) == (0, 0)
