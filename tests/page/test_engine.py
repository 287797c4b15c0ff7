"""The live picture against a real server: it says what the engine holds, and asks only while it is seen."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.e2e.serve import QuireServe
from tests.page.conftest import BLOCKS
from tests.page.visitor import HEADERS, Visitor, counts, load

pytestmark = pytest.mark.long("operations")

LIVE = "document.querySelector('#stream-state').textContent === 'Live'"
HOW = "[...document.querySelectorAll('[aria-label=\"Running requests\"] .how')].map(one => one.textContent)"
MAP = "document.querySelector('canvas.map').getAttribute('aria-label')"
HELD = f"{MAP}.match(/(\\d+) held, (\\d+) shared/).slice(1).map(Number).reduce((one, other) => one + other)"

NOTE_WHAT_IS_SAID = """() => {
  const said = window.said = [], state = document.querySelector("#stream-state");
  new MutationObserver(() => said.push(state.textContent)).observe(state, { childList: true, subtree: true });
}"""
NOTE_WHAT_IS_ASKED = """() => {
  const asked = window.asked = [], fetch = window.fetch;
  window.fetch = (path, options) => { asked.push(path); return fetch(path, options); };
}"""
"""From now on, by the page itself: Playwright tells of requests some time later."""


def is_fact(name: str, value: str) -> str:
    """JavaScript that says whether the picture has this figure."""
    return f"[...document.querySelectorAll('.facts div')].some(one => one.textContent === '{name}{value}')"


def sums(visitor: Visitor) -> dict[str, int]:
    """Blocks of each kind, as the map says it."""
    found = re.findall(r"(\d+) (free|cached|held|shared)", visitor.page.evaluate(MAP))
    return {kind: int(number) for number, kind in found}


def test_it_moves_under_load_and_agrees_with_the_counts(visitor: Visitor, server: QuireServe) -> None:
    page = visitor.page
    visitor.wait_for(LIVE)
    with load(server, 6):
        visitor.wait_for(f"/ [1-9]\\d* shared/.test({MAP})")
        with paused(server, running=4, waiting=2) as now:
            visitor.wait_for("document.querySelectorAll('[aria-label=\"Running requests\"] .row').length === 4")
            visitor.wait_for("document.querySelectorAll('[aria-label=\"Waiting requests\"] .row').length === 2")
            visitor.wait_for(f"{HELD} === {now['blocks'] - now['free_blocks']}")
            assert (visitor.facts["Running"], visitor.facts["Waiting"]) == ("4", "2")
            assert sum(sums(visitor).values()) == BLOCKS
            assert whose_blocks(visitor) == 4
        picture = page.evaluate("document.querySelector('canvas.map').toDataURL()")
        progress = page.evaluate(HOW)
        visitor.wait_for(f"document.querySelector('canvas.map').toDataURL() !== {picture!r}")
        visitor.wait_for(f"JSON.stringify({HOW}) !== JSON.stringify({json.dumps(progress)})")
        visitor.wait_for("document.querySelectorAll('.chart polyline').length >= 3")
    visitor.wait_for(is_fact("Running", "0"))
    visitor.wait_for(f"/ 0 held, 0 shared/.test({MAP})")
    idle = counts(server)
    assert idle["free_blocks"] == idle["blocks"] == BLOCKS
    assert sums(visitor)["cached"] > 0
    assert visitor.facts["Preemptions"] == str(idle["preemptions"])


@contextmanager
def paused(server: QuireServe, running: int, waiting: int) -> Iterator[dict[str, int]]:
    """The counts while nothing moves, at a moment with so many requests: otherwise some end and others begin in the
    half second that a frame may be old."""

    def call(path: str) -> None:
        httpx.post(f"{server.url}/{path}", headers=HEADERS, timeout=30).raise_for_status()

    deadline = time.monotonic() + 60
    while True:  # a client that has an answer has not asked again yet
        call("pause?mode=keep")
        now = counts(server)
        if (now["running"], now["waiting"]) == (running, waiting):
            break
        call("resume")
        assert time.monotonic() < deadline, now
        time.sleep(0.1)
    try:
        yield now
    finally:
        call("resume")


TIPS = """() => {
  const canvas = document.querySelector("canvas.map"), { left, top, width, height } = canvas.getBoundingClientRect();
  const tips = [];
  for (let y = 3; y < height; y += 7) for (let x = 3; x < width; x += 7) {  // a cell is 7 pixels or more
    canvas.dispatchEvent(new PointerEvent("pointermove", { clientX: left + x, clientY: top + y }));
    tips.push([left + x, top + y, document.querySelector("#tip").textContent]);
  }
  return tips;
}"""
"""What the map says of each cell, and where that is."""


def whose_blocks(visitor: Visitor) -> int:
    """How many requests the map names under the pointer, of those that run."""
    page = visitor.page
    listed = set(page.locator("[aria-label='Running requests'] .who").all_inner_texts())
    found: set[str] = set()
    for x, y, tip in page.evaluate(TIPS):
        if (match := re.search(r"Requests? (.*)", tip)) and not found.issuperset(match[1].split(", ")):
            page.mouse.move(x, y)
            assert page.inner_text("#tip") == tip
            found.update(match[1].split(", "))
    assert found <= listed
    return len(found)


def test_the_map_is_told_to_the_keyboard(visitor: Visitor) -> None:
    visitor.wait_for(LIVE)
    visitor.wait_for(f"/ [1-9]\\d* cached/.test({MAP})")
    visitor.page.focus("canvas.map")
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft"):
        visitor.page.keyboard.press(key)
    assert re.match("Block 1: (free|held)", visitor.page.inner_text(".card [role=status]"))


def test_nothing_is_asked_while_nobody_sees_it(visitor: Visitor) -> None:
    page = visitor.page
    visitor.wait_for(LIVE)
    page.locator("input[value=chat]").check(force=True)
    visitor.wait_for("document.querySelector('#stream-state').dataset.state === 'off'")
    page.evaluate(NOTE_WHAT_IS_ASKED)
    time.sleep(1.5)
    assert page.evaluate("window.asked") == []
    page.locator("input[value=engine]").check(force=True)
    visitor.wait_for(LIVE)
    assert page.evaluate("window.asked") == ["engine/frames"]


def test_it_says_when_the_stream_ends_and_connects_again(browser: Any, server: QuireServe) -> None:
    with Visitor(browser, server) as visitor:
        visitor.wait_for(LIVE)
        visitor.page.evaluate(NOTE_WHAT_IS_SAID)
        os.kill(server.children()["api"], signal.SIGKILL)
        visitor.wait_for("window.said.some(text => text.includes('trying again in'))")
        visitor.wait_for(LIVE)
        number = "document.querySelectorAll('.facts dd')[5].textContent"
        before = visitor.page.evaluate(number)
        visitor.ask("What is the capital of France?")
        visitor.wait_for(f"{number} !== {before!r}")
