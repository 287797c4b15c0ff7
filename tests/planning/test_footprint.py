"""What a step is said to hold is what it holds. tests/planning/test_kv_cache_plan.py measures the report as a whole."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from quire.compute.kernels.routing import Routing
from quire.models.layer_spec import MixtureSpec
from quire.planning.footprint import COUNT_BYTES, expert_buffers
from quire.runtime.worker.slot_table import SlotTable


def test_experts_hold_what_is_said_when_all_tokens_go_to_the_same_ones() -> None:
    tokens, hidden, width, count = 4_096, 256, 2_048, 2
    answer = subprocess.run(
        [sys.executable, "-m", "tests.costmodel.measure_experts", *map(str, (tokens, hidden, width, count))],
        capture_output=True, text=True, check=True, timeout=250,
    )  # fmt: skip
    spec = MixtureSpec(hidden, width, count, Routing(count, True))
    out = tokens * hidden * 4  # counted with the stream
    assert sum(expert_buffers(spec, 4, tokens)) + out == pytest.approx(json.loads(answer.stdout), rel=0.08)


def test_every_slot_has_its_counts_from_the_start() -> None:
    """Of the dummy slot as well."""
    seen = SlotTable(7, 1, 1, 1_000, torch.device("cpu")).transforms._penalties._seen
    assert seen.nbytes == 8 * 1_000 * COUNT_BYTES
