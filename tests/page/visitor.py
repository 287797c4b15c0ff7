"""Somebody who looks at the page, and sees to it that nothing goes wrong unnoticed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from tests.e2e.serve import QuireServe

KEY = "page-key"
HEADERS = {"Authorization": f"Bearer {KEY}"}
WAIT_MS = 120_000
"""What only a failure needs."""
MAY_FAIL = ("400", "401", "ERR_CONNECTION", "ERR_INCOMPLETE", "ERR_EMPTY_RESPONSE")
"""What a browser says on its own of answers that tests want."""


class Visitor:
    """A browser's window; a context that judges at its end what the page asked for and what went wrong in it.

    Args:
        browser: Playwright's.
        server: What serves the page.
        key: Kept by the page already; "" for none.
        size: Of the window, in pixels.
        has_settings: Whether the settings are open already, as somebody left them; else they are as at the first visit.
        lists_models: Whether the page gets the list of models; else it waits for it.
        options: Of Playwright's context.

    Attributes:
        page: Playwright's page.
    """

    def __init__(
        self,
        browser: Any,
        server: QuireServe,
        key: str = KEY,
        size: tuple[int, int] = (1440, 900),
        has_settings: bool = True,
        lists_models: bool = True,
        **options: Any,
    ) -> None:
        self.server = server
        self._elsewhere: list[str] = []
        self._wrong: list[str] = []
        viewport = {"width": size[0], "height": size[1]}
        self._context = browser.new_context(viewport=viewport, **options)
        self._context.grant_permissions(["clipboard-read", "clipboard-write"])
        if key:
            self._context.add_init_script(f"sessionStorage['quire-key'] ??= '{key}'")
        if has_settings:
            self._context.add_init_script("localStorage['quire-side'] ??= 'settings'")
        self._context.on("request", self._note_request)
        self.page = self._context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.page.on("pageerror", lambda error: self._wrong.append(str(error)))
        self.page.on("console", self._note_console)
        if not lists_models:
            self.page.route("**/v1/models", lambda route: None)
        self.page.goto(server.url + "/")

    def _note_request(self, request: Any) -> None:
        if not request.url.startswith((f"{self.server.url}/", "data:", "blob:")):
            self._elsewhere.append(request.url)

    def _note_console(self, message: Any) -> None:
        if message.type in ("error", "warning") and not any(word in message.text for word in MAY_FAIL):
            self._wrong.append(message.text)

    def ask(self, text: str) -> None:
        """Send a message, and wait for the whole answer."""
        self.begin(text)
        self.wait_for("document.querySelector('#send').textContent === 'Send'")

    def begin(self, text: str) -> None:
        """Send a message."""
        self.page.fill("#text", text)
        self.page.press("#text", "Enter")

    def wait_for(self, condition: str) -> None:
        """Until an expression is true in the page, whose policy keeps Playwright from waiting there."""
        deadline = time.monotonic() + WAIT_MS / 1000
        while not self.page.evaluate(condition):
            assert time.monotonic() < deadline, condition
            self.page.wait_for_timeout(30)

    @property
    def answers(self) -> list[str]:
        """What the answers say, as they are shown."""
        return [text.strip() for text in self.page.locator(".turn.assistant .text").all_inner_texts()]

    @property
    def facts(self) -> dict[str, str]:
        """The picture's figures by their names."""
        names, values = (self.page.locator(f".facts {part}").all_inner_texts() for part in ("dt", "dd"))
        return dict(zip(names, values, strict=True))

    def copied(self, button: str) -> str:
        """What the last button of this name puts into the clipboard."""
        buttons = ".assistant .foot button"
        self.page.locator(buttons, has_text=button).last.click()
        self.wait_for(f"[...document.querySelectorAll('{buttons}')].every(one => one.textContent !== {button!r})")
        text: str = self.page.evaluate("navigator.clipboard.readText()")
        return text

    def __enter__(self) -> Visitor:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._context.close()
        if kind is None:
            assert self._elsewhere == []
            assert self._wrong == []


DESKTOP, PHONE = (1440, 900), (390, 844)
LOOKS = [(scheme, size) for scheme in ("light", "dark") for size in (DESKTOP, PHONE)]


def faults(page: Any) -> list[tuple[str, str, str]]:
    """What axe finds, and whether something is wider than the window. Its page's context has `bypass_csp`."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    violations = axe.Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    found = [(one["impact"], one["id"], one["nodes"][0]["html"]) for one in violations]
    fits = page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    return found if fits else [*found, ("serious", "width", "")]


def faults_of_all_looks(page: Any) -> list[tuple[str, str, str]]:
    """`faults`, light and dark, on a desktop and on a phone."""
    found = []
    for scheme, (width, height) in LOOKS:
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": height})
        found += faults(page)
    return found


def counts(server: QuireServe) -> dict[str, int]:
    """What the engine holds."""
    engine: dict[str, int] = httpx.get(f"{server.url}/debug/counts", headers=HEADERS, timeout=30).json()["engine"]
    return engine


@contextmanager
def load(server: QuireServe, streams: int) -> Iterator[None]:
    """So many clients that read one long answer after the other, half of them with a prompt in common."""
    over = threading.Event()

    def read(number: int) -> None:
        prompt = "You are a kind helper. " * 20 + "Go on. " if number % 2 else f"{number} birds and {number + 3} towns"
        body = {"prompt": prompt, "max_tokens": 1_200, "ignore_eos": True, "stream": True}
        while not over.is_set():
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=HEADERS, timeout=60) as answer:
                for _ in answer.iter_lines():
                    if over.is_set():
                        return

    threads = [threading.Thread(target=read, args=(number,)) for number in range(streams)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def write_adapter(directory: Path) -> None:
    """An adapter of the built-in model."""
    tensors = {}
    for layer in range(8):
        at = f"base_model.model.model.layers.{layer}.mlp.down_proj"
        tensors[f"{at}.lora_A.weight"] = torch.full((4, 896), 0.01)
        tensors[f"{at}.lora_B.weight"] = torch.full((384, 4), 0.01)
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
