"""TLS, with certificates that are made here: served, demanded from clients, and said clearly where it cannot be."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from quire.errors import ConfigError
from quire.foundation.config import ServerConfig
from quire.serving.api.http_server import uvicorn_config
from quire.serving.api.tls import load_tls

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl")


@dataclass(frozen=True)
class Files:
    """Key and certificate files."""

    authority: Path
    key: Path
    certificate: Path


def openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """An authority, and a certificate of it for 127.0.0.1, as a server or as a client."""
    folder = tmp_path_factory.mktemp("tls")
    new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(*new, "-x509", "-subj", "/CN=authority", "-keyout", folder / "a.key", "-out", folder / "a.pem")
    openssl(*new, "-subj", "/CN=server", "-keyout", folder / "s.key", "-out", folder / "s.csr")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    signed = ("-CA", folder / "a.pem", "-CAkey", folder / "a.key", "-CAcreateserial", "-extfile", folder / "names")
    openssl("x509", "-req", "-in", folder / "s.csr", *signed, "-out", folder / "s.pem")
    return Files(folder / "a.pem", folder / "s.key", folder / "s.pem")


@contextmanager
def serving(server: ServerConfig) -> Iterator[str]:
    """The HTTP server of an API process, with an application that says hello."""

    async def hello(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while (message := await receive())["type"] != "lifespan.shutdown":
                await send({"type": message["type"] + ".complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
        await send({"type": "http.response.body", "body": b"hello"})

    config = uvicorn_config(hello, server)
    config.port = 0
    load_tls(config)
    http = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(http.serve()))
    thread.start()
    try:
        while not http.started:
            assert thread.is_alive()
        yield f"https://127.0.0.1:{http.servers[0].sockets[0].getsockname()[1]}/"
    finally:
        http.should_exit = True
        thread.join(20)


def trusting(files: Files, *, own_certificate: bool = False) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(files.authority))
    if own_certificate:
        context.load_cert_chain(files.certificate, files.key)
    return context


def test_a_certificate_is_served(files: Files) -> None:
    server = ServerConfig(ssl_keyfile=str(files.key), ssl_certfile=str(files.certificate))
    with serving(server) as url:
        assert httpx.get(url, verify=trusting(files)).text == "hello"
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(url)
        with pytest.raises(httpx.HTTPError):
            httpx.get(url.replace("https", "http"))


def test_clients_without_a_certificate_are_turned_away_where_one_is_demanded(files: Files) -> None:
    server = ServerConfig(
        ssl_keyfile=str(files.key),
        ssl_certfile=str(files.certificate),
        ssl_ca_certs=str(files.authority),
        ssl_cert_reqs=ssl.CERT_REQUIRED,
    )
    with serving(server) as url:
        assert httpx.get(url, verify=trusting(files, own_certificate=True)).text == "hello"
        with pytest.raises(httpx.HTTPError):
            httpx.get(url, verify=trusting(files))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ssl_keyfile": "k"}, "need --ssl-certfile"),
        ({"ssl_ca_certs": "c"}, "need --ssl-certfile"),
        ({"ssl_certfile": "c", "ssl_cert_reqs": 2}, "--ssl-cert-reqs needs --ssl-ca-certs"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_tls(uvicorn_config(None, ServerConfig(**settings)))


def test_files_that_cannot_be_used_are_said_in_a_line(files: Files) -> None:
    for wrong in (str(files.key), str(files.key.with_name("none"))):
        server = ServerConfig(ssl_keyfile=str(files.key), ssl_certfile=wrong)
        with pytest.raises(ConfigError, match=r"The files of --ssl-keyfile, .* cannot be used: "):
            load_tls(uvicorn_config(None, server))
