"""Coding agents, unmodified and with their default settings, started as docs/agents.md says, each at a task of many
turns: reading, editing and running. The model is scripted, and its chat template has no switch for reasoning.

AGENT_ROUNDS=10 makes it thirty turns.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.clients.environment import npm_environment
from tests.clients.recorder import Exchange, Recorder
from tests.clients.scripted_model import call, make_scripted_model
from tests.clients.validation import check
from tests.e2e.serve import QuireServe

pytestmark = pytest.mark.long("api")
KEY = "a key of ours"
DOCS = Path(__file__).parents[2] / "docs" / "agents.md"
TASK = "Fix the tests"
ROUNDS = int(os.environ.get("AGENT_ROUNDS", "4"))
"""Each has three turns: read, edit, run."""
MOST_RECOMPUTED = 1.1
"""Prompt tokens that are computed, by those that are new; a prompt is found in the cache in blocks."""
AGENT_S = 240


@dataclass(frozen=True)
class Agent:
    """An agent as docs/agents.md names it, and how it reads, edits and runs.

    Attributes:
        offers: A tool that it offers, and no agent before it in the list.
        read: Makes a call of a path.
        edit: Makes a call of a path, an old and a new text.
        run: Makes a call of a shell command.
        headless: What the test adds to the documented arguments: nobody is there to approve a call.
        environment: Further variables, for a machine without a network.
    """

    name: str
    path: str
    offers: str
    read: Callable[[str], str]
    edit: Callable[[str, str, str], str]
    run: Callable[[str], str]
    headless: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def variable(self) -> str:
        """A name in the edited file that no other agent's has."""
        return f"{self.name.upper()}_COUNT"

    @property
    def answer(self) -> str:
        return f"I have counted to {ROUNDS} with {self.name}."

    def line(self, count: int) -> str:
        return f"{self.variable} = {count}"

    def script(self, file: Path) -> list[str]:
        """What the model writes in each turn."""
        turns: list[str] = []
        for count in range(ROUNDS):
            edit = self.edit(str(file), self.line(count), self.line(count + 1))
            turns += [self.read(str(file)), edit, self.run(f"python3 {file}")]
        return [*turns, self.answer]


def _patch(path: str, old: str, new: str) -> str:
    patch = f"*** Begin Patch\n*** Update File: {path}\n@@\n-{old}\n+{new}\n*** End Patch"
    return call("exec_command", {"cmd": f"apply_patch <<'E'\n{patch}\nE"})


