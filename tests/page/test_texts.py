"""A model that makes no answers: its page compares texts, and orders them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.serve import QuireServe
from tests.offline.test_token_values import with_vocabulary
from tests.page.visitor import PHONE, Visitor, faults_of_all_looks

pytestmark = pytest.mark.long("operations")

SHOWN = "document.querySelectorAll('#scores li').length"
LABELLED = {
    "id": "mood",
    "max_model_len": 64,
    "pooling": {"tasks": ["classify"], "generates": False, "labels": ["sad", "glad"]},
}


@pytest.fixture(scope="module")
def encoder(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[QuireServe]:
    directory = with_vocabulary(tmp_path_factory.mktemp("bert"), "BertModel")
    pooling = ("--pooler-config", json.dumps({"pooling_type": "MEAN"}))
    with QuireServe(str(directory), "--port", "0", "--served-model-name", "minilm", *pooling) as server:
        server.wait_ready()
        yield server


def test_texts_are_compared_and_ordered(browser: Any, encoder: QuireServe) -> None:
    """As the endpoint orders them; a text that is too long is told, and another may follow."""
    with Visitor(browser, encoder, key="", bypass_csp=True) as visitor:
        page = visitor.page
        visitor.wait_for("document.documentElement.dataset.makes === 'texts'")
        assert "48 dimensions" in page.inner_text("#texts-about")
        assert not page.is_visible("#composer")
        page.fill("#first-text", "abc de")
        page.fill("#other-texts", "bad cab\n\nabc de\nface")
        page.click("#compare")
        visitor.wait_for(f"{SHOWN} === 3")
        body = {"model": "minilm", "query": "abc de", "documents": ["bad cab", "abc de", "face"]}
        found = httpx.post(f"{encoder.url}/rerank", json=body, timeout=60).json()["results"]
        lines = page.locator("#scores li").all_inner_texts()
        assert [line.split("\n")[-1] for line in lines] == [each["document"]["text"] for each in found]
        assert lines[0].startswith("1.0000")
        assert page.inner_text("#texts-figures").startswith("3 texts, ")
        page.fill("#other-texts", "abc " * 600)
        page.click("#compare")
        visitor.wait_for("!document.querySelector('#texts-problem').hidden")
        problem = page.inner_text("#texts-problem")
        assert re.fullmatch(r"A text has [\d,]+ tokens: the model reads 512\. Shorten it\.", problem), problem
        page.fill("#other-texts", "abc de")
        page.press("#other-texts", "Tab")
        page.keyboard.press("Enter")
        visitor.wait_for(f"{SHOWN} === 1")
        assert [fault for fault in faults_of_all_looks(page) if fault[0] in ("serious", "critical")] == []


def test_labels_are_shown_by_their_probabilities(browser: Any, encoder: QuireServe) -> None:
    """On a phone, where nothing is wider than the window."""
    with Visitor(browser, encoder, key="", size=PHONE, lists_models=False) as visitor:
        page = visitor.page
        page.unroute("**/v1/models")
        page.route("**/v1/models", lambda route: route.fulfill(json={"data": [LABELLED]}))
        answer = {"data": [{"label": "glad", "probs": [0.25, 0.75]}], "usage": {"total_tokens": 4}}
        page.route("**/classify", lambda route: route.fulfill(json=answer))
        page.reload()
        visitor.wait_for("document.documentElement.dataset.makes === 'texts'")
        assert not page.is_visible("#other-texts")
        page.fill("#first-text", "I loved it.")
        page.click("#compare")
        visitor.wait_for(f"{SHOWN} === 2")
        assert [line.split() for line in page.locator("#scores li").all_inner_texts()] == [
            ["0.7500", "glad"],
            ["0.2500", "sad"],
        ]
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
