"""`quire serve -tp 2` with the built-in model: the answers of one rank, also when a rank fails under 32 streams."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.foundation.processes.child_process import process_state
from quire.foundation.processes.launch import EXIT_CRASHED
from tests.e2e.faults.server import FaultyServer
from tests.e2e.mixed_streams import Streamed, bodies, run
from tests.e2e.process_usage import processor_seconds, ranks_of
from tests.e2e.serve import QuireServe

pytestmark = pytest.mark.long("many cards")

CLIENTS = 32
IDLE_S = 0.5
"""Of the processor in two seconds: less than who spins takes, and more than what a busy machine leaves to be done."""
SETTINGS = ("--dtype", "float32", "--port", "0", "--max-restarts", "100")


class RankServer(FaultyServer):
    """A server of two ranks.

    Attributes:
        one_rank: What the streams get from a server of one.
    """

    def __init__(self, fault_file: Path, one_rank: list[Streamed], *ranks: str) -> None:
        super().__init__(fault_file, *SETTINGS, *ranks)
        self.one_rank = one_rank
        self.wait_ready()

    def ranks(self) -> list[int]:
        """Process ids of the present engine's ranks, in the order of their start."""
        return ranks_of(self.children()["engine"])

    def serve_undisturbed(self) -> None:
        """The streams get what one rank would say, whatever has happened."""
        self.assert_same(run(self.url, bodies(CLIENTS)))

    def assert_same(self, results: list[Streamed]) -> None:
        """These are the answers of one rank."""
        for number, (got, wanted) in enumerate(zip(results, self.one_rank, strict=True)):
            assert got.outcome == wanted.outcome, number


@pytest.fixture(scope="module")
def one_rank() -> list[Streamed]:
    with QuireServe(*SETTINGS) as one:
        one.wait_ready()
        wanted = run(one.url, bodies(CLIENTS))
    assert [result.error for result in wanted] == [""] * CLIENTS
    return wanted


@pytest.fixture(scope="module")
def server(one_rank: list[Streamed], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankServer]:
    with RankServer(tmp_path_factory.mktemp("faults") / "fault", one_rank, "-tp", "2") as ranks:
        yield ranks


def gone(processes: list[int]) -> bool:
    """Within some seconds; what is left of a process that nobody has waited for does not count."""
    deadline = time.monotonic() + 60
    while any(process_state(pid) not in ("", "Z", "X") for pid in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    return all(process_state(pid) in ("", "Z", "X") for pid in processes)


def test_two_ranks_answer_as_one(server: RankServer) -> None:
    assert len(server.ranks()) == 2
    server.serve_undisturbed()


@pytest.mark.parametrize(("rank", "fault"), [(0, "SIGKILL"), (1, "SIGSTOP")])
def test_a_rank_that_fails_is_named_and_costs_no_request(server: RankServer, rank: int, fault: str) -> None:
    ranks, began = server.ranks(), server.line_count
    results = server.disturbed(bodies(CLIENTS), lambda: os.kill(ranks[rank], signal.Signals[fault]))
    server.wait_line(rf"engine process died.*Rank {rank} of 2 \(process {ranks[rank]}\)", began)
    server.wait_line("recovered in", began)
    server.assert_same(results)
    assert gone(ranks)


def test_an_idle_rank_takes_no_processor_and_is_missed_when_it_dies(server: RankServer) -> None:
    ranks = server.ranks()
    before = [processor_seconds(pid) for pid in ranks]
    time.sleep(2)
    assert all(processor_seconds(pid) - begun < IDLE_S for pid, begun in zip(ranks, before, strict=True))
    os.kill(ranks[1], signal.SIGKILL)
    server.wait_line(rf"Rank 1 of 2 \(process {ranks[1]}\) died.*started again")
    server.serve_undisturbed()


def test_ranks_end_with_their_engine(server: RankServer) -> None:
    ranks = server.ranks()
    os.kill(ranks[1], signal.SIGSTOP)  # it cannot see that the engine is gone
    os.kill(server.children()["engine"], signal.SIGKILL)
    assert gone(ranks)
    server.wait_line("recovered in|it is started again")
    server.serve_undisturbed()


def test_a_start_that_takes_too_long_ends_the_server_and_says_who_is_missing(tmp_path: Path) -> None:
    """Ranks sleep before they begin: on a fast machine they would have read their weights within the second."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, time\nif 'quire.runtime.executor.rank_process' in sys.orig_argv: time.sleep(100)\n"
    )
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    settings = (*SETTINGS, "-tp", "2", "--distributed-timeout-seconds", "1")
    with QuireServe(*settings, environment={"PYTHONPATH": path}) as server:
        assert server.wait(120) == EXIT_CRASHED
        assert "Rank 0 of 2" in server.last_line
        assert "did not read its weights within 1 s" in server.last_line
        assert "started again" not in server.log


def test_stages_answer_as_one_rank_and_one_that_dies_costs_no_request(one_rank: list[Streamed], tmp_path: Path) -> None:
    """Afterwards a drain ends them in order."""
    with RankServer(tmp_path / "fault", one_rank, "-pp", "2") as server:
        assert any("ranks       2 processes" in line for line in server.log.splitlines())
        server.serve_undisturbed()
        ranks = server.ranks()
        results = server.disturbed(bodies(CLIENTS), lambda: os.kill(ranks[0], signal.SIGKILL))
        server.wait_line(rf"engine process died: Rank 0 of 2 \(process {ranks[0]}\) died")
        server.assert_same(results)
        assert gone(ranks)
        last = [*server.children().values(), *server.ranks()]
        assert len(last) == 4
        server.signal()
        assert server.wait() == 0
        assert gone(last)
