"""Coding agents, unmodified and with their default settings, each asked to write a file: a turn that calls a tool, and
one that answers. The model is scripted, and its chat template has no switch for reasoning."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.clients.environment import npm_environment
from tests.clients.recorder import Recorder
from tests.clients.scripted_model import call, make_scripted_model
from tests.clients.validation import check
from tests.e2e.serve import QuireServe

pytestmark = pytest.mark.long("api")
KEY = "a key of ours"
TASK = "Write made.txt"
AGENT_S = 240


def _script(tool: str, command: str, **other: object) -> list[str]:
    """The call, whose argument `command` is a shell command, or a list of them; then the answer."""
    written = f"echo written with {tool} > made.txt"
    arguments = {command: [written] if command.endswith("s") else written, **other}
    return [call(tool, arguments), f"I have written it with {tool}."]


SCRIPTS = {
    "Bash": _script("Bash", "command", description="Write"),
    "exec_command": _script("exec_command", "cmd"),
    "run_shell_command": _script("run_shell_command", "command", is_background=False),
    "run_commands": _script("run_commands", "commands"),
    "bash": _script("bash", "command", description="Write"),
}
"""What the model writes, by the tool that an agent offers for commands."""


@dataclass(frozen=True)
class Agent:
    """How an agent is set up and started, as its documentation says.

    Attributes:
        commands: What is run, one after the other; the last one does the task.
        path: Where it asks.
        environment: Its variables.
        settings: Files, by their path in the home directory.
    """

    commands: list[list[str]]
    path: str
    environment: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)


def claude_code(url: str) -> Agent:
    environment = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": KEY,
        "ANTHROPIC_MODEL": "scripted",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return Agent([["claude", "-p", TASK, "--allowedTools", "Bash"]], "/v1/messages", environment)


def codex(url: str) -> Agent:
    config = f"""
        model = "scripted"
        model_provider = "quire"
        [model_providers.quire]
        name = "Quire"
        base_url = "{url}/v1"
        wire_api = "responses"
        env_key = "QUIRE_API_KEY"
    """
    command = ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK]
    return Agent([command], "/v1/responses", {"QUIRE_API_KEY": KEY}, {".codex/config.toml": config})


def opencode(url: str) -> Agent:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": KEY},
        "models": {"scripted": {}},
    }
    config = json.dumps({"provider": {"quire": provider}})
    environment = {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    command = ["opencode", "run", "-m", "quire/scripted", TASK]
    return Agent([command], "/v1/chat/completions", environment, {".config/opencode/opencode.json": config})


def qwen_code(url: str) -> Agent:
    environment = {"OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_MODEL": "scripted"}
    command = ["qwen", "--auth-type", "openai", "--approval-mode", "yolo", TASK]
    return Agent([command], "/v1/chat/completions", environment)


def cline(url: str) -> Agent:
    sign_in = ["cline", "auth", "-p", "openai-compatible", "-k", KEY, "-m", "scripted", "-b", f"{url}/v1"]
    return Agent([sign_in, ["cline", "-P", "openai-compatible", "-m", "scripted", TASK]], "/v1/chat/completions")


def pi(url: str) -> Agent:
    provider = {"baseUrl": f"{url}/v1", "api": "openai-completions", "apiKey": KEY, "models": [{"id": "scripted"}]}
    settings = {".pi/agent/models.json": json.dumps({"providers": {"quire": provider}})}
    command = ["pi", "-p", "--provider", "quire", "--model", "scripted", TASK]
    return Agent([command], "/v1/chat/completions", {"PI_OFFLINE": "1"}, settings)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    npm_environment()
    model = make_scripted_model(tmp_path_factory.mktemp("model") / "scripted", SCRIPTS, "A title.")
    with QuireServe(str(model), "--port", "0", "--api-key", KEY, "--served-model-name", "scripted") as server:
        server.wait_ready()
        with Recorder(server.url) as recorder:
            yield recorder


@pytest.mark.parametrize(
    ("agent", "tool"),
    [
        (claude_code, "Bash"),
        (codex, "exec_command"),
        (opencode, "bash"),
        (qwen_code, "run_shell_command"),
        (cline, "run_commands"),
        (pi, "bash"),
    ],
)
def test_an_agent_writes_a_file(scripted: Recorder, agent: Callable[[str], Agent], tool: str, tmp_path: Path) -> None:
    scripted.exchanges.clear()
    try:
        said = _run(agent(scripted.url), tmp_path)
    finally:
        _end_daemons(tmp_path / "home")
    _, answer = SCRIPTS[tool]
    assert answer in said
    assert (tmp_path / "work" / "made.txt").read_text() == f"written with {tool}\n"
    asked = [exchange for exchange in scripted.exchanges if exchange.method == "POST"]
    check(asked)  # all were answered with 200
    assert {exchange.path for exchange in asked} == {agent("").path}
    calling = [exchange for exchange in asked if tool in json.dumps(exchange.sent.get("tools", []))]
    assert len(calling) >= 2  # the turn that calls, and the one that has the result


def _run(agent: Agent, directory: Path) -> str:
    """What the agent prints when it does the task in `work`, at home in `home`."""
    home, work = directory / "home", directory / "work"
    work.mkdir()
    for path, text in agent.settings.items():
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(text)
    home.mkdir(exist_ok=True)
    programs = npm_environment() / "node_modules" / ".bin"
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(home), "LANG": "C.UTF-8"}
    for command in agent.commands:
        run = subprocess.run(
            command,
            cwd=work,
            env={**environment, **agent.environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=AGENT_S,
            check=False,
        )
        assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def _end_daemons(home: Path) -> None:
    """Kill what an agent has left running: whatever has this home."""
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if f"HOME={home}" in environ.read_text(errors="replace").split("\0"):
                os.kill(int(environ.parent.name), signal.SIGKILL)
