"""`quire launch AGENT`: a coding agent against a running server, by its environment and arguments alone.

No file of the user's is written. What an agent reads from files alone is in a directory of its own, which is deleted
when the agent has ended.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quire.cli.chat import ServerAddress
from quire.cli.flags import parse
from quire.errors import ConfigError, did_you_mean
from quire.foundation.config import environment

DESCRIPTION = (
    "Start a coding agent against a running server: quire launch AGENT [flags] [-- arguments of the agent]. Agents: "
    "claude, cline, codex, opencode, pi, qwen."
)
_ANY_KEY = "none"
"""What agents that want a key send to a server that wants none."""
_ROOMY = 65_536
"""Context from which on Claude Code's own limit of an answer leaves room for the conversation."""
_LARGE = 100_000
"""Context from which on Claude Code must be told when to compact."""
_DIRECTORY = Path("DIRECTORY")
"""What stands for the agent's directory where nothing is started."""


@dataclass(frozen=True)
class LaunchOptions:
    """How an agent is started."""

    dry_run: bool = False
    """Only print what would be set and started."""
    server: ServerAddress = field(default_factory=ServerAddress)


@dataclass(frozen=True)
class Target:
    """What an agent asks: `url` without /v1, and a model with room for `context` tokens. `key` is None without one."""

    url: str
    key: str | None
    model: str
    context: int

    @property
    def sent_key(self) -> str:
        """What is sent in any case."""
        return self.key or _ANY_KEY

    @property
    def answer(self) -> int:
        """Most tokens of an answer that an agent may plan with."""
        return min(8192, self.context // 4)


@dataclass(frozen=True)
class Launch:
    """What starts an agent: the variables it gets, the program with its arguments, what is run before, and files of its
    directory by name."""

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    before: Sequence[Sequence[str]] = ()
    files: Mapping[str, str] = field(default_factory=dict)

    def shown(self, arguments: Sequence[str], key: str | None) -> str:
        """The lines of a shell that do the same, without the key."""
        lines = [f"# {name}:\n{text}" for name, text in self.files.items()]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()]
        lines += [shlex.join(command) for command in (*self.before, [*self.command, *arguments])]
        text = "\n".join(lines)
        return text.replace(key, "KEY") if key else text


def run(arguments: Sequence[str]) -> int:
    """Start the agent and wait for it; returns its exit code. Raises ConfigError for an unknown agent or one that is
    not installed, and QuireError if the server is not there."""
    arguments, own = _split(arguments)
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name.startswith("-"):
        parse(LaunchOptions, [name, *rest], "quire launch", DESCRIPTION)  # --help ends here
        raise ConfigError(f"Name the agent first: quire launch AGENT. Agents: {', '.join(sorted(AGENTS))}.")
    if name not in AGENTS:
        raise ConfigError(f"'{name}' is no agent.{did_you_mean(name, AGENTS)} Agents: {', '.join(sorted(AGENTS))}.")
    options = parse(LaunchOptions, rest, "quire launch AGENT", DESCRIPTION)
    package, make = AGENTS[name]
    target = _target(options.server)
    if options.dry_run:
        print(make(target, _DIRECTORY).shown(own, target.key))
        return 0
    if shutil.which(name) is None:
        raise ConfigError(f"{name} is not installed: npm install -g {package}")
    with tempfile.TemporaryDirectory(prefix="quire-launch-") as directory:
        return _start(make(target, Path(directory)), Path(directory), own, target.key)


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments of this command, and those behind `--`, which are the agent's."""
    at = list(arguments).index("--") if "--" in arguments else len(arguments)
    return list(arguments[:at]), list(arguments[at + 1 :])


def _target(address: ServerAddress) -> Target:
    with address.connect() as server:
        card = server.card(address.model_name)
    context = card.get("max_model_len")
    if not isinstance(context, int):
        raise ConfigError("The server does not say how long its model's context is (max_model_len of /v1/models).")
    return Target(server.url.removesuffix("/v1"), address.api_key or environment.api_key(), str(card["id"]), context)


