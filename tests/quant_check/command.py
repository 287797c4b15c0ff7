"""Runs `quire check-quant` in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import main


def check(*arguments: Any) -> int:
    """The command's exit code."""
    with pytest.raises(SystemExit) as ended:
        main(["check-quant", *map(str, arguments)])
    return int(ended.value.code or 0)


def checked(tmp_path: Path, *arguments: Any) -> tuple[int, dict[str, Any]]:
    """The exit code, and the result without what tells one run from another."""
    file = tmp_path / "result.json"
    code = check(*arguments, "--json", file)
    result: dict[str, Any] = json.loads(file.read_text(), parse_constant=lambda name: pytest.fail(name))
    return code, {key: value for key, value in result.items() if key not in ("date", "machine")}