CLAUDE = Agent(
    "claude",
    "/v1/messages",
    "Bash",
    lambda path: call("Read", {"file_path": path}),
    lambda path, old, new: call("Edit", {"file_path": path, "old_string": old, "new_string": new}),
    lambda command: call("Bash", {"command": command, "description": "Run"}),
)
CODEX = Agent(
    "codex",
    "/v1/responses",
    "exec_command",
    lambda path: call("exec_command", {"cmd": f"cat {path}"}),
    _patch,
    lambda command: call("exec_command", {"cmd": command}),
    "--skip-git-repo-check --dangerously-bypass-approvals-and-sandbox",
)
OPENCODE = Agent(
    "opencode",
    "/v1/chat/completions",
    "todowrite",
    lambda path: call("read", {"filePath": path}),
    lambda path, old, new: call("edit", {"filePath": path, "oldString": old, "newString": new}),
    lambda command: call("bash", {"command": command, "description": "Run"}),
    environment={"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
)
QWEN = Agent(
    "qwen",
    "/v1/chat/completions",
    "run_shell_command",
    lambda path: call("read_file", {"file_path": path}),
    lambda path, old, new: call("edit", {"file_path": path, "old_string": old, "new_string": new}),
    lambda command: call("run_shell_command", {"command": command, "is_background": False}),
)
CLINE = Agent(
    "cline",
    "/v1/chat/completions",
    "run_commands",
    lambda path: call("read_files", {"files": [{"path": path}]}),
    lambda path, old, new: call("editor", {"path": path, "old_text": old, "new_text": new}),
    lambda command: call("run_commands", {"commands": [command]}),
)
PI = Agent(
    "pi",
    "/v1/chat/completions",
    "bash",
    lambda path: call("read", {"path": path}),
    lambda path, old, new: call("edit", {"path": path, "edits": [{"oldText": old, "newText": new}]}),
    lambda command: call("bash", {"command": command}),
    environment={"PI_OFFLINE": "1"},
)
AGENTS = [CLAUDE, CODEX, OPENCODE, QWEN, CLINE, PI]


@dataclass(frozen=True)
class Scripted:
    """A server whose model works on `FILE` in the directory `work` of each agent, behind a recorder."""

    recorder: Recorder
    homes: Path

    def work(self, agent: Agent) -> Path:
        return self.homes / agent.name / "work"


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    npm_environment()
    homes = tmp_path_factory.mktemp("agents")
    scripts = {agent.offers: agent.script(homes / agent.name / "work" / "count.py") for agent in AGENTS}
    model = make_scripted_model(homes / "scripted", scripts, "A title.")
    with QuireServe(str(model), "--port", "0", "--api-key", KEY, "--served-model-name", "scripted") as server:
        server.wait_ready()
        with Recorder(server.url) as recorder:
            yield Scripted(recorder, homes)


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_an_agent_does_a_task_of_many_turns(scripted: Scripted, agent: Agent) -> None:
    scripted.recorder.exchanges.clear()
    work = scripted.work(agent)
    work.mkdir(parents=True)
    file = work / "count.py"
    file.write_text(f"{agent.line(0)}\nprint({agent.variable}, 'counted')\n")
    try:
        said = _run(agent, scripted.recorder.url, work)
    finally:
        _end_daemons(work.parent)
    assert agent.answer in said
    assert file.read_text().startswith(agent.line(ROUNDS))
    asked = [exchange for exchange in scripted.recorder.exchanges if exchange.method == "POST"]
    check(asked)  # all were answered with 200
    assert {exchange.path for exchange in asked} == {agent.path}
    turns = [exchange for exchange in asked if agent.offers in json.dumps(exchange.sent.get("tools", []))]
    assert len(turns) == 3 * ROUNDS + 1
    assert f"{ROUNDS} counted" in json.dumps(turns[-1].sent), "the tools have really run"
    _check_cached(turns)


def _check_cached(turns: Sequence[Exchange]) -> None:
    """Of all turns but the first, little more is computed than what is new."""
    usage = [_prompt_usage(turn) for turn in turns]
    new = usage[-1][0] - usage[0][0]
    computed = sum(prompt - cached for prompt, cached in usage[1:])
    assert 0 < new <= computed <= MOST_RECOMPUTED * new, usage


def _prompt_usage(turn: Exchange) -> tuple[int, int]:
    """Tokens of the prompt, and how many of them were found in the cache."""
    assert turn.streamed
    events = [json.loads(data) for _, data in turn.events if data != "[DONE]"]
    if turn.path == "/v1/messages":
        found = next(event["usage"] for event in events if event["type"] == "message_delta")
        return found["input_tokens"] + found["cache_read_input_tokens"], found["cache_read_input_tokens"]
    if turn.path == "/v1/responses":
        found = events[-1]["response"]["usage"]
        return found["input_tokens"], found["input_tokens_details"]["cached_tokens"]
    found = events[-1]["usage"]
    return found["prompt_tokens"], found["prompt_tokens_details"]["cached_tokens"]


def _documented(agent: Agent) -> list[str]:
    """The three lines of the docs about an agent: how it is installed, started, and started for one task."""
    for block in re.findall(r"```console\n(.*?)```", DOCS.read_text(), re.DOTALL):
        lines: list[str] = block.splitlines()
        if len(lines) == 3 and lines[1].startswith(f"quire launch {agent.name}"):
            return lines
    raise AssertionError(f"no three lines about {agent.name}")


def _run(agent: Agent, url: str, work: Path) -> str:
    """What the agent prints when it does the task in `work`, at home in the directory around it."""
    _, _, line = _documented(agent)
    assert f'"{TASK}"' in line
    line = line.replace("-- ", f"--url {url} -- ", 1).replace(f'"{TASK}"', f'{agent.headless} "{TASK}"')
    programs = f"{npm_environment() / 'node_modules' / '.bin'}:{Path(sys.executable).parent}"
    variables: dict[str, Any] = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        "HOME": str(work.parent),
        "LANG": "C.UTF-8",
        "QUIRE_API_KEY": KEY,
        **agent.environment,
    }
    run = subprocess.run(
        ["bash", "-c", line],
        cwd=work,
        env=variables,
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
