"""What models write is drawn: formulas, tables, lists of tasks; and nothing of it is eaten."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.page.visitor import Visitor

pytestmark = pytest.mark.long("operations")

FORMULAS = r"""Let \(a^2 + b_1\) and $x_i * y_i$ cost $5 and $10, so \$3.
\[
  \int_0^1 f(x)\,dx
+ 1
\]
- then $$e^{i\pi}$$ and

\begin{align}
a &= b
\end{align}

```math
\frac{1}{2}
```
This one is \(not closed, \{1\}"""
WRITTEN = ["\\(a^2 + b_1\\)", "$x_i * y_i$", "\\[\n  \\int_0^1 f(x)\\,dx\n+ 1\n\\]", "$$e^{i\\pi}$$"]
TASKS = "- [x] done\n- [ ] to *do*\n- plain"
TABLE = "| Name of it | Value |\n|---|--:|\n| a | $\\alpha$ |"


def drawn(visitor: Visitor, text: str, script: str) -> Any:
    """What a script says of `made`, the nodes of a text."""
    return visitor.page.evaluate(
        """async ([text, script]) => {
          const main = document.querySelector("script[src]").src;
          const { markdown } = await import(main.replace("main.js", "markdown.js"));
          const made = document.createElement("div");
          made.append(markdown(text));
          return SCRIPT;
        }""".replace("SCRIPT", script),
        [text, script],
    )


def test_formulas_are_drawn_and_what_is_none_stays_as_it_is_written(visitor: Visitor) -> None:
    page = visitor.page
    chunk = {"choices": [{"index": 0, "delta": {"content": FORMULAS}, "finish_reason": "stop"}], "usage": None}
    body = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    visitor.ask("Hello")
    visitor.wait_for("document.querySelectorAll('.math .katex').length === 6")
    visitor.wait_for("document.fonts.check('16px KaTeX_Main')")
    sources = page.eval_on_selector_all(".math", "all => all.map(one => one.dataset.source)")
    assert sources[:4] == WRITTEN
    assert sources[4].startswith("\\begin{align}")
    text = page.inner_text(".turn.assistant .text")
    assert "cost $5 and $10, so $3." in text
    assert "This one is \\(not closed, \\{1\\}" in text
    assert visitor.copied("Copy") == FORMULAS


def test_what_is_no_formula_for_katex_is_shown_as_source(visitor: Visitor) -> None:
    drawn(visitor, "$x$", "made")
    visitor.wait_for("globalThis.katex")
    assert drawn(visitor, r"\(\frac{1\)", "made.querySelector('.math').textContent") == r"\(\frac{1\)"
    assert drawn(visitor, r"\(\href{javascript:alert(1)}{x}\)", "made.querySelectorAll('a').length") == 0


def test_tasks_and_tables(visitor: Visitor) -> None:
    ticks = "[...made.querySelectorAll('li')].map(one => [one.querySelector('input')?.checked ?? null, one.innerText])"
    assert drawn(visitor, TASKS, ticks) == [[True, "done"], [False, "to do"], [None, "plain"]]
    assert drawn(visitor, TABLE, "[...made.querySelectorAll('td')].map(one => one.className)") == ["", "right"]
    assert drawn(visitor, "```\nif a and b\n```", "made.querySelectorAll('code span').length") == 0
