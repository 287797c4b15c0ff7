"""`quire bench kernels` as it is typed, on the small cases of every family."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from quire.cli.main import main
from quire.compute.kernels.dispatch import KERNELS
from quire.tools.bench.kernel_cases import Arguments, KernelCase
from quire.tools.bench.kernels import Limits, all_cases, measure, measure_limits, median_seconds, sets_of_arguments

CPU = torch.device("cpu")
HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def bench(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "kernels", *arguments])
    return int(ended.value.code or 0)


def test_every_case_runs_and_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.tools.bench.kernels.REPLAYS", 2)
    file = tmp_path / "kernels.json"
    assert bench("--reference", "--json", str(file)) == 0
    found = json.loads(file.read_text())
    here = [case for case in all_cases(HERE) if (case.op, HERE.type) in KERNELS]
    assert [(row["op"], row["name"]) for row in found["cases"]] == [(case.op, case.name) for case in here]
    assert {"rms_norm", "silu_and_mul"} <= {row["op"] for row in found["cases"]}
    for row in found["cases"]:
        assert 0 < row["seconds"] < 1
        assert row["bytes_per_s"] == pytest.approx(row["bytes"] / row["seconds"])
    assert found["limits"]["bytes_per_s"] > 1e8
    assert found["machine"]["cores"]
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith(f"{len(here)} cases")]
    table = [re.split(r" {2,}", line) for line in lines[1 : len(here) + 2]]
    assert [row[:2] for row in table[1:]] == [[case.op, case.name] for case in here]
    assert {len(row) for row in table if len(row) != 7} <= {8}


def test_only_the_ops_that_are_asked_for(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.tools.bench.kernels.measure_limits", lambda device: Limits(1e10, 1e11))
    assert bench("--op", "rms_norm", "gelu") == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines[2:-1]} == {"rms_norm", "gelu"}


def test_an_op_without_cases_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--op", "matmul") == 2
    assert f"--op matmul: no cases on {HERE.type}. There are: " in capsys.readouterr().err


def test_cases_of_a_family_have_names_of_their_own() -> None:
    for device in (CPU, torch.device("cuda")):
        names = [(case.op, case.name) for case in all_cases(device)]
        assert sorted(set(names)) == sorted(names)


def test_the_share_is_of_whichever_limit_takes_longer() -> None:
    def make(device: torch.device) -> Arguments:
        return (torch.ones(4, device=device), torch.empty(4, device=device)), {}

    limits = Limits(bytes_per_s=1e9, flops_per_s=1e12)
    moved = measure(KernelCase("gelu", "", make, bytes=10**6), limits, CPU)
    assert moved.share == pytest.approx(1e-3 / moved.seconds)
    computed = measure(KernelCase("gelu", "", make, bytes=10**6, flops=10**11), limits, CPU)
    assert computed.share == pytest.approx(0.1 / computed.seconds)
    assert computed.flops_per_s == pytest.approx(10**11 / computed.seconds)


def test_calls_go_round_enough_memory_for_the_cache_to_forget() -> None:
    assert sets_of_arguments(10**9, 10**9, CPU) <= 2
    assert sets_of_arguments(10**7, 10**7, CPU) * 10**7 > 3 * 32 * 2**20
    assert sets_of_arguments(10**3, 10**3, CPU) == 32  # small ones stay in the cache
    assert sets_of_arguments(10**6, 10**9, CPU) == 2  # all sets together fit into memory


def test_every_set_is_used() -> None:
    used = []
    seconds = median_seconds([lambda n=n: used.append(n) for n in range(20)], CPU)
    assert set(used) == set(range(20))
    assert len(used) >= 40  # once to warm up, once timed
    assert seconds < 1e-3


@pytest.mark.gpu
def test_a_card_is_timed_with_and_without_graphs() -> None:
    card = torch.device("cuda")
    limits = measure_limits(card)
    assert limits.bytes_per_s > 1e11
    assert limits.flops_per_s > 1e13
    x = torch.randn(64, 1024, device=card)
    calls = [lambda: torch.add(x, 1.0)] * 4
    in_graph, launched = (median_seconds(calls, card, graph=graph) for graph in (True, False))
    assert in_graph > 2e-7
    assert launched > 2e-7
