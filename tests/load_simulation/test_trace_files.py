"""Traces of others: what their columns mean, what is shared, what is refused."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.errors import ConfigError
from quire.tools.bench.datasets import Tokens
from quire.tools.bench.load import ArrivalOptions
from quire.tools.simulation.trace import Trace, TraceFileOptions, read_trace


class Letters:
    """A letter is a token."""

    def random_ids(self, count: int, rng: random.Random) -> list[int]:
        return [0] * count

    def encode(self, text: str) -> list[int]:
        return list(map(ord, text))

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def read(path: Path, text: str, most: int = 100, rate: float = math.inf, **options: Any) -> Trace:
    path.write_text(text)
    tokens: Callable[[], Tokens] = Letters
    arrivals = ArrivalOptions(request_rate=rate)
    return read_trace(TraceFileOptions(str(path), **options), arrivals, most, tokens, random.Random(0))


BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,0,417,Conversation log
121,GPT-4,98,12,110,API log
"""


def test_burstgpt_has_seconds_and_leaves_out_what_failed(tmp_path: Path) -> None:
    found = read(tmp_path / "a.csv", BURSTGPT).requests
    assert [(each.arrival, each.prompt, each.output) for each in found] == [
        (0, 472, 18),
        (40, 1087, 230),
        (116, 98, 12),
    ]
    assert len(read(tmp_path / "a.csv", BURSTGPT, most=2).requests) == 2


def test_a_timed_trace_shares_blocks(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"timestamp": 0, "input_length": 1_300, "output_length": 5, "hash_ids": [7, 8, 9]},
        {"timestamp": 1_500, "input_length": 1_200, "output_length": 6, "hash_ids": [7, 8, 10]},
        {"timestamp": 500, "input_length": 40, "output_length": 7},
    ]
    text = "\n".join(map(json.dumps, lines))
    trace = read(tmp_path / "a.jsonl", text)
    assert [(each.arrival, each.prompt, each.output) for each in trace.requests] == [
        (0, 1_300, 5), (0.5, 40, 7), (1.5, 1_200, 6),
    ]  # fmt: skip
    first, other, second = trace.token_ids(50_000)
    assert first[:1_024] == second[:1_024]
    assert first[1_024:1_200] != second[1_024:]
    assert list(map(len, (first, other, second))) == [1_300, 40, 1_200]
    slow = read(tmp_path / "a.jsonl", text, trace_timestamps="s", trace_block_size=16)
    assert slow.seconds == 1_500
    first, _, second = slow.token_ids(50_000)
    assert first[:32] == second[:32]
    assert first[32:48] != second[32:48]


def test_a_load_generators_result_is_a_trace(tmp_path: Path) -> None:
    text = json.dumps({"input_lens": [10, 20], "output_lens": [3, 4], "start_times": [7.5, 7.0]})
    found = read(tmp_path / "a.json", text).requests
    assert [(each.arrival, each.prompt, each.output) for each in found] == [(0, 20, 4), (0.5, 10, 3)]


def test_prompts_are_tokenized_and_come_at_the_rate(tmp_path: Path) -> None:
    lines = [{"prompt": "a" * (i + 1), "output_tokens": 5} for i in range(21)]
    trace = read(tmp_path / "a.jsonl", "\n".join(map(json.dumps, lines)), rate=4.0)
    assert sorted(each.prompt for each in trace.requests) == list(range(1, 22))
    assert trace.seconds == pytest.approx(5)


def test_a_rate_stretches_the_gaps(tmp_path: Path) -> None:
    trace = read(tmp_path / "a.csv", BURSTGPT, rate=2.0)
    assert [each.arrival for each in trace.requests] == pytest.approx([0, 40 / 116, 1.0])
    assert trace.rate == pytest.approx(2)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "Time,Tokens\n1,2\n"),
        ("a.csv", "Timestamp,Request tokens,Response tokens\n"),
        ("a.csv", "Timestamp,Request tokens,Response tokens\nnow,1,2\n"),
        ("a.csv", "Timestamp,Request tokens,Response tokens\n-1,5,2\n"),
        ("a.jsonl", '{"timestamp": 1}\n'),
        ("a.jsonl", "{\n"),
        ("a.json", '{"input_lens": [1], "output_lens": []}'),
    ],
)
def test_what_is_no_trace_is_refused(name: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--trace"):
        read(tmp_path / name, text)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.csv cannot be read"):
        read_trace(TraceFileOptions("nothing.csv"), ArrivalOptions(), 1, Letters, random.Random(0))
