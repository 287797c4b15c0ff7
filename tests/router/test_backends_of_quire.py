"""Real servers of Quire behind the router, their engines scripted: streams, errors, traces and TLS as they are."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import openai
import pytest
import uvloop

from quire.errors import ConfigError
from quire.foundation.config.router import RouterConfig
from quire.serving.api.request_traces import open_traces
from quire.serving.router.fleet import Fleet
from tests.api.server import resolved, running
from tests.api.test_request_traces import PARENT, TRACE, Traced, http_collector
from tests.api.test_tls import Files, files
from tests.engine.test_client_liveness import ManualClock
from tests.router.stubs import RouterUnderTest, StubBackend, running_router, until

__all__ = ["files"]


def in_front_of(url: str, check: Any, **settings: Any) -> None:
    async def run() -> None:
        async with running_router(static_backends=(url,), **settings) as router:
            await check(router)

    uvloop.run(run())


def test_openais_client_gets_streams_and_errors_through_the_router(tmp_path: Path) -> None:
    with running(tmp_path, enable_request_id_headers=True) as server:

        async def check(router: RouterUnderTest) -> None:
            client = openai.AsyncOpenAI(base_url=router.url + "/v1", api_key="none", max_retries=0)
            assert [model.id async for model in client.models.list()] == ["alias", "tiny"]
            stream = await client.completions.create(model="alias", prompt="a", max_tokens=5, stream=True)
            assert "".join([chunk.choices[0].text async for chunk in stream]) == "bcdef"
            with pytest.raises(openai.BadRequestError, match="max_tokens"):
                await client.completions.create(model="tiny", prompt="a", max_tokens=-1)
            with pytest.raises(openai.NotFoundError):
                await client.completions.create(model="none", prompt="a")
            raw = await client.completions.with_raw_response.create(
                model="tiny", prompt="a", max_tokens=1, extra_headers={"X-Request-Id": "mine"}
            )
            assert raw.headers.get_list("x-request-id") == ["mine"]
            assert len(raw.headers.get_list("date")) == 1
            await client.close()

        in_front_of(server.url, check)
        server.assert_all_free()


def test_a_client_that_leaves_frees_the_servers_engine(tmp_path: Path) -> None:
    with running(tmp_path, step_s=0.01) as server:

        async def check(router: RouterUnderTest) -> None:
            body = {"model": "tiny", "prompt": "a", "max_tokens": 200, "stream": True, "ignore_eos": True}
            async with router.client.stream("POST", "/v1/completions", json=body) as answer:
                async for _ in answer.aiter_raw():
                    break
            await until(lambda: router.router._app.num_open == 0)
            await asyncio.to_thread(server.assert_all_free)

        in_front_of(server.url, check)


def test_a_servers_span_is_the_child_of_the_callers_through_the_router(tmp_path: Path) -> None:
    received: list[Any] = []
    with http_collector(received.append) as endpoint:
        traces = open_traces(resolved(tmp_path, otlp_traces_endpoint=endpoint))
        assert traces is not None
        with running(tmp_path, traces=traces) as server:
            traced = Traced(server, traces, received)

            async def check(router: RouterUnderTest) -> None:
                headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "v=1", "X-Request-Id": "routed-1"}
                body = {"model": "tiny", "prompt": "a", "max_tokens": 2}
                assert (await router.client.post("/v1/completions", json=body, headers=headers)).status_code == 200

            in_front_of(server.url, check)
            span = traced.spans("routed-1")["llm_request"]
            assert (span.trace_id.hex(), span.parent_span_id.hex(), span.trace_state) == (TRACE, PARENT, "v=1")


needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl")


@needs_openssl
def test_servers_with_tls_are_asked_by_name_and_must_prove_it(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        async with tls_stub(files) as one:
            trusting = {"backend_ssl_ca_certs": str(files.authority)}
            async with running_router(one, **trusting) as router:
                assert (await router.ask()).json() == {"from": "stub"}
            async with running_router(one, ready=False) as router:
                await until(lambda: _complains(router, one.url, "certificate verify failed"))
            port = one.url.rpartition(":")[2]
            one.url = f"https://localhost:{port}"  # the certificate is for 127.0.0.1
            async with running_router(one, ready=False, **trusting) as router:
                await until(lambda: _complains(router, one.url, "Hostname mismatch"))
                assert (await router.ask()).status_code == 503
            assert len(one.seen) == 1

    uvloop.run(check())


async def _complains(router: RouterUnderTest, url: str, what: str) -> bool:
    return what in (await router.states())[url]["reason"]


@needs_openssl
def test_a_router_with_a_certificate_serves_https_alone(files: Files) -> None:
    import httpx

    async def check() -> None:
        trust = ssl.create_default_context(cafile=str(files.authority))
        settings = {"ssl_keyfile": str(files.key), "ssl_certfile": str(files.certificate)}
        async with StubBackend() as one, running_router(one, ready=False, **settings) as router:
            url = router.url.replace("http:", "https:")
            async with httpx.AsyncClient(verify=trust, base_url=url) as client:
                await until(lambda: _answers(client.get("/ready")))
                assert (await client.post("/v1/completions", json={"model": "m"})).json() == {"from": "stub"}
            assert one.seen[0].headers["x-forwarded-proto"] == "https"
            with pytest.raises(httpx.TransportError):
                await router.client.get("/health")

    uvloop.run(check())


async def _answers(asking: Coroutine[Any, Any, Any]) -> bool:
    return bool((await asking).status_code == 200)


def test_certificates_that_cannot_be_read_are_said_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "no.pem").write_text("no certificate")
    for name in ("no.pem", "missing.pem"):
        with pytest.raises(ConfigError, match="--backend-ssl-ca-certs"):
            Fleet(RouterConfig(backend_ssl_ca_certs=str(tmp_path / name)), ManualClock())


def tls_stub(files: Files) -> StubBackend:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.certificate, files.key)
    return StubBackend(tls=context)
