"""The playground against a real server: what is typed is asked, and what is answered is shown as it comes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.e2e.faults.server import FaultyServer
from tests.e2e.serve import QuireServe
from tests.page.visitor import KEY, Visitor

pytestmark = pytest.mark.long("operations")

CAPITAL = "What is the capital of France?"
NOTE_WHAT_IS_SHOWN = """() => {
  const shown = window.shown = [], list = document.querySelector("#turns");
  const note = () => shown.push(list.querySelector(".turn.assistant .text")?.innerText.trim());
  new MutationObserver(note).observe(list, { childList: true, subtree: true });
}"""
ALL_THAT_IS_KEPT = """async () => {
  const main = document.querySelector("script[src]").src;
  const { ConversationStore } = await import(main.replace("main.js", "conversation_store.js"));
  return await new ConversationStore().exported() + JSON.stringify(localStorage) + document.cookie;
}"""
"""Beyond the tab."""


def test_an_answer_streams_in_with_what_it_took(visitor: Visitor, server: FaultyServer) -> None:
    page = visitor.page
    page.fill("[name=temperature]", "0")
    page.evaluate(NOTE_WHAT_IS_SHOWN)
    with server.unhurried():
        visitor.ask("Write a short story about a fox.")
    (whole,) = visitor.answers
    shown = [text for text in dict.fromkeys(page.evaluate("window.shown")) if text]
    assert len(shown) >= 3
    assert all(later.startswith(earlier) for earlier, later in pairwise(shown))
    assert shown[-1] == whole
    figures = page.inner_text(".figures")
    assert re.search(r"\d+ ms to the first token · [\d.]+ tokens/s · \d+ .*\+ \d+ tokens", figures), figures
    assert page.inner_text("#said") == f"Answer: {whole}"  # what a screen reader is told, once
    visitor.ask(CAPITAL)
    assert visitor.answers[-1] == "The capital of France is Paris."


def test_an_answer_is_stopped_and_asked_for_again(visitor: Visitor) -> None:
    page = visitor.page
    page.fill("[name=stop]", "never to be found")
    page.fill("[name=temperature]", "2")
    page.fill("[name=min_tokens]", "1500")
    with page.expect_request("**/v1/chat/completions") as asked:
        visitor.begin("Write a story, a very long one.")
    sent = asked.value.post_data_json
    assert (sent["temperature"], sent["stop"]) == (2, ["never to be found"])
    visitor.wait_for("(document.querySelector('.turn.assistant .text')?.innerText.length ?? 0) > 5")
    page.click("#send")
    visitor.wait_for("document.querySelector('#send').textContent === 'Send'")
    assert "stopped" in page.inner_text(".figures")
    page.fill("[name=temperature]", "0")
    page.fill("[name=min_tokens]", "")
    page.fill("[name=max_tokens]", "7")
    with page.expect_request("**/v1/chat/completions") as again:
        page.click(".regenerate")
    visitor.wait_for("document.querySelector('#send').textContent === 'Send'")
    assert again.value.post_data_json["messages"] == sent["messages"]
    assert len(visitor.answers) == 1
    assert "+ 7 tokens · cut at max tokens" in page.inner_text(".figures")
    page.click("#new-chat")
    assert visitor.answers == []


def test_the_chosen_model_or_adapter_answers(visitor: Visitor) -> None:
    page = visitor.page
    page.fill("[name=system]", "You are terse.")
    page.fill("[name=max_tokens]", "3")
    visitor.wait_for("document.querySelectorAll('#model option').length === 3")
    groups = page.eval_on_selector_all("#model option", "all => all.map(one => [one.parentElement.label, one.text])")
    assert groups == [["Models", "quill"], ["Models", "second-name"], ["Adapters", "poet"]]
    page.select_option("#model", "poet")
    with page.expect_request("**/v1/chat/completions") as asked:
        visitor.ask(CAPITAL)
    sent = asked.value.post_data_json
    assert sent["model"] == "poet"
    assert [message["role"] for message in sent["messages"]] == ["system", "user"]
    assert "+ 3 tokens" in page.inner_text(".figures")
    assert page.inner_text(".turn.assistant h3") == "poet"


def test_who_asks_before_the_list_of_models_is_there_is_told_who_answers(browser: Any, server: QuireServe) -> None:
    with Visitor(browser, server, lists_models=False) as visitor:
        page = visitor.page
        page.evaluate("""() => {
          const named = window.named = [], list = document.querySelector("#turns");
          const note = () => named.push(list.querySelector(".turn.assistant h3")?.textContent);
          new MutationObserver(note).observe(list, { childList: true, subtree: true, characterData: true });
        }""")
        visitor.ask(CAPITAL)
        assert page.inner_text("#model") == ""
        assert set(page.evaluate("window.named.filter(name => name !== undefined)")) == {"The model", "quill"}
        assert page.inner_text(".turn.assistant h3") == "quill"


def test_an_answer_has_the_form_of_the_schema(visitor: Visitor) -> None:
    page = visitor.page
    schema = {
        "type": "object",
        "properties": {"animal": {"enum": ["heron", "otter"]}, "legs": {"type": "integer"}},
        "required": ["animal", "legs"],
        "additionalProperties": False,
    }
    page.select_option("[name=format]", "json_schema")
    page.fill("[name=schema]", "{")
    page.fill("#text", "Hello")
    page.press("#text", "Enter")
    assert page.inner_text("#problem-schema").startswith("This is not JSON")
    assert page.evaluate("document.activeElement.name") == "schema"
    assert visitor.answers == []  # nothing was asked
    page.fill("[name=schema]", json.dumps(schema))
    visitor.ask("Hello")
    jsonschema.validate(json.loads(visitor.answers[-1]), schema)


def test_a_tool_is_called_and_its_result_is_used(visitor: Visitor) -> None:
    page = visitor.page
    page.check("[name=use_tools]")
    page.fill("[name=temperature]", "0")
    visitor.ask("What is the weather in Paris?")
    assert page.inner_text(".call h4").startswith("get_weather")
    assert json.loads(page.inner_text(".call pre")) == {"city": "Paris"}
    page.fill(".call textarea", '{"weather": "sunny", "temperature": 21}')
    with page.expect_request("**/v1/chat/completions") as asked:
        page.click(".results")
    visitor.wait_for("document.querySelector('#send').textContent === 'Send'")
    *_, call, result = asked.value.post_data_json["messages"]
    assert result["tool_call_id"] == call["tool_calls"][0]["id"]
    assert "sunny" in visitor.answers[-1]


def test_each_token_says_how_likely_it_was(visitor: Visitor) -> None:
    page = visitor.page
    page.check("[name=logprobs]")
    page.fill("[name=top_logprobs]", "3")
    visitor.ask(CAPITAL)
    tokens = page.locator(".tokens .token")
    assert "".join(tokens.all_inner_texts()) == "The capital of France is Paris.<|im_end|>"
    tokens.nth(1).hover()
    rows = [row.split("\t") for row in page.inner_text("#tip table").splitlines()]
    assert len(rows) == 3
    assert rows[0][0] == "␣capital"
    assert all(re.fullmatch(r"[<\d.]+%", share) for _, share in rows)
    page.focus(".tokens")
    page.keyboard.press("ArrowRight")
    assert page.inner_text(".turn [role=status]").startswith("“ of”, ")
    page.keyboard.press("Escape")
    assert page.is_hidden("#tip")
    page.locator(".foot button", has_text="Tokens").click()
    assert visitor.answers[-1] == "The capital of France is Paris."


def test_a_request_goes_on_in_a_terminal_and_in_python(visitor: Visitor, tmp_path: Path) -> None:
    visitor.page.fill("[name=temperature]", "0")
    visitor.page.fill("[name=min_p]", "0.1")  # which OpenAI's client does not know
    visitor.page.fill("[name=system]", 'It\'s "so": $HOME `x` \\ and\nnew lines')
    visitor.ask(CAPITAL)
    said = visitor.answers[-1]
    environment = {"QUIRE_API_KEY": KEY, "PATH": "/usr/bin:/bin"}
    python = visitor.copied("Python")
    (tmp_path / "asked.py").write_text(python)
    done = subprocess.run([sys.executable, tmp_path / "asked.py"], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == said, done.stderr
    command = visitor.copied("curl")
    assert KEY not in command + python
    if shutil.which("curl"):
        done = subprocess.run(["sh", "-c", command], env=environment, capture_output=True, text=True)
        assert json.loads(done.stdout)["choices"][0]["message"]["content"] == said, done.stderr


HOSTILE = """<img src=x onerror="window.harmed = 1"><script>window.harmed = 1</script>
[a](javascript:window.harmed=1) [b](data:text/html,x) ![c](https://elsewhere.invalid/c.png) <https://d.invalid>

```html
<script>window.harmed = 1</script>
```
| <b>x</b> |
|---|
| <svg onload="window.harmed = 1"> |
"""


def test_what_a_model_writes_is_never_markup(visitor: Visitor) -> None:
    chunk = {"choices": [{"index": 0, "delta": {"content": HOSTILE}, "finish_reason": None}], "usage": None}
    body = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
    page = visitor.page
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    visitor.ask("Hello")
    assert page.locator(".turn .listing pre").inner_text() == "<script>window.harmed = 1</script>"
    assert page.locator(".turn :is(img, script, svg, b, iframe)").count() == 0
    targets = page.eval_on_selector_all(".turn .text a", "all => all.map(one => [one.href, one.rel])")
    assert [target for target, _ in targets] == ["https://elsewhere.invalid/c.png", "https://d.invalid/"]
    assert all("noopener" in relation for _, relation in targets)
    assert page.evaluate("window.harmed") is None


def test_a_heading_has_words(visitor: Visitor) -> None:
    """Streams show the marks before the words."""
    script = """async text => {
      const { markdown } = await import(document.querySelector("script[src]").src.replace("main.js", "markdown.js"));
      const headings = markdown(text).querySelectorAll("h1, h2, h3, h4, h5, h6");
      return [...headings].map(one => `${one.tagName} ${one.textContent}`);
    }"""
    written = "# First #\n\n## \n\n### ##\n\n## C# and #\n\n### Last"
    assert visitor.page.evaluate(script, written) == ["H4 First ", "H5 C# and ", "H6 Last"]


def test_long_texts_without_an_end_take_no_long_time(visitor: Visitor) -> None:
    pieces = [
        "*a ",
        "**",
        "[",
        "`",
        "_a",
        "[x](",
        "<http://",
        "~~",
        "> ",
        "- ",
        "|",
        "#",
        " ",
        "(",
        "``` ",
        "$a ",
        "$$",
        r"\(a ",
        "\\[\n\n",
        "$$\n",
        r"\begin{align}a",
    ]
    script = """async pieces => {
      const { markdown } = await import(document.querySelector("script[src]").src.replace("main.js", "markdown.js"));
      const took = {};
      for (const piece of pieces) {
        const began = performance.now();
        markdown(piece.repeat(20000));
        took[piece] = performance.now() - began;
      }
      return took;
    }"""
    for _ in range(3):  # by the clock on the wall, which goes on while others have the processor
        took: dict[str, float] = visitor.page.evaluate(script, pieces)
        pieces = [piece for piece, ms in took.items() if ms > 3_000]
    assert pieces == []


def test_the_page_asks_for_a_key_where_one_is_needed(browser: Any, server: QuireServe) -> None:
    with Visitor(browser, server, key="") as visitor:
        page = visitor.page
        page.wait_for_selector("#key-dialog[open]")
        assert "Needs an API key" in page.inner_text("#stream-state")
        assert page.is_hidden("#key-refused")
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        page.wait_for_selector("#key-refused:not([hidden])")
        page.fill("#key", KEY)
        page.press("#key", "Enter")
        visitor.wait_for("document.querySelector('#model').value === 'quill'")
        visitor.wait_for("document.querySelector('#stream-state').textContent === 'Live'")
        visitor.ask(CAPITAL)
        assert "Paris" in visitor.answers[-1]
        kept = page.evaluate(ALL_THAT_IS_KEPT)
        assert CAPITAL in kept
        assert KEY not in kept


def test_an_error_is_said_and_the_next_question_goes_on(visitor: Visitor) -> None:
    page = visitor.page
    page.fill("[name=min_p]", "0")
    page.evaluate("document.querySelector('[name=top_k]').min = -9")
    page.fill("[name=top_k]", "-7")
    visitor.ask(CAPITAL)
    assert "top_k" in page.inner_text(".turn .error")
    page.fill("[name=top_k]", "")
    with page.expect_request("**/v1/chat/completions") as asked:
        visitor.ask("Sort these numbers: 7, 3, 5.")
    assert len(asked.value.post_data_json["messages"]) == 1  # the question without an answer is not told again
