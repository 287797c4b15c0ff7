"""Requests that schemathesis makes out of our own OpenAPI document: none ends in a 5xx, and none hangs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.environment import environment
from tests.e2e.serve import QuireServe

FUZZING_S = 60 * float(os.environ.get("SCHEMATHESIS_MINUTES", "1"))
"""As long as two runs take together: one by the document, one by bodies that should pass."""
SLOWEST_S = 40
"""The longest that a request may take while another test has half of the machine. Answers are at most as long as the
small context."""
OWN_ERROR = "AST constructor recursion depth mismatch"
"""CPython 3.11's, where two threads of schemathesis parse source at once (gh-106905): so it has one."""


def served_by_name(node: Any) -> Any:
    """The document with the one model that is served wherever a model is named: made-up names only give 404."""
    if isinstance(node, list):
        return [served_by_name(value) for value in node]
    if not isinstance(node, dict):
        return node
    changed = {name: served_by_name(value) for name, value in node.items()}
    if isinstance(properties := changed.get("properties"), dict) and "model" in properties:
        properties["model"] = {"const": "quill"}
    if isinstance(properties, dict):
        properties.pop("timeout", None)  # a short one is rightly answered with 504
    return changed


COMBINED = frozenset((
    "best_of", "chat_template", "context_management", "continue_final_message", "echo", "guided_choice",
    "guided_grammar", "guided_json", "guided_regex", "guided_whitespace_pattern", "length_penalty",
    "logprob_token_ids", "logprobs", "max_completion_tokens", "min_tokens", "n", "output_config",
    "output_expires_after", "previous_response_id", "priority", "prompt", "prompt_logprobs", "reasoning",
    "reasoning_effort", "repetition_detection", "response_format", "spaces_between_special_tokens",
    "stream_options", "structured_outputs", "suffix", "text", "think", "tool_choice", "tools", "top_logprobs",
    "thinking_token_budget", "truncate_prompt_tokens", "use_beam_search", "vllm_xargs", "add_generation_prompt",
    "include", "tool_calls",
))  # fmt: skip
"""Fields that fit only some others, or some models, which a schema cannot say."""
MESSAGES = {
    "ChatMessage": {
        "type": "object",
        "properties": {"role": {"enum": ["user", "system"]}, "content": {"type": "string", "minLength": 1}},
        "required": ["role", "content"],
        "additionalProperties": False,
    },
    "Message": {
        "type": "object",
        "properties": {"role": {"const": "user"}, "content": {"type": "string", "minLength": 1}},
        "required": ["role", "content"],
        "additionalProperties": False,
    },
}
"""Turns that any conversation may have."""
TEXT = {
    "type": "object",
    "properties": {"prompt": {"type": "string"}},
    "required": ["prompt"],
    "additionalProperties": False,
}
PAUSES = ("/pause", "/resume", "/admin/model")


def without_pauses(document: dict[str, Any]) -> dict[str, Any]:
    """The document without what would make every other request wait: a body of `{}` swaps a model for itself."""
    return {**document, "paths": {path: value for path, value in document["paths"].items() if path not in PAUSES}}


def plausible(node: Any) -> Any:
    """The document with bodies that mostly pass: no fields that must fit others, short texts, tokens that exist."""
    if isinstance(node, list):
        return [plausible(value) for value in node]
    if not isinstance(node, dict):
        return node
    changed = {name: plausible(value) for name, value in node.items()}
    if isinstance(changed.get("title"), str) and changed["title"] in MESSAGES:  # else a field of that name
        return MESSAGES[changed["title"]]
    if changed.get("title") == "TokenizeRequest":
        return TEXT
    if changed.get("title") == "ChatBatchRequest":
        changed["properties"]["messages"]["items"]["minItems"] = 1
    if isinstance(properties := changed.get("properties"), dict):
        required = changed.get("required", ())
        changed["properties"] = {name: v for name, v in properties.items() if name not in COMBINED or name in required}
    match changed.get("type"):
        case "integer" if "maximum" not in changed:
            changed["maximum"] = max(64, changed.get("minimum", 0))
        case "string" if not changed.keys() & {"enum", "const", "pattern", "format"}:
            changed |= {"pattern": "^[ -~]{1,40}$"}
    return changed


@pytest.mark.timeout(FUZZING_S * 3 + 300)
@pytest.mark.long("api")
def test_no_request_breaks_the_server(tmp_path: Path) -> None:
    key = "a key of ours"
    context = ("--max-model-len", "256", "--max-num-seqs", "16")
    with QuireServe("--port", "0", "--api-key", key, *context) as server:
        server.wait_ready()
        headers = {"Authorization": f"Bearer {key}"}
        document = served_by_name(without_pauses(httpx.get(server.url + "/openapi.json").json()))
        paths = set(document["paths"])
        assert {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat"} <= paths
        for number, bodies in enumerate((document, plausible(document))):
            home = tmp_path / str(number)
            home.mkdir()
            (home / "openapi.json").write_text(json.dumps(bodies))
            fuzz(server.url, key, home)
            assert httpx.get(server.url + "/health").status_code == 200
            answer = httpx.post(server.url + "/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=headers)
            assert answer.status_code == 200


def only_own_errors(said: str) -> bool:
    """Whether schemathesis failed by CPython's error alone, which it may print less or more often than it counts it."""
    errors = {name for name, _ in re.findall(r"^ +🚫 (.*Error.*): (\d+)$", said, re.M)}
    return " FAILURES " not in said and errors == {"Runtime Error"} and OWN_ERROR in said


def fuzz(url: str, key: str, home: Path) -> None:
    """Half of the time with the document that lies there."""
    report = home / "report.ndjson"
    for seed in (1, 2):
        run = subprocess.run(
            [
                environment("schemathesis") / "schemathesis", "run", home / "openapi.json", "--url", url,
                "--header", f"Authorization: Bearer {key}", "--checks", "not_a_server_error",
                "--max-time", str(int(FUZZING_S / 2)), "--request-timeout", str(SLOWEST_S), "--workers", "1",
                "--report-ndjson-path", report, "--continue-on-failure", "--no-color",
                "--suppress-health-check", "all", "--generation-database", "none", "--seed", str(seed),
            ],
            capture_output=True, text=True, timeout=FUZZING_S * 3 + 120, check=False, cwd=home,
        )  # fmt: skip
        if OWN_ERROR not in run.stdout:
            break
    print(run.stdout[-4000:], file=sys.stderr)
    assert run.returncode == 0 or only_own_errors(run.stdout), run.stdout[-6000:]
    statuses = Counter(re.findall(r'"status_code": ?(\d+)', report.read_text()))
    print(dict(statuses), file=sys.stderr)
    assert statuses, "how many it sends meanwhile is for the machine to say"
