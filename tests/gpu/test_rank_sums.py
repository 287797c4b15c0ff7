"""Sums over two cards by their own memory, against NCCL's and against sums on one card."""

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
RANKS = 2


def test_sums_and_columns_of_all_ranks(tmp_path: Path) -> None:
    """All sizes, and 100,000 calls each in fp32 and bf16: no wrong sum, and no end that does not come."""
    command = [sys.executable, "-m", "tests.gpu.rank_sums"]
    ranks = [subprocess.Popen([*command, str(rank), str(RANKS), str(tmp_path), "check"]) for rank in range(RANKS)]
    try:
        assert [rank.wait(timeout=300) for rank in ranks] == [0] * RANKS
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
