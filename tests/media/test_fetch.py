"""Fetching images: allowed hosts alone, at addresses that were checked, within limits of size, time and redirects."""

from __future__ import annotations

import asyncio
import ipaddress
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from quire.errors import RequestError
from quire.media import fetch
from quire.media.addresses import AllowedHosts
from quire.media.fetch import MediaAccess

CONTENT = b"the image"
HERE = ("127.0.0.1/32", "images.example")


class Host(BaseHTTPRequestHandler):
    """A host that answers by path, and remembers what it was called."""

    called: list[str] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.called.append(str(self.headers["Host"]))
        kind, _, rest = self.path[1:].partition("/")
        if kind == "to":
            self.send_response(302)
            self.send_header("Location", rest)
            self.end_headers()
        elif kind == "endless":
            self.send_response(200)
            self.end_headers()
            try:
                while True:
                    self.wfile.write(bytes(2**16))
            except OSError:
                pass
        elif kind == "slow":
            self.send_response(200)
            self.end_headers()
            try:
                while not stopping.wait(0.02):
                    self.wfile.write(b"x")
            except OSError:
                pass
        elif kind == "status":
            self.send_response(int(rest))
            self.end_headers()
        else:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(CONTENT)

    def log_message(self, format: str, *args: Any) -> None:
        pass


stopping = threading.Event()


@pytest.fixture(scope="module")
def host() -> Iterator[int]:
    """The port of a host on this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Host)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_address[1]
    stopping.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Addresses by names, in place of what name servers say; each look-up takes the first list of several."""
    names: dict[str, list[str]] = {}

    async def getaddrinfo(loop: Any, host: str, port: int, **options: Any) -> list[Any]:
        if host in names:
            found = names[host].pop(0) if len(names[host]) > 1 else names[host][0]
            return [(0, 0, 0, "", (address, port)) for address in found.split()]
        try:
            return [(0, 0, 0, "", (str(ipaddress.ip_address(host)), port))]
        except ValueError:
            raise OSError("not known") from None

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    return names


def get(url: str, *hosts: str) -> bytes:
    return asyncio.run(MediaAccess(hosts or HERE).fetch(url))


def refusal(url: str, *hosts: str) -> str:
    with pytest.raises(RequestError) as caught:
        get(url, *hosts)
    return caught.value.message


def test_allowed_hosts_are_asked_by_their_names_at_their_addresses(host: int, resolved: dict[str, list[str]]) -> None:
    resolved["images.example"] = ["127.0.0.1"]
    assert get(f"http://127.0.0.1:{host}/a.png") == CONTENT
    assert get(f"http://images.example:{host}/a.png") == CONTENT
    assert get(f"http://Images.Example:{host}/to//a.png") == CONTENT
    assert Host.called[-1] == f"images.example:{host}"


def test_a_name_server_that_changes_its_mind_gains_nothing(host: int, resolved: dict[str, list[str]]) -> None:
    """The first answer is checked and connected to; the second one would be used by whoever asked again."""
    resolved["images.example"] = ["127.0.0.1", "10.0.0.1"]
    assert get(f"http://images.example:{host}/a.png") == CONTENT
    assert resolved["images.example"] == ["10.0.0.1"]
    assert "not public" in refusal(f"http://images.example:{host}/a.png")


@pytest.mark.parametrize(
    "addresses",
    [
        "10.1.2.3", "169.254.169.254", "192.168.1.1", "172.16.0.1", "100.64.0.1", "0.0.0.0", "224.0.0.1",
        "255.255.255.255", "::1", "fe80::1", "fd00::1", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe",
        "2002:a9fe:a9fe::", "93.184.215.14 10.1.2.3",
    ],
)  # fmt: skip
def test_names_that_lead_to_addresses_that_are_not_public_are_refused(
    addresses: str, resolved: dict[str, list[str]]
) -> None:
    resolved["images.example"] = [addresses]
    assert "not public" in refusal("http://images.example/a.png", "images.example")


@pytest.mark.parametrize(
    "address",
    [
        "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "0x7f.0.0.1", "127.0.1", "[::1]", "[::ffff:127.0.0.1]",
        "[0:0:0:0:0:ffff:7f00:1]", "169.254.169.254", "2852039166", "[fe80::1%25eth0]", "localhost", "example.com",
        "images.example.attacker.example", "xn--mgba3a4f16a",
    ],
)  # fmt: skip
def test_hosts_that_are_not_named_are_refused_however_they_are_written(
    address: str, resolved: dict[str, list[str]]
) -> None:
    message = refusal(f"http://{address}/a.png", "images.example")
    assert "not one of the server's --allowed-media-domains" in message or "no URL of an image" in message


def test_redirects_are_checked_like_urls(host: int, resolved: dict[str, list[str]]) -> None:
    here = f"http://127.0.0.1:{host}"
    assert get(f"{here}/to/{here}/to/{here}/a.png") == CONTENT
    for elsewhere in ("http://169.254.169.254/", "http://127.0.0.2/", "http://example.com/", "http://2130706434/"):
        assert "not one of" in refusal(f"{here}/to/{elsewhere}")
    assert "no URL" in refusal(f"{here}/to/file:///etc/passwd")
    assert "no URL" in refusal(f"{here}/to/gopher://127.0.0.1:{host}/")
    loop = f"{here}/to/" * 5 + f"{here}/a.png"
    assert "leads on more than" in refusal(loop)


def test_bodies_are_bounded_in_size_and_time(host: int, monkeypatch: pytest.MonkeyPatch) -> None:
    here = f"http://127.0.0.1:{host}"
    monkeypatch.setattr(fetch, "MAX_BYTES", 2**20)
    assert "more than 1 MiB" in refusal(f"{here}/endless")
    monkeypatch.setattr(fetch, "FETCH_SECONDS", 0.3)
    assert "within 0.3 s" in refusal(f"{here}/slow")
    assert "status 404" in refusal(f"{here}/status/404")
    assert "could not be fetched" in refusal("http://127.0.0.1:1/a.png")
    assert "more than 1 MiB" in _local_refusal("data:;base64," + "A" * 2**21)


def _local_refusal(url: str) -> str:
    with pytest.raises(RequestError) as caught:
        MediaAccess().read(url)
    return caught.value.message


def test_nothing_is_fetched_and_no_file_is_read_unless_the_server_was_told_to() -> None:
    with pytest.raises(RequestError, match="--allowed-media-domains"):
        asyncio.run(MediaAccess().fetch("http://example.com/a.png"))
    assert "--allowed-local-media-path" in _local_refusal("file:///etc/passwd")
    assert MediaAccess().read("data:,plain%20text") == b"plain text"


def test_entries_may_be_names_addresses_and_networks() -> None:
    hosts = AllowedHosts(("Images.Example.", "10.0.0.0/8", "[::1]"))
    for allowed in ("images.example", "10.9.9.9", "::1", "167772161"):
        hosts.check(allowed)
    for other in ("11.0.0.1", "example", "::2", "sub.images.example"):
        with pytest.raises(RequestError):
            hosts.check(other)
