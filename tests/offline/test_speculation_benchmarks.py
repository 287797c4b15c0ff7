"""Benchmarks of speculation with tiny shapes. At a given acceptance: rates are as asked, steps are timed, and each has
its prediction. Of a text with one change: the model that is made for it says that text.
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from benchmarks import copying
from benchmarks.forced_speculation import LLAMA, arguments, compare, llama_pair, rates_of
from tests.offline.test_drafts_ahead import running_ahead

TINY: dict[str, dict[str, Any]] = {
    "8b": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16},
    "1b": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8, "tie_word_embeddings": True
    },
}  # fmt: skip
COMMON = LLAMA | {"vocab_size": 500, "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1,
                  "eos_token_id": 2}  # fmt: skip


@pytest.mark.parametrize("ahead", [False, True])
def test_figures_of_a_tiny_pair(ahead: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    arguments(parser)
    asked = "--rows 1,3 --step-rows 3 --rates 0.6 --step-rates 0,0.8,1 --prompt 20 --tokens 40 --drafts 3 --repeats 1"
    with running_ahead() if ahead else nullcontext():
        ratios = compare(llama_pair(tmp_path, TINY, COMMON), parser.parse_args(asked.split()))
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(ratios) == 2
    steps = [each for each in found if each["case"] == "steps"]
    assert [(each["rows"], each["drafts"]) for each in steps] == [(3, 0)] + [(3, 3)] * 3
    assert all(each["ms"] > 0 and each["predicted_ms"] > 0 for each in steps)
    for each in steps[1:]:
        assert each["tokens_per_row"] == pytest.approx(each["expected"], abs=0.5)
    throughput = [each for each in found if each["case"] == "throughput"]
    assert [(each["rows"], each["rate"]) for each in throughput] == [(1, 0.6), (3, 0.6)]


def test_rates_are_those_of_drafts_that_are_right_one_by_one() -> None:
    assert rates_of(0.5, 3) == [0.5, 0.25, 0.125]
    assert rates_of(0.0, 2) == [0.0, 0.0]


def test_a_text_is_repeated_with_one_change() -> None:
    parser = argparse.ArgumentParser()
    copying.arguments(parser)
    found = copying.compare(parser.parse_args(["--shape", "tiny", "--repeats", "1"]))
    assert [each["engine"] for each in found] == ["off", "ngram", "suffix"]
    assert all(200 <= each["output"] <= 400 and each["tokens_per_s"] > 0 for each in found)
