"""`--log-format json`: every line of every process is a JSON object."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from quire.foundation.config import Config
from quire.foundation.processes.child_process import ChildProcess
from quire.foundation.processes.launch import LaunchConfig
from tests.e2e.serve import QuireServe


def parsed(log: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.splitlines()]


def test_every_line_of_every_process_is_json_also_when_one_dies() -> None:
    with QuireServe("--port", "0", "--max-model-len", "256", "--log-format", "json") as server:
        server.wait_ready()
        server.post("/v1/completions", {"prompt": "a", "max_tokens": 2}, headers={"X-Request-Id": "first"})
        os.kill(server.children()["engine"], signal.SIGKILL)
        answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 2}, headers={"X-Request-Id": "second"})
        assert answer.status_code == 200
        server.signal()
        assert server.wait() == 0
        server.last_line  # noqa: B018  waits for all lines
        lines = parsed(server.log)
    assert {"supervisor", "api"} <= {line["process"] for line in lines}
    assert all({"time", "level", "pid", "logger", "message"} <= line.keys() for line in lines)
    access = {line["request_id"]: line for line in lines if line["logger"] == "quire.access"}
    assert access["first"]["completion_tokens"] == 2
    assert access.keys() == {"first", "second"}
    assert any("engine process died" in line["message"] for line in lines)
    assert lines[-1]["message"] == "stopped"


def test_an_unexpected_error_of_a_child_is_a_line_with_its_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    launch = LaunchConfig(Config().with_values(log_format="json", model="/no/such"), str(tmp_path / "missing"))
    child = ChildProcess("engine", "quire.engine.start", launch)
    child.cause_of_death()
    child.close()
    (line,) = parsed(capfd.readouterr().err)
    assert (line["process"], line["level"], line["pid"]) == ("engine", "error", child.pid)
    assert "Traceback" in line["traceback"]


def test_a_start_that_fails_ends_with_its_cause_as_json() -> None:
    with QuireServe("/no/such/model", "--port", "0", "--log-format", "json") as server:
        assert server.wait(120) == 3
        server.last_line  # noqa: B018
        lines = parsed(server.log)
    assert lines[-1]["level"] == "error"
    assert "/no/such/model" in lines[-1]["message"]
