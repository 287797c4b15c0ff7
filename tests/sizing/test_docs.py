"""Commands of docs/planning.md, as they are typed."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from quire.cli.main import main
from quire.sizing.measured_rows import DIRECTORY

TEXT = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
COMMANDS = [
    line for block in re.findall(r"```console\n(.*?)```", TEXT, re.S) for line in re.findall(r"^\$ (.*)$", block, re.M)
]
CHECK = "quire plan --check"
"""Takes 10 s; the table is made in test_measured_rows.py."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files that commands name."""
    directory = tmp_path_factory.mktemp("planning")
    shutil.copytree(DIRECTORY / "llama-3.1-8b", directory / "models" / "llama-3.1-8b")
    (directory / "prices.yaml").write_text(re.findall(r"```yaml\n(.*?)```", TEXT, re.S)[0])
    lines = [{"timestamp": 50 * i, "input_length": 300, "output_length": 10, "hash_ids": [0]} for i in range(20)]
    (directory / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return directory


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 7
    assert CHECK in COMMANDS


@pytest.mark.parametrize("command", [line for line in COMMANDS if line != CHECK])
def test_a_command_works(
    command: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    with pytest.raises(SystemExit) as end:
        main(shlex.split(command)[1:])
    assert end.value.code == 0, capsys.readouterr().err
    assert capsys.readouterr().out


def test_what_the_page_shows_is_what_is_said(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    shown = re.findall(r"```\n(models/.*?)```", TEXT, re.S)[0]
    with pytest.raises(SystemExit):
        main(shlex.split(COMMANDS[1])[1:])
    said = capsys.readouterr().out
    assert said.replace("/config.json:", ":") == shown
