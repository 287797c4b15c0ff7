"""Requests that schemathesis makes out of our own OpenAPI document: none ends in a 5xx, and none hangs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.environment import environment
from tests.e2e.serve import QuireServe

FUZZING_S = 60
SLOWEST_S = 20
"""The longest that a request may take. Answers are at most as long as the small context."""
OWN_ERROR = "AST constructor recursion depth mismatch"
"""CPython 3.11's, now and then, in schemathesis's own process: another seed then."""


def served_by_name(node: Any) -> Any:
    """The document with the one model that is served wherever a model is named: made-up names only give 404."""
    if isinstance(node, list):
        return [served_by_name(value) for value in node]
    if not isinstance(node, dict):
        return node
    changed = {name: served_by_name(value) for name, value in node.items()}
    if isinstance(properties := changed.get("properties"), dict) and "model" in properties:
        properties["model"] = {"const": "quill"}
    return changed


@pytest.mark.long("api")
def test_no_request_breaks_the_server(tmp_path: Path) -> None:
    key = "a key of ours"
    context = ("--max-model-len", "256", "--max-num-seqs", "16")
    with QuireServe("--port", "0", "--api-key", key, *context) as server:
        server.wait_ready()
        headers = {"Authorization": f"Bearer {key}"}
        document = httpx.get(server.url + "/openapi.json").json()
        (tmp_path / "openapi.json").write_text(json.dumps(served_by_name(document)))
        paths = set(document["paths"])
        assert {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat"} <= paths
        report = tmp_path / "report.ndjson"
        for seed in (1, 2):
            run = subprocess.run(
                [
                    environment("schemathesis") / "schemathesis", "run", tmp_path / "openapi.json", "--url", server.url,
                    "--header", f"Authorization: Bearer {key}", "--checks", "not_a_server_error",
                    "--max-time", str(FUZZING_S), "--request-timeout", str(SLOWEST_S), "--workers", "2",
                    "--report-ndjson-path", report, "--continue-on-failure", "--no-color",
                    "--suppress-health-check", "all", "--generation-database", "none", "--seed", str(seed),
                ],
                capture_output=True, text=True, timeout=FUZZING_S * 3, check=False, cwd=tmp_path,
            )  # fmt: skip
            if OWN_ERROR not in run.stdout:
                break
        print(run.stdout[-4000:], file=sys.stderr)
        assert run.returncode == 0, run.stdout[-6000:]
        assert httpx.get(server.url + "/health").status_code == 200
        answer = httpx.post(server.url + "/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=headers)
        assert answer.status_code == 200
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    assert len(lines) > 100
