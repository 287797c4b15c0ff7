"""Conversations are kept, branch and go on past the model's context."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.faults.server import FaultyServer
from tests.e2e.serve import QuireServe
from tests.page.visitor import KEY, Visitor

pytestmark = pytest.mark.long("operations")

CAPITAL, NUMBERS = "What is the capital of France?", "Sort these numbers: 7, 3, 5."
ITALY = "What is the capital of Italy?"
LONG = "Number {}. " + "Please tell me about the fox and the hen in the big wood by the river. " * 6
"""A question of about a hundred tokens."""
TITLES = "[...document.querySelectorAll('#conversations .title')].map(one => one.textContent)"
NO_ROOM = """() => {
  IDBObjectStore.prototype.put = () => { throw new DOMException("", "QuotaExceededError"); };
}"""
SAID = "[...document.querySelectorAll('.turn.user .words')].map(one => one.textContent)"


def download(visitor: Visitor, button: str, directory: Path) -> Path:
    """The file that a button gives."""
    with visitor.page.expect_download() as found:
        visitor.page.click(button)
    path = directory / found.value.suggested_filename
    found.value.save_as(path)
    return path


def test_turns_are_edited_and_asked_again_and_none_is_lost(visitor: Visitor) -> None:
    page = visitor.page
    page.fill("[name=temperature]", "0")
    visitor.ask(CAPITAL)
    visitor.ask(NUMBERS)
    page.locator(".turn.user button", has_text="Edit").first.click()
    page.fill(".editor textarea", ITALY)
    with page.expect_request("**/v1/chat/completions") as asked:
        page.press(".editor textarea", "Enter")
    visitor.wait_for("document.querySelector('.regenerate')")
    assert asked.value.post_data_json["messages"] == [{"role": "user", "content": ITALY}]
    assert page.evaluate(SAID) == [ITALY]
    page.reload()
    visitor.wait_for(f"{SAID}.length === 1")
    assert page.inner_text(".turn.user .branches").split() == ["‹", "2/2", "›"]
    page.click(".branches [aria-label='Earlier version']")
    assert page.evaluate(SAID) == [CAPITAL, NUMBERS]
    assert "Paris" in visitor.answers[0]
    page.locator(".regenerate").first.click()
    visitor.wait_for(
        "document.querySelector('#send').textContent === 'Send' && document.querySelector('.assistant .branches')"
    )
    assert page.evaluate(SAID) == [CAPITAL]
    page.click(".assistant .branches [aria-label='Earlier version']")
    assert page.evaluate(SAID) == [CAPITAL, NUMBERS]
    visitor.ask(ITALY)
    assert page.evaluate(SAID) == [CAPITAL, NUMBERS, ITALY]


def test_conversations_are_listed_named_deleted_exported_and_imported(
    browser: Any, server: QuireServe, tmp_path: Path
) -> None:
    with Visitor(browser, server, has_settings=False) as visitor:
        page = visitor.page
        assert page.is_hidden("#settings")
        for question in (CAPITAL, NUMBERS):
            page.click("#new-chat")
            visitor.ask(question)
        visitor.wait_for(
            f"JSON.stringify({TITLES}) === {json.dumps(json.dumps([NUMBERS, CAPITAL], separators=(',', ':')))}"
        )
        page.locator(".title", has_text="France").click()
        assert "Paris" in visitor.answers[-1]
        page.locator(".item-buttons button", has_text="Rename").click()
        page.fill("#conversations input", "On France")
        page.press("#conversations input", "Enter")
        visitor.wait_for(f"{TITLES}.includes('On France')")
        one = json.loads(download(visitor, ".item-buttons button:has-text('Export')", tmp_path).read_text())
        assert [kept["title"] for kept in one["conversations"]] == ["On France"]
        every = download(visitor, "#export-all", tmp_path)
        assert "page-key" not in every.read_text()
        page.locator(".item-buttons button", has_text="Delete").click()
        visitor.wait_for(f"{TITLES}.length === 1")
        assert visitor.answers == []
        page.locator("#conversations-note button", has_text="Undo").click()
        visitor.wait_for(f"{TITLES}.length === 2")
        assert "Paris" in visitor.answers[-1]
    with Visitor(browser, server, has_settings=False) as other:
        other.page.set_input_files("#import-file", every)
        other.wait_for(f"{TITLES}.includes('On France')")
        other.page.locator(".title", has_text="On France").click()
        assert "Paris" in other.answers[-1]
        (tmp_path / "no.json").write_text('{"format": "quire-conversations", "conversations": [{"turns": 5}]}')
        other.page.set_input_files("#import-file", tmp_path / "no.json")
        other.wait_for("document.querySelector('#conversations-note').textContent.includes('has no conversations')")
        messages = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two."}]
        (tmp_path / "messages.json").write_text(json.dumps({"messages": messages}))
        other.page.set_input_files("#import-file", tmp_path / "messages.json")
        other.wait_for(f"{TITLES}.includes('One?')")


def test_a_browser_without_room_says_so_and_the_conversation_goes_on(browser: Any, server: QuireServe) -> None:
    with Visitor(browser, server, has_settings=False) as visitor:
        page = visitor.page
        page.evaluate(
            "() => { IDBObjectStore.prototype.put = () => { throw new DOMException('', 'QuotaExceededError'); } }"
        )
        visitor.ask(CAPITAL)
        visitor.wait_for("document.querySelector('#conversations-note').textContent.includes('keeps no more')")
        page.click("#new-chat")
        page.locator(".title", has_text="France").click()
        assert "Paris" in visitor.answers[-1]


def test_a_conversation_goes_on_past_the_context(visitor: Visitor) -> None:
    page = visitor.page
    page.fill("[name=max_tokens]", "4")
    gauge = "Number(document.querySelector('#gauge').getAttribute('aria-valuenow'))"
    number, before = 0, 0
    while not page.locator(".turn .error").count():
        number += 1
        visitor.ask(LONG.format(number))
        now = page.evaluate(gauge)
        assert now > before or number > 10
        before = now
        assert number < 25
    assert re.search(r"The conversation has [\d,]+ tokens: .*2,048", page.inner_text(".turn .error p"))
    page.locator(".ways button", has_text="Leave out the oldest turns").click()
    visitor.wait_for(
        "document.querySelector('#send').textContent === 'Send' && !document.querySelector('.turn .error')"
    )
    assert page.locator(".divider").count() == 1
    while number < 25:
        number += 1
        with page.expect_request("**/v1/chat/completions") as asked:
            visitor.ask(LONG.format(number))
        sent = asked.value.post_data_json["messages"]
        assert sent[-1]["content"] == LONG.format(number).strip()
        assert page.locator(".turn .error").count() == 0
    assert len(page.evaluate(SAID)) == 25 > len(sent) // 2
    page.reload()
    visitor.wait_for(f"{SAID}.length === 25")
    assert page.locator(".divider").count() == 1
    page.click("#new-chat")
    assert page.evaluate(gauge) == 0


def test_a_selection_stays_while_an_answer_streams(visitor: Visitor, server: FaultyServer) -> None:
    page = visitor.page
    text = "document.querySelector('.turn.assistant .text')?.innerText ?? ''"
    with server.unhurried():
        visitor.begin("Write a short story about a fox.")
        visitor.wait_for(f"({text}).length > 30")
        selected = page.evaluate("""() => {
          const node = document.querySelector(".turn.assistant .text p").firstChild, range = document.createRange();
          range.setStart(node, 2);
          range.setEnd(node, 20);
          getSelection().removeAllRanges();
          getSelection().addRange(range);
          return [getSelection().toString(), node.data.length];
        }""")
        visitor.wait_for("document.querySelector('#send').textContent === 'Send'")
    assert len(selected[0]) == 18
    assert page.evaluate(f"({text}).length") > selected[1]
    assert page.evaluate("getSelection().toString()") == selected[0]


def test_an_answer_that_breaks_off_says_so_in_words(visitor: Visitor) -> None:
    chunk = {"choices": [{"index": 0, "delta": {"content": "Half an"}, "finish_reason": None}], "usage": None}
    page = visitor.page
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(body=f"data: {json.dumps(chunk)}\n\n", content_type="text/event-stream"),
    )
    visitor.ask("Hello")
    assert visitor.answers == ["Half an"]
    assert "connection was lost" in page.inner_text(".turn .error")
    assert "tokens/s" not in page.inner_text(".figures")  # one piece says nothing about speed


def test_the_router_serves_the_page(browser: Any, server: QuireServe) -> None:
    flags = ("--static-backends", server.url, "--backend-api-key", KEY, "--port", "0")
    with (
        QuireServe(*flags, command=("quire.cli.main", "route")) as router,
        Visitor(browser, router.wait_ready()) as visitor,
    ):
        visitor.wait_for("document.querySelector('#model').value === 'quill'")
        visitor.ask(CAPITAL)
        assert "Paris" in visitor.answers[-1]
        assert visitor.page.is_hidden("#engine")
        assert visitor.page.is_hidden("#docs-link")
