"""The held-out questions that need tools, sent as `tools` by `recipes/quill/evaluate.py` and graded by `tool_calls`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.conftest import KEY
from tests.clients.recorder import Recorder

EVALUATE = Path(__file__).parents[2] / "recipes/quill/evaluate.py"


@pytest.mark.long("api")
@pytest.mark.parametrize("flags", [(), ("--strict",)])
def test_quill_calls_the_tools_that_questions_need(recorded: tuple[Recorder, str], flags: tuple[str, ...]) -> None:
    run = subprocess.run(
        [sys.executable, EVALUATE, "--base-url", recorded[1] + "/v1", "--tools", "--task", "tools", *flags],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        env={**os.environ, "OPENAI_API_KEY": KEY},
    )
    right, asked = map(int, re.findall(r"^tools +(\d+) +(\d+)", run.stdout, re.M)[0])
    valid, with_tools = map(int, re.findall(r"^(\d+) of (\d+) answers", run.stdout, re.M)[0])
    assert (asked, with_tools) == (71, 71)
    assert right >= 68, run.stdout
    assert not flags or valid == 71, run.stdout
