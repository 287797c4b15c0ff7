"""`quire bench agent`: the sessions that it makes, and what it finds on servers with and without a cache."""

from __future__ import annotations

import json
import random
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import main
from quire.errors import ConfigError
from quire.tools.bench.agent_sessions import SessionOptions, make_sessions
from quire.tools.bench.datasets import LocalTokens
from tests.api.server import running
from tests.bench.scripted_server import ScriptedServer, tokens

SMALL = {"num_sessions": 3, "first_len": 200, "context_len": 1200, "turn_len": 100, "output_len": 8, "tool_time": 0.01}


def bench(directory: Path, url: str, *arguments: str, **lengths: float) -> dict[str, Any]:
    """Its result."""
    file = directory / "result.json"
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in {**SMALL, **lengths}.items()]
    with pytest.raises(SystemExit) as ended:
        main(["bench", "agent", "--base-url", url, "--seed", "1", "--output-json", str(file), *flags, *arguments])
    found: dict[str, Any] = json.loads(file.read_text())
    assert ended.value.code == (1 if found["failed_sessions"] else 0)
    return found


class OneToken(LocalTokens):
    """Costs no time: lengths are looked at alone."""

    def random_ids(self, count: int, rng: random.Random) -> list[int]:
        return [7] * count


def test_sessions_are_like_agents() -> None:
    options = SessionOptions(num_sessions=40)
    sessions = make_sessions(options, OneToken(8), random.Random(1))
    turns = [turn for session in sessions for turn in session.turns]
    added = [after.prompt_len - before.prompt_len for each in sessions for before, after in pairwise(each.turns)]
    ratio = sum(turn.prompt_len for turn in turns) / sum(turn.output_len for turn in turns)
    assert ratio == pytest.approx(131, rel=0.05)
    assert statistics.mean(added) == pytest.approx(2200, rel=0.05)
    assert {session.turns[0].prompt_len for session in sessions} == {12_000}
    assert all(70_000 < len(session.tokens) == session.turns[-1].prompt_len <= 80_000 for session in sessions)
    assert statistics.mean(turn.pause for turn in turns) == pytest.approx(2.0, rel=0.1)
    again = make_sessions(options, OneToken(8), random.Random(1))
    assert sessions == again != make_sessions(options, OneToken(8), random.Random(2))


def test_each_prompt_begins_with_the_one_before() -> None:
    (session,) = make_sessions(SessionOptions(1, 20, 200, 30, 5), LocalTokens(1000), random.Random(1))
    prompts = [sample.prompt for sample in session.prompts()]
    assert len(prompts) > 4
    for before, after in pairwise(prompts):
        assert after[: len(before)] == before

    class Numbers(LocalTokens):
        def decode(self, ids: list[int]) -> str:
            return " ".join(map(str, ids))

    talks = [(sample.prompt, *sample.others) for sample in session.conversations(Numbers(1000))]
    for before_texts, texts, turn in zip(talks, talks[1:], session.turns, strict=False):
        assert texts[: len(before_texts)] == before_texts
        assert len(str(texts[-2]).split()) == turn.output_len  # the reply
    assert " ".join(map(str, talks[-1])) == " ".join(map(str, session.tokens))


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_a_server_with_room_computes_little_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], backend: str
) -> None:
    with running(tmp_path, max_model_len=2048, num_blocks=1024) as server:
        found = bench(tmp_path, server.url, "--backend", backend, first_len=600, turn_len=100)
    assert found["turns"] > 10
    assert found["share_of_ideal"] >= 0.98  # blocks of 16 tokens: 8 of each turn's some 700 are not found
    assert 0 <= found["recomputed_prompt_tokens"] <= 16 * found["turns"]
    assert found["hit_rate"] <= found["ideal_hit_rate"] < 1
    assert 0 < found["median_ttft_ms"] <= found["median_turn_ms"]
    assert "Share of the ideal" in capsys.readouterr().out


def test_a_server_without_a_cache_computes_all_again(tmp_path: Path) -> None:
    with running(tmp_path, max_model_len=2048, num_blocks=1024, enable_prefix_caching=False) as server:
        found = bench(tmp_path, server.url)
    assert (found["hit_rate"], found["share_of_ideal"]) == (0, 0)
    assert found["computed_prompt_tokens"] == found["prompt_tokens"]
    assert found["recomputed_prompt_tokens"] == found["prompt_tokens"] - found["new_prompt_tokens"] > 0


def test_a_server_that_says_nothing_of_its_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer(tokens) as server:
        url = f"http://127.0.0.1:{server.port}"
        found = bench(tmp_path, url, "--vocab-size", "100", "--max-concurrency", "1")
        assert server.max_open == 1
        server.metrics = "vllm:prefix_cache_hits_total 0.0\n"
    assert found["hit_rate"] is found["computed_prompt_tokens"] is None
    assert "not reported" in capsys.readouterr().out


def test_what_cannot_be_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(tmp_path, max_model_len=512) as server, pytest.raises(SystemExit):
        main(["bench", "agent", "--base-url", server.url])
    assert "a sequence here holds 512: give smaller lengths" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--turn-len must be at least 4"):
        SessionOptions(turn_len=3)
    with pytest.raises(ConfigError, match="--context-len must not be below --first-len"):
        SessionOptions(context_len=11)
