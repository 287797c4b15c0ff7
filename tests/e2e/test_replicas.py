"""Two engines behind one address: killing one costs no request, changes no output and leaves the other alone."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import httpx
import pytest

from tests.e2e.faults.server import FaultyServer
from tests.e2e.mixed_streams import ROUNDING, Streamed, bodies, run

CLIENTS = 16


def metric(page: str, name: str, engine: int) -> float:
    """A counter of one engine."""
    (line,) = re.findall(rf'^{name}\{{engine="{engine}",[^}}]*\}} (\S+)$', page, re.M)
    return float(line)


@pytest.mark.long("reliability")
def test_one_of_two_engines_may_be_killed(tmp_path: Path) -> None:
    flags = ("--dtype", "float32", "--port", "0", "--data-parallel-size", "2")
    with FaultyServer(tmp_path / "fault", *flags) as server:
        server.wait_ready()
        undisturbed = run(server.url, bodies(CLIENTS))
        before = server.all_children()["engine"]
        assert len(before) == 2
        results = server.disturbed(bodies(CLIENTS), lambda: os.kill(before[0], signal.SIGKILL))
        assert [result.error for result in (*undisturbed, *results)] == [""] * 2 * CLIENTS
        assert [result.outcome for result in results] == [result.outcome for result in undisturbed]
        assert max(map(Streamed.rounding_error, results, undisturbed)) <= ROUNDING
        after = server.all_children()["engine"]
        assert len(after) == 2
        assert before[1] in after
        page = httpx.get(server.url + "/metrics", timeout=60).text
        replayed = [metric(page, "quire:sequences_replayed_total", engine) for engine in (0, 1)]
        assert replayed[0] >= 1
        assert replayed[1] == 0
        assert all(metric(page, "vllm:generation_tokens_total", engine) for engine in (0, 1))
        server.wait_line("recovered in")
        (took,) = re.findall(r"recovered in ([\d.]+) s", server.log)
        pauses = sorted(result.pause for result in results)
        print(f"recovered in {took} s; pauses of streams: {', '.join(f'{pause:.2f}' for pause in pauses)}")
        assert sum(pause < float(took) / 2 for pause in pauses) >= CLIENTS - replayed[0]
