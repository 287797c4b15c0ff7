"""Images in the playground: attached, pasted and dropped, shown, sent, and kept with their conversation."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.serve import QuireServe
from tests.media.checkpoints import file_of, make_llava, picture
from tests.page.visitor import Visitor, faults_of_all_looks

pytestmark = pytest.mark.long("operations")
PNG = file_of(picture(seed=1))
BRING = """([how, data, name, type]) => {
  const bytes = Uint8Array.from(atob(data), character => character.charCodeAt(0)), given = new DataTransfer();
  given.items.add(new File([bytes], name, { type }));
  const options = { bubbles: true, cancelable: true, clipboardData: given, dataTransfer: given };
  const event = how === "paste" ? new ClipboardEvent("paste", options) : new DragEvent("drop", options);
  document.querySelector("#text").dispatchEvent(event);
}"""
DRAWN = "[...document.querySelectorAll('{}')].filter(one => one.width > 1).length"
SHOWN, ATTACHED = DRAWN.format(".turn.user canvas"), DRAWN.format("#attached canvas")
BLIND = "This model reads text alone. Choose one that sees images, or leave them out."


@pytest.fixture(scope="module")
def seeing(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[QuireServe]:
    model = make_llava(tmp_path_factory.mktemp("seeing") / "model")
    with QuireServe("--model", str(model), "--served-model-name", "tiny", "--device", "cpu", "--port", "0") as server:
        yield server.wait_ready()


def bring(visitor: Visitor, how: str, content: bytes = PNG, name: str = "fox.png", kind: str = "image/png") -> None:
    visitor.page.evaluate(BRING, [how, base64.b64encode(content).decode(), name, kind])


def test_images_are_shown_sent_and_kept(browser: Any, seeing: QuireServe, tmp_path: Path) -> None:
    (tmp_path / "fox.png").write_bytes(PNG)
    with Visitor(browser, seeing, key="", bypass_csp=True) as visitor:
        page = visitor.page
        visitor.wait_for("!document.querySelector('#attach').hidden")
        page.fill("[name=max_tokens]", "5")
        page.set_input_files("#attach-file", tmp_path / "fox.png")
        visitor.wait_for(f"{ATTACHED} === 1")
        bring(visitor, "paste", file_of(picture(2_500, 60), "JPEG"), "long.jpg", "image/jpeg")
        visitor.wait_for(f"{ATTACHED} === 2")
        bring(visitor, "drop", name="hen.png")
        visitor.wait_for(f"{ATTACHED} === 3")
        page.click("[aria-label='Remove hen.png']")
        bring(visitor, "drop", b"text", "a.txt", "text/plain")
        visitor.wait_for("!document.querySelector('#attach-problem').hidden")
        assert page.inner_text("#attach-problem").startswith("a.txt is no image")
        with page.expect_request("**/v1/chat/completions") as asked:
            visitor.ask("What?")
        first, second, text = asked.value.post_data_json["messages"][0]["content"]
        assert first["image_url"]["url"] == "data:image/png;base64," + base64.b64encode(PNG).decode()
        assert second["image_url"]["url"].startswith("data:image/jpeg;base64,")
        assert text == {"type": "text", "text": "What?"}
        assert page.inner_text(".figures").count("+ 5 tokens")
        assert page.evaluate(f"[{SHOWN}, {ATTACHED}]") == [2, 0]
        page.reload()
        visitor.wait_for(f"{SHOWN} === 2")
        page.locator(".turn.user button", has_text="Edit").click()
        page.fill(".editor textarea", "And now?")
        with page.expect_request("**/v1/chat/completions") as again:
            page.press(".editor textarea", "Enter")
        visitor.wait_for("document.querySelector('#send').textContent === 'Send'")
        content = again.value.post_data_json["messages"][0]["content"]
        assert content == [first, second, {"type": "text", "text": "And now?"}]
        bring(visitor, "paste")
        visitor.wait_for(f"{ATTACHED} === 1")
        page.click("#close-settings")
        assert faults_of_all_looks(page) == []


def test_a_model_that_reads_text_alone_says_so(visitor: Visitor) -> None:
    visitor.wait_for("document.querySelector('#model').value !== ''")
    assert not visitor.page.is_visible("#attach")
    bring(visitor, "drop")
    visitor.wait_for("!document.querySelector('#attach-problem').hidden")
    assert visitor.page.inner_text("#attach-problem") == BLIND
    assert visitor.page.evaluate(ATTACHED) == 0