def _start(launch: Launch, directory: Path, arguments: Sequence[str], key: str | None) -> int:
    print(launch.shown(arguments, key), flush=True)
    for name, text in launch.files.items():
        (directory / name).write_text(text)
    variables = environment.with_variables(launch.environment)
    for command in launch.before:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ConfigError(f"{shlex.join(command[:2])} failed: {(done.stderr or done.stdout).strip()[-500:]}")
    process = subprocess.Popen([*launch.command, *arguments], env=variables)
    while True:
        try:
            code = process.wait()
        except KeyboardInterrupt:
            continue  # the agent has got it as well, and decides
        return code if code >= 0 else 128 - code


# --- agents -----------------------------------------------------------------------------------------------------------


def _claude(target: Target, _: Path) -> Launch:
    models = ("ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("HAIKU", "SONNET", "OPUS")))
    variables = {
        "ANTHROPIC_BASE_URL": target.url,
        "ANTHROPIC_AUTH_TOKEN": target.sent_key,
        **dict.fromkeys(models, target.model),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    if target.context < _ROOMY:
        variables["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(target.answer)
    if target.context >= _LARGE:
        variables["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(target.context)
    return Launch(["claude"], variables)


def _codex(target: Target, _: Path) -> Launch:
    provider = {"name": "Quire", "base_url": f"{target.url}/v1", "wire_api": "responses"}
    if target.key:
        provider["env_key"] = "QUIRE_API_KEY"
    values = {
        "model": target.model,
        "model_provider": "quire",
        "model_context_window": target.context,
        **{f"model_providers.quire.{name}": value for name, value in provider.items()},
    }
    settings = [part for name, value in values.items() for part in ("-c", f"{name}={json.dumps(value)}")]
    return Launch(["codex", *settings], {"QUIRE_API_KEY": target.key} if target.key else {})


def _opencode(target: Target, _: Path) -> Launch:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{target.url}/v1", "apiKey": target.sent_key},
        "models": {target.model: {"limit": {"context": target.context, "output": target.answer}}},
    }
    name = f"quire/{target.model}"
    config = {"model": name, "small_model": name, "provider": {"quire": provider}}
    return Launch(["opencode"], {"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def _qwen(target: Target, _: Path) -> Launch:
    variables = {
        "OPENAI_BASE_URL": f"{target.url}/v1",
        "OPENAI_API_KEY": target.sent_key,
        "OPENAI_MODEL": target.model,
    }
    return Launch(["qwen", "--auth-type", "openai"], variables)


def _cline(target: Target, directory: Path) -> Launch:
    place = ["--data-dir", str(directory)]
    address = ["-b", f"{target.url}/v1", "-k", target.sent_key, "-m", target.model]
    sign_in = ["cline", "auth", "-p", "openai-compatible", *address, *place]
    return Launch(["cline", "-P", "openai-compatible", "-m", target.model, *place], before=[sign_in])


def _pi(target: Target, directory: Path) -> Launch:
    model = {
        "id": target.model,
        "name": target.model,
        "reasoning": False,
        "input": ["text"],
        "cost": dict.fromkeys(("input", "output", "cacheRead", "cacheWrite"), 0),
        "contextWindow": target.context,
        "maxTokens": target.answer,
    }
    provider = {
        "baseUrl": f"{target.url}/v1",
        "api": "openai-completions",
        "apiKey": "QUIRE_API_KEY",
        "models": [model],
    }
    extension = f'export default (pi) => pi.registerProvider("quire", {json.dumps(provider, indent=2)});\n'
    command = ["pi", "-e", str(directory / "quire.js"), "--provider", "quire", "--model", target.model]
    return Launch(command, {"QUIRE_API_KEY": target.sent_key}, files={"quire.js": extension})


AGENTS: dict[str, tuple[str, Callable[[Target, Path], Launch]]] = {
    "claude": ("@anthropic-ai/claude-code", _claude),
    "cline": ("cline", _cline),
    "codex": ("@openai/codex", _codex),
    "opencode": ("opencode-ai", _opencode),
    "pi": ("@mariozechner/pi-coding-agent", _pi),
    "qwen": ("@qwen-code/qwen-code", _qwen),
}
"""By name: the package at npm, and what starts the agent, given its directory."""
