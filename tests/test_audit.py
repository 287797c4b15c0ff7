"""`.ci/audit`: what it makes of what advisory databases say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

AUDIT = Path(__file__).parents[1] / ".ci" / "audit"
SKIPPED = {"name": "a", "skip_reason": "Dependency not found"}
SOUND = {"name": "b", "version": "1.0", "vulns": []}
WRONG = {"name": "c", "version": "2.0", "vulns": [{"id": "CVE-1", "fix_versions": ["2.1"]}]}


def audit(directory: Path, **says: list[dict[str, Any]] | None) -> tuple[int, str]:
    """Its exit code and last words, where each service says so; None: it cannot be reached."""
    answers = {name: None if found is None else {"dependencies": found} for name, found in says.items()}
    program = directory / "pip-audit"
    program.write_text(
        f"#!{sys.executable}\nimport json, sys\nanswer = json.loads({json.dumps(answers)!r})"
        "[sys.argv[sys.argv.index('-s') + 1]]\nsys.exit(3) if answer is None else print(json.dumps(answer))\n"
    )
    program.chmod(0o700)
    done = subprocess.run([sys.executable, AUDIT, program], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("pypi", [None, [SKIPPED]])
def test_without_a_database_it_says_that_nothing_was_audited(tmp_path: Path, pypi: list[dict[str, Any]] | None) -> None:
    code, said = audit(tmp_path, pypi=pypi, osv=None)
    assert code == 0
    assert "skipped" in said


def test_a_known_vulnerability_fails_and_is_named(tmp_path: Path) -> None:
    code, said = audit(tmp_path, pypi=[SKIPPED, SOUND, WRONG], osv=None)
    assert code == 1
    assert "c 2.0 has CVE-1, fixed in 2.1" in said


def test_another_database_is_asked_if_the_first_says_nothing(tmp_path: Path) -> None:
    assert audit(tmp_path, pypi=None, osv=[SOUND]) == (0, "audit: 1 packages, 0 vulnerabilities.\n")
