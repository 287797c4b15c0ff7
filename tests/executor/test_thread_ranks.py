"""Ranks as threads: a rank that fails ends the engine, instead of keeping it waiting."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.errors import QuireError
from quire.foundation.messages.workers import Plan
from quire.offline import local_engine
from quire.runtime.executor.cpu_rank import RankSteps
from tests.checkpoints import make_llama
from tests.executor.thread_ranks import ThreadRanks

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_llama(tmp_path_factory.mktemp("model"), layers=2))


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("divided", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_what_a_rank_raises_ends_the_engine(
    model: str, divided: str, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    execute, steps = RankSteps.execute, {0: 0, 1: 0}

    def executed(self: RankSteps, plan: Plan, masks: Any) -> Any:
        rank = self._mesh.rank
        steps[rank] += 1
        assert (rank, steps[rank]) != (failing, 4), "planted"
        return execute(self, plan, masks)

    monkeypatch.setattr(RankSteps, "execute", executed)
    monkeypatch.setattr(local_engine, "build_executor", ThreadRanks)
    settings: dict[str, Any] = {divided: 2, "dtype": "float32", "max_model_len": 64, "num_gpu_blocks_override": 8}
    found: list[BaseException] = []

    def generate() -> None:
        with LLM(model, **settings) as llm, pytest.raises((AssertionError, QuireError)) as error:
            llm.generate([[5, 6, 7]], GREEDY)
        found.append(error.value)

    caller = threading.Thread(target=generate, daemon=True)
    caller.start()
    caller.join(100)  # the ranks themselves wait for each other for 30 s
    assert found, "the engine waits for ever"
    assert "planted" in str(found[0])
