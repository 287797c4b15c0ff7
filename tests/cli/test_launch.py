"""`quire launch`: what agents are started with. tests/clients starts the agents themselves."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.cli import launch
from quire.errors import ConfigError, UnavailableError
from tests.api.server import KEY, MAX_MODEL_LEN, Server, running

STAND_IN = """#!/usr/bin/env python3
import json, os, pathlib, sys
files = {path: pathlib.Path(path).read_text() for path in sys.argv if path.endswith(".js")}
with open(os.environ["SEEN"], "a") as out:
    print(json.dumps({"arguments": sys.argv[1:], "environment": dict(os.environ), "files": files}), file=out)
sys.exit(int(os.environ.get("CODE", "0")))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("model"), api_key=(KEY,), served_model_name=("coder", "other")) as server:
        yield server


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What stand-ins for all agents have been started with, a line for each start."""
    for name in launch.AGENTS:
        (tmp_path / name).write_text(STAND_IN)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    return tmp_path / "seen"


def started(seen: Path, server: Server, name: str, *arguments: str) -> list[dict[str, Any]]:
    own = ["--", *arguments] if arguments else []
    assert launch.run([name, "--url", server.url, "--api-key", KEY, *own]) == 0
    return [json.loads(line) for line in seen.read_text().splitlines()]


def test_claude_gets_address_key_and_model_for_all_its_sizes(seen: Path, server: Server) -> None:
    (run,) = started(seen, server, "claude", "-p", "Go.")
    environment = run["environment"]
    assert run["arguments"] == ["-p", "Go."]
    assert (environment["ANTHROPIC_BASE_URL"], environment["ANTHROPIC_AUTH_TOKEN"]) == (server.url, KEY)
    assert {environment[name] for name in environment if name.endswith("_MODEL")} == {"coder"}
    assert environment["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == str(MAX_MODEL_LEN // 4)


def test_codex_gets_a_provider_in_its_arguments(seen: Path, server: Server) -> None:
    (run,) = started(seen, server, "codex", "exec", "Go.")
    *settings, command, task = run["arguments"]
    values = dict(value.split("=", 1) for value in settings[1::2])
    assert set(settings[::2]) == {"-c"}
    assert (command, task) == ("exec", "Go.")
    assert json.loads(values["model"]) == "coder"
    assert json.loads(values["model_providers.quire.base_url"]) == f"{server.url}/v1"
    assert run["environment"][json.loads(values["model_providers.quire.env_key"])] == KEY


def test_opencode_gets_its_settings_in_a_variable(seen: Path, server: Server) -> None:
    (run,) = started(seen, server, "opencode")
    config = json.loads(run["environment"]["OPENCODE_CONFIG_CONTENT"])
    provider, _, model = config["model"].partition("/")
    assert config["provider"][provider]["options"] == {"baseURL": f"{server.url}/v1", "apiKey": KEY}
    assert config["provider"][provider]["models"][model]["limit"]["context"] == MAX_MODEL_LEN


def test_qwen_gets_openais_variables(seen: Path, server: Server) -> None:
    (run,) = started(seen, server, "qwen", "Go.")
    assert run["environment"]["OPENAI_BASE_URL"] == f"{server.url}/v1"
    assert run["environment"]["OPENAI_MODEL"] == "coder"
    assert run["arguments"] == ["--auth-type", "openai", "Go."]


def test_cline_signs_in_to_a_directory_that_is_gone_afterwards(seen: Path, server: Server) -> None:
    sign_in, run = started(seen, server, "cline", "Go.")
    place = sign_in["arguments"][-1]
    assert sign_in["arguments"][:3] == ["auth", "-p", "openai-compatible"]
    assert run["arguments"] == ["-P", "openai-compatible", "-m", "coder", "--data-dir", place, "Go."]
    assert not Path(place).exists()


def test_pi_gets_an_extension_with_the_provider(seen: Path, server: Server) -> None:
    (run,) = started(seen, server, "pi")
    ((path, text),) = run["files"].items()
    provider = json.loads(text.partition('"quire", ')[2].rpartition(");")[0])
    assert run["arguments"] == ["-e", path, "--provider", "quire", "--model", "coder"]
    assert (provider["baseUrl"], provider["models"][0]["id"]) == (f"{server.url}/v1", "coder")
    assert run["environment"][provider["apiKey"]] == KEY
    assert not Path(path).exists()


@pytest.mark.parametrize("name", sorted(launch.AGENTS))
def test_a_dry_run_shows_everything_but_the_key(
    seen: Path, server: Server, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--url", server.url, "--api-key", KEY, "--model", "other", "--dry-run"]
    assert launch.run([name, *flags, "--", "two words"]) == 0
    shown = capsys.readouterr().out
    assert server.url in shown
    assert "other" in shown
    assert f"{name} " in shown
    assert shown.endswith("'two words'\n")
    assert KEY not in shown
    assert not seen.exists()


def test_the_exit_code_is_the_agents(seen: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODE", "3")
    assert launch.run(["qwen", "--url", server.url, "--api-key", KEY]) == 3
    with pytest.raises(ConfigError, match="cline auth failed"):
        launch.run(["cline", "--url", server.url, "--api-key", KEY])


def test_what_cannot_be_started(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    flags = ["--url", server.url, "--api-key", KEY]
    for arguments, message in (
        (["codex", *flags], "codex is not installed: npm install -g @openai/codex"),
        (["codec", *flags], "'codec' is no agent. Did you mean 'codex'"),
        (flags, "Name the agent first"),
        (["codex", *flags, "--model", "gone"], "serves no model 'gone'. Served: coder, other"),
    ):
        with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
            launch.run(arguments)
    with pytest.raises(UnavailableError, match="No server listens"):
        launch.run(["codex", "--port", "9"])
