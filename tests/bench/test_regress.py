"""`quire bench regress`: a loss is told from noise, whichever way a figure is better."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import main
from quire.tools.bench.regress import Figure

CARD = {"gpus": [{"name": "Card A"}]}


def row(name: str, *runs: float, value: float | None = None, better: str = "lower") -> dict[str, Any]:
    middle = sorted(runs)[len(runs) // 2]
    return {
        "model": "m",
        "row": name,
        "better": better,
        "runs": list(runs),
        "value": middle if value is None else value,
    }


def write(path: Path, *rows: dict[str, Any], machine: dict[str, Any] | None = None) -> str:
    path.write_text(json.dumps({"machine": machine or CARD, "rows": rows}))
    return str(path)


def regress(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "regress", *arguments])
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("old", "new", "better", "worse"),
    [
        ([100.0], [102.9], "lower", False),
        ([100.0], [103.1], "lower", True),
        ([100.0], [90.0], "lower", False),
        ([100.0], [97.1], "higher", False),
        ([100.0], [96.9], "higher", True),
        ([100.0], [110.0], "higher", False),
        ([100.0, 104.0, 96.0], [106.0, 110.0, 102.0], "lower", False),  # runs scatter by as much
        ([100.0, 100.1, 99.9], [106.0, 106.1, 105.9], "lower", True),
        ([100.0, 100.1, 150.0], [106.0, 106.1, 105.9], "lower", True),  # one odd run is no noise
        ([100.0, 104.0, 96.0], [140.0, 144.0, 136.0], "lower", True),
    ],
)
def test_a_loss_beyond_noise_fails(
    old: list[float], new: list[float], better: str, worse: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [
        write(tmp_path / name, row("decode", *runs, better=better), row("same", 5.0))
        for name, runs in (("old", old), ("new", new))
    ]
    assert regress("--against", files[0], "--new", files[1]) == int(worse)
    output = capsys.readouterr().out
    marked = [line for line in output.splitlines() if line.endswith("WORSE")]
    assert [line.split()[1] for line in marked] == ["decode"] * worse
    assert f"2 compared, {int(worse)} worse" in output


def test_several_files_are_runs_of_the_same(tmp_path: Path) -> None:
    old = [write(tmp_path / f"old{n}", row("decode", value)) for n, value in enumerate((100.0, 104.0, 96.0))]
    new = write(tmp_path / "new", row("decode", 106.0))
    assert regress("--against", old[0], "--new", new) == 1  # without its spread
    assert regress("--against", *old, "--new", new) == 0


def test_the_stated_figure_counts_not_the_median_of_the_runs(tmp_path: Path) -> None:
    old = write(tmp_path / "old", row("decode", 100.0, 101.0, 102.0, value=100.0))
    assert (
        regress("--against", old, "--new", write(tmp_path / "a", row("decode", 101.0, 140.0, 150.0, value=101.0))) == 0
    )


def test_noise_is_two_standard_deviations() -> None:
    values = tuple(100 + 2 * i for i in range(-10, 11))  # the median absolute deviation is 10
    assert Figure(values, False, (100.0,)).noise == pytest.approx(2 * 1.4826 * 10 / 100)
    assert Figure((7.0,), False, (7.0,)).noise == 0


def test_the_allowed_loss_can_be_set(tmp_path: Path) -> None:
    files = [write(tmp_path / str(value), row("decode", value)) for value in (100.0, 104.0)]
    assert regress("--against", files[0], "--new", files[1], "--max-loss", "0.05") == 0
    assert regress("--against", files[0], "--new", files[1], "--max-loss", "0.01") == 1
    assert regress("--against", files[0], "--new", files[1], "--max-loss", "-1") == 2


def test_rows_that_are_not_measured_again_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = write(tmp_path / "old", row("decode", 1.0), row("prefix", 2.0))
    assert regress("--against", old, "--new", write(tmp_path / "new", row("decode", 1.0), row("other", 1.0))) == 0
    assert "Not measured again: m prefix" in capsys.readouterr().out


def test_newer_figures_come_from_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = write(tmp_path / "old", row("decode", 1.0)), write(tmp_path / "new", row("decode", 2.0))
    monkeypatch.setattr("sys.stdin", io.StringIO(Path(new).read_text()))
    assert regress("--against", old) == 1


def test_results_of_the_kernel_benchmark(tmp_path: Path) -> None:
    files = []
    for seconds in (1e-5, 1.2e-5):
        case = {"op": "linear", "name": "1 × 8", "seconds": seconds}
        files.append(tmp_path / str(seconds))
        files[-1].write_text(json.dumps({"machine": CARD, "cases": [case]}))
    assert regress("--against", str(files[0]), "--new", str(files[1])) == 1
    assert regress("--against", str(files[1]), "--new", str(files[0])) == 0


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"rows": []}'])
def test_what_is_no_result_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad").write_text(text)
    good = write(tmp_path / "good", row("decode", 1.0))
    assert regress("--against", good, "--new", str(tmp_path / "bad")) == 2
    assert str(tmp_path / "bad") in capsys.readouterr().err


def test_figures_that_cannot_be_compared_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here, there = write(tmp_path / "a", row("decode", 1.0)), write(tmp_path / "b", row("prefill", 1.0))
    assert regress("--against", here, "--new", there) == 2
    assert "no row in common" in capsys.readouterr().err
    other = write(tmp_path / "c", row("decode", 1.0), machine={"gpus": [{"name": "Card B"}]})
    assert regress("--against", here, "--new", other) == 2
    assert "different cards" in capsys.readouterr().err
    assert regress("--against", str(tmp_path / "nowhere"), "--new", here) == 2
