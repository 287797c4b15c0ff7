"""A real Prometheus scrapes a real server under load; every expression that is shipped is asked and has an answer."""

from __future__ import annotations

import math
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.deploy.promql import DEPLOY, GUIDE_ALERTS, shipped
from tests.e2e.serve import QuireServe

ON_GPUS = "quire:gpu_"
SCRAPES = 12


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def prometheus(server: str, directory: Path) -> Iterator[str]:
    """The address of one that scrapes a server with the shipped configuration, only faster."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed (Debian: apt-get install prometheus)")
    settings: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    for name in settings["rule_files"]:
        shutil.copy(DEPLOY / "prometheus" / name, directory)
    (directory / "guides.yml").write_text(GUIDE_ALERTS)
    settings["rule_files"].append("guides.yml")
    settings["global"] = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"}
    settings["scrape_configs"][0]["static_configs"][0]["targets"] = [server.removeprefix("http://")]
    (directory / "prometheus.yml").write_text(yaml.safe_dump(settings))
    address = f"127.0.0.1:{free_port()}"
    flags = [f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data"]
    with (directory / "log").open("w") as log:
        process = subprocess.Popen([program, *flags, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        wait_until(lambda: is_ready(f"http://{address}"), (directory / "log").read_text)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(30)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def wait_until(condition: Any, complaint: Any, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, complaint()
        time.sleep(0.2)


def ask(url: str, expression: str) -> list[float]:
    """The values of an expression now; numbers that are none are left out."""
    answer = httpx.get(f"{url}/api/v1/query", params={"query": expression}, timeout=30).json()
    assert answer["status"] == "success", (expression, answer)
    values = [float(sample["value"][1]) for sample in answer["data"]["result"]]
    return [value for value in values if not math.isnan(value)]


def silent(url: str) -> dict[str, str]:
    """Expressions that have no answer, by where they are shipped."""
    return {
        place: expression
        for place, expression in shipped().items()
        if ON_GPUS not in expression and not ask(url, expression)
    }


def keep_asking(server: QuireServe, stop: threading.Event) -> None:
    """Requests of all kinds: equal prompts, which are cached; several choices; a stream; one that is wrong."""
    story = "Once upon a time there was a machine that counted everything it did. " * 4
    while not stop.is_set():
        server.post("/v1/completions", {"prompt": story, "max_tokens": 16, "n": 2})
        server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8})
        server.post("/v1/completions", {"prompt": "a", "max_tokens": 8, "stream": True})
        server.post("/v1/completions", {"prompt": "a", "max_tokens": -1})


@pytest.mark.long("operations")
def test_every_expression_has_an_answer_after_a_load(tmp_path: Path) -> None:
    stop = threading.Event()
    with (
        QuireServe("--port", "0", "--max-model-len", "512") as server,
        prometheus(server.wait_ready().url, tmp_path) as url,
    ):
        load = threading.Thread(target=keep_asking, args=(server, stop))
        load.start()
        try:
            count = "count_over_time(up[10m])"
            wait_until(lambda: sum(ask(url, count)) >= SCRAPES, lambda: ask(url, count))
            wait_until(lambda: silent(url) == {}, lambda: silent(url))
            groups = httpx.get(f"{url}/api/v1/rules", timeout=30).json()["data"]["groups"]
            assert {g["name"] for g in groups} == {"quire", "quire-recorded", "quire-guide-names", "vllm_alerts"}
            assert [rule for group in groups for rule in group["rules"] if rule["health"] != "ok"] == []
            generated = "vllm:generation_tokens_total"
            wait_until(lambda: ask(url, generated)[0] > 100, lambda: ask(url, generated))
        finally:
            stop.set()
            load.join(60)
