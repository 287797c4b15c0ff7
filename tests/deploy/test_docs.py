"""Commands of docs/operating.md and docs/dashboards.md, as they are typed: files are there, flags are flags."""

from __future__ import annotations

import re
import shlex
from functools import reduce
from typing import Any

import pytest
import yaml

from quire.cli.flags import parse_config
from tests.deploy.chart import CHART
from tests.deploy.promql import ROOT

DOCS = ("operating", "dashboards")
COMMANDS = [
    line
    for name in DOCS
    for block in re.findall(r"```console\n(.*?)```", (ROOT / "docs" / f"{name}.md").read_text(), re.S)
    for line in re.findall(r"^\$ (.*)$", block, re.M)
]


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 15


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_names_files_that_exist(command: str) -> None:
    named = [word for word in shlex.split(command) if word.startswith(("deploy/", "docs/"))]
    assert all((ROOT / word).exists() for word in named)


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith(("quire serve", "docker run"))])
def test_flags_of_the_server_are_its_own(command: str, tmp_path: Any) -> None:
    words = shlex.split(command)
    image = next((i for i, word in enumerate(words) if word.startswith("quire:")), 1)
    parse_config(words[image + 1 :], "quire serve", "")


def test_what_helm_sets_is_a_value_of_the_chart() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    (command,) = (line for line in COMMANDS if line.startswith("helm "))
    keys = re.findall(r"--set ([\w.]+)=", command)
    assert keys == ["model", "image.repository"]
    for key in keys:
        assert isinstance(reduce(lambda value, name: value[name], key.split("."), values), str)


def test_links_lead_somewhere() -> None:
    for name in DOCS:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / "docs" / f"{name}.md").read_text()):
            assert (ROOT / "docs" / link).exists(), link
