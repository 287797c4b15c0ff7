"""Streams and tokens between two cards that run at the same time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards"),
]


def test_what_stages_hand_on_arrives_whole_and_in_order(tmp_path: Path) -> None:
    """20,000 steps in graphs of several sizes: no wrong value, and no end that does not come."""
    command = [sys.executable, "-m", "tests.gpu.stage_links"]
    stages = [subprocess.Popen([*command, str(rank), "2", str(tmp_path), "check"]) for rank in range(2)]
    try:
        assert [stage.wait(timeout=120) for stage in stages] == [0, 0]
    finally:
        for stage in stages:
            stage.kill()
            stage.wait()
