"""Whatever happens to requests beside others, each is answered as if it were alone.

`python -m tests.equivalence` runs more schedules, and compares the code with that of another checkout.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.equivalence.engines import KINDS, make_models
from tests.equivalence.schedules import MUST_HAPPEN, Schedules

SEEDS = 2 * len(KINDS)


@pytest.fixture
def schedules(tmp_path: Path) -> Iterator[Schedules]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    make_models(tmp_path)
    with Schedules(tmp_path) as made:
        yield made
    torch.set_num_threads(threads)


def test_requests_of_random_schedules_are_answered_as_if_alone(schedules: Schedules) -> None:
    for seed in range(SEEDS):
        found, expected = schedules.run(seed), schedules.run_alone(seed)
        assert found.equals(expected), (str(found), str(expected))
    missing = [name for name in MUST_HAPPEN if not schedules.happened[name]]
    assert not missing
