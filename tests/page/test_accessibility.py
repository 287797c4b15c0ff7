"""Nobody is kept out: axe finds no serious fault, and all can be done by keyboard."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.serve import QuireServe
from tests.page.visitor import DESKTOP, PHONE, Visitor, faults

pytestmark = pytest.mark.long("operations")

STREAM = "text/event-stream"
TEXT = "\\[x^2\\]\n\n- [x] done\n\n| a |\n|---|\n| b |\n\n```python\ncode\n```\n\n> said"
DELTA = {"choices": [{"index": 0, "delta": {"reasoning": "Well …", "content": TEXT}, "finish_reason": None}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 2_000, "completion_tokens": 40}}
ALL_KINDS = "".join(f"data: {json.dumps(part)}\n\n" for part in (DELTA, USAGE))
"""An answer of all kinds of text that fills the context and breaks off."""


@pytest.mark.parametrize(
    ("scheme", "size", "view"),
    [("light", DESKTOP, "both"), ("dark", DESKTOP, "both"), ("light", PHONE, "chat"), ("dark", PHONE, "engine")],
)
def test_axe_finds_nothing_serious(
    browser: Any, server: QuireServe, scheme: str, size: tuple[int, int], view: str
) -> None:
    has_settings = (scheme, size) == ("light", DESKTOP)  # else the list of conversations is open there
    with Visitor(
        browser, server, size=size, has_settings=has_settings, color_scheme=scheme, bypass_csp=True
    ) as visitor:
        page = visitor.page
        if has_settings:
            page.check("[name=logprobs]")
            page.check("[name=use_tools]")
        page.evaluate("document.querySelector('[name=temperature]').value = '0'")
        visitor.ask("What is the weather in Paris?")
        page.route("**/v1/chat/completions", lambda route: route.fulfill(body=ALL_KINDS, content_type=STREAM))
        visitor.ask("Show me everything.")
        page.locator(".regenerate").last.click()
        visitor.wait_for("document.querySelector('.math .katex') && document.querySelector('.branches')")
        page.locator(f"input[value={view}]").check(force=True)
        assert faults(page) == []


def test_everything_is_reached_by_the_keyboard(browser: Any, server: QuireServe) -> None:
    with Visitor(browser, server, size=PHONE) as visitor:
        page = visitor.page
        assert page.evaluate("document.activeElement.id") == "text"
        page.keyboard.type("What is the capital of France?")
        page.keyboard.press("Enter")
        visitor.wait_for("document.querySelector('.regenerate')")
        reached = set()
        for _ in range(30):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
        wanted = "model toggle-settings give-key turns text send new-chat Regenerate curl"
        assert set(wanted.split()) <= reached
        page.focus("#toggle-settings")
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.name") == "system"
        page.keyboard.press("Escape")
        assert page.evaluate("document.activeElement.id") == "toggle-settings"


def test_nothing_moves_for_those_who_want_it_still(browser: Any, server: QuireServe) -> None:
    with Visitor(browser, server, reduced_motion="reduce") as visitor:
        visitor.page.fill("[name=min_tokens]", "1000")
        visitor.begin("Write a short story about a fox.")
        visitor.wait_for("document.querySelector('.waiting') && document.querySelector('.turn .text').innerText")
        assert visitor.page.evaluate("document.getAnimations().length") == 0
