"""`quire serve -dp 2 -ep`: two engines that divide experts answer as one does, also when one of them is lost under
streams."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import VOCAB_SIZE, make_tiny, write_tokenizer
from tests.e2e.faults.server import FaultyServer
from tests.e2e.mixed_streams import ROUNDING, Streamed, bodies, run
from tests.e2e.process_usage import processor_seconds, ranks_of
from tests.e2e.serve import QuireServe
from tests.e2e.test_ranks import IDLE_S, gone
from tests.models.divisible import DIVISIBLE

pytestmark = pytest.mark.long("many cards")

CLIENTS = 16
SETTINGS = ("--dtype", "float32", "--port", "0")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_tiny(tmp_path_factory.mktemp("model"), **DIVISIBLE["qwen3 moe"] | {"vocab_size": VOCAB_SIZE})
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def one_engine(model: Path) -> list[Streamed]:
    with QuireServe(str(model), *SETTINGS) as one:
        one.wait_ready()
        results = run(one.url, bodies(CLIENTS))
    assert [result.error for result in results] == [""] * CLIENTS
    return results


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyServer]:
    fault_file = tmp_path_factory.mktemp("faults") / "fault"
    with FaultyServer(fault_file, str(model), *SETTINGS, "-dp", "2", "-ep", "--max-restarts", "2") as server:
        server.wait_ready()
        yield server


def assert_same(results: list[Streamed], wanted: list[Streamed]) -> None:
    assert [result.error for result in results] == [""] * CLIENTS
    assert [result.outcome for result in results] == [result.outcome for result in wanted]
    assert max(map(Streamed.rounding_error, results, wanted)) <= ROUNDING


def test_engines_answer_as_one_and_sleep_when_nobody_asks(server: QuireServe, one_engine: list[Streamed]) -> None:
    assert_same(run(server.url, bodies(CLIENTS)), one_engine)
    engines = server.all_children()["engine"]
    ranks = [rank for engine in engines for rank in ranks_of(engine)]
    assert len(engines) == len(ranks) == 2
    before = [processor_seconds(pid) for pid in ranks]
    time.sleep(2)
    assert all(processor_seconds(pid) - begun < IDLE_S for pid, begun in zip(ranks, before, strict=True))


@pytest.mark.parametrize("fault", ["SIGKILL", "rank SIGSTOP"])
def test_when_one_is_lost_all_are_replaced_and_no_request_is(
    fault: str, server: FaultyServer, one_engine: list[Streamed]
) -> None:
    """It counts as one restart."""
    engines, began = server.all_children()["engine"], server.line_count
    ranks = [rank for engine in engines for rank in ranks_of(engine)]
    number = signal.Signals[fault.split()[-1]]
    victim = ranks_of(engines[1])[0] if fault.startswith("rank") else engines[1]
    results = server.disturbed(bodies(CLIENTS), lambda: os.kill(victim, number))
    assert_same(results, one_engine)
    server.wait_line("recovered in", began)
    said = [line for line in server.lines_since(began) if "process died" in line]
    assert len(said) == 1, said
    assert " of 2)" in said[0]
    assert number.name in said[0], "it is seen at once, not missed after a while"
    after = server.all_children()["engine"]
    assert len(after) == 2
    assert not {*after} & {*engines}
    assert gone([*engines, *ranks])
    assert_same(run(server.url, bodies(CLIENTS)), one_engine)


def test_it_ends_in_order(model: Path) -> None:
    with QuireServe(str(model), *SETTINGS, "-dp", "2", "-ep", "-tp", "2", "--api-server-count", "2") as server:
        server.wait_ready()
        assert server.post("/v1/completions", {"prompt": "Once", "max_tokens": 4}).status_code == 200
        server.signal()
        assert server.wait() == 0
        assert "did not end cleanly" not in server.log
        assert server.last_line == "stopped"
