"""A real server of the built-in model with an adapter, and a real browser that may reach nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.faults.server import FaultyServer
from tests.page.visitor import KEY, Visitor, write_adapter

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
BLOCKS = 800


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if program is None:
        pytest.skip("chromium is not installed (Debian: apt-get install chromium)")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def server(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyServer]:
    adapter = tmp_path_factory.mktemp("poet")
    write_adapter(adapter)
    names = ("--served-model-name", "quill", "second-name", "--enable-lora", "--lora-modules", f"poet={adapter}")
    sizes = ("--num-gpu-blocks-override", str(BLOCKS), "--max-num-seqs", "4")
    developer = {"QUIRE_SERVER_DEV_MODE": "1"}
    flags = ("quill", *names, *sizes, "--port", "0", "--api-key", KEY)
    with FaultyServer(tmp_path_factory.mktemp("faults") / "fault", *flags, environment=developer) as server:
        server.wait_ready()
        yield server


@pytest.fixture
def visitor(browser: Any, server: FaultyServer) -> Iterator[Visitor]:
    """Somebody with the key at a large window."""
    with Visitor(browser, server) as visitor:
        yield visitor
