"""What is read from the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.foundation.config import environment


def test_a_nodes_key_is_the_files_or_else_the_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_NODE_KEY", " from the environment\n")
    assert environment.node_key(None) == b"from the environment"
    (tmp_path / "key").write_text("0123456789abcdef\n")
    assert environment.node_key(str(tmp_path / "key")) == b"0123456789abcdef"


@pytest.mark.parametrize(
    ("variable", "file", "message"),
    [
        (None, None, "Several nodes need a key that all of them have.*--node-key-file or in QUIRE_NODE_KEY"),
        ("", None, "Several nodes need a key"),
        ("too short", None, "QUIRE_NODE_KEY: a key has at least 16 characters"),
        ("0123456789abcdef", "too short", "--node-key-file .*: a key has at least 16 characters"),
        ("0123456789abcdef", " \n", "Several nodes need a key"),
        ("0123456789abcdef", None, ""),
    ],
)
def test_a_key_that_keeps_nobody_out_is_refused(
    variable: str | None, file: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("QUIRE_NODE_KEY", raising=False)
    if variable is not None:
        monkeypatch.setenv("QUIRE_NODE_KEY", variable)
    path = tmp_path / "key"
    if file is not None:
        path.write_text(file)
    if not message:
        assert environment.node_key(None)
        return
    with pytest.raises(ConfigError, match=message) as raised:
        environment.node_key(None if file is None else str(path))
    assert file is None or not file.strip() or file not in raised.value.message, "a key is never shown"


def test_a_key_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--node-key-file .*none cannot be read"):
        environment.node_key(str(tmp_path / "none"))
