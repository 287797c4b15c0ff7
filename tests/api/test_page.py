"""The page at `/` is whole, comes from here alone, and says so to browsers."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urljoin

import quire.serving.api
from quire.serving.api.page_files import PageFiles
from tests.api.server import Server

DIRECTORY = Path(quire.serving.api.__file__).parent / "page"
FORBIDDEN = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function")
LOADED = re.compile(r"""(?:from |import\(|new URL\(|url\()"?(\.?/?[\w/.-]+\.(?:js|css|woff2))""")
NOT_SERVED = {"index.html", "katex/LICENSE", "katex/README.md"}


def files_of(server: Server) -> dict[str, str]:
    """Every file that the page loads, or that these load, by name."""
    page = server.get("/")
    waiting = re.findall(r'(?:src|href)="(page/[^"]+)"', page.text)
    found: dict[str, str] = {}
    while waiting:
        address = waiting.pop()
        name = address.split("/", 2)[2]
        if name not in found:
            answer = server.get("/" + address)
            assert answer.status_code == 200, address
            assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
            assert answer.headers["x-content-type-options"] == "nosniff"
            found[name] = answer.text
            waiting += [urljoin(address, target) for target in LOADED.findall(answer.text)]
    return found


def test_it_loads_each_file_that_there_is_and_no_other(server: Server) -> None:
    there = {path.relative_to(DIRECTORY).as_posix() for path in DIRECTORY.rglob("*") if path.is_file()}
    assert {*files_of(server)} == there - NOT_SERVED


def test_its_policy_lets_no_script_in_but_its_own(server: Server) -> None:
    page = server.get("/")
    policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["connect-src"] == policy["style-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert policy["frame-ancestors"] == "'none'"
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", page.text)


def test_nothing_that_is_written_becomes_markup(server: Server) -> None:
    for name, text in files_of(server).items():
        if name.endswith(".js") and "/" not in name:
            assert [word for word in FORBIDDEN if word in text] == [], name


def test_files_are_read_in_one_sitting() -> None:
    own = [path for path in DIRECTORY.iterdir() if path.is_file()]
    assert {path.name for path in own if len(path.read_text().splitlines()) > 200} == set()


def test_another_version_asks_again_and_no_other_file_is_served(server: Server) -> None:
    answer = server.get("/page/of-another-version/main.js")
    assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-cache")
    for name in ("index.html", "app.py", "..%2fapp.py", "%2e%2e%2fapp.py", "main.js%00", ""):
        assert server.get(f"/page/{PageFiles().version}/{name}").status_code == 404, name
