"""docs/router.md: every flag, its defaults, the file and the commands are the router's own."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from quire.cli.flags import parse
from quire.foundation.config.router import RouterConfig
from quire.serving.router.backend_list import read_backend_list

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "router.md").read_text()
COMMANDS = [
    line for block in re.findall(r"```console\n(.*?)```", PAGE, re.S) for line in re.findall(r"^\$ (.*)$", block, re.M)
]


def written(value: object) -> str:
    """A default as the page has it."""
    if value is None or value == ():
        return ""
    return "off" if value is False else f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def test_every_flag_is_explained_with_its_default() -> None:
    rows = re.findall(r"^\| `--([a-z-]+)` \| (.*?) \| (.+) \|$", PAGE, re.M)
    config = RouterConfig()
    expected = {field.name.replace("_", "-"): written(getattr(config, field.name)) for field in fields(config)}
    assert {name: default.strip() for name, default, _ in rows} == expected
    assert all(len(said) > 10 for _, _, said in rows)


def test_flags_that_the_text_names_exist() -> None:
    known = {field.name.replace("_", "-") for field in fields(RouterConfig)}
    assert set(re.findall(r"`--([a-z-]+)", PAGE)) <= known


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith("quire route")])
def test_commands_are_taken(command: str) -> None:
    config = parse(RouterConfig, shlex.split(command)[2:], "quire route", "")
    assert config.static_backends or config.dynamic_config_yaml


def test_the_file_is_one(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)
    path = tmp_path / "routes.yaml"
    path.write_text(example)
    found = read_backend_list(RouterConfig(dynamic_config_yaml=str(path)))
    assert [backend.drain for backend in found.backends] == [False, False, False, True]
    assert found.backends[2].models == ("quill",)
    assert [(key.name, key.requests_per_minute, key.max_concurrent_requests) for key in found.keys] == [
        ("search", 600, None),
        ("trial", None, 2),
    ]


def test_links_lead_somewhere() -> None:
    for link, _, anchor in re.findall(r"\]\(([^)#:]+)(#([^)]*))?\)", PAGE):
        text = (DOCS / link).read_text()
        headings = [re.sub(r"[^a-z0-9 -]", "", line.lower()).replace(" ", "-") for line in
                    re.findall(r"^#+ (.*)$", text, re.M)]  # fmt: skip
        assert not anchor or anchor in headings, link
