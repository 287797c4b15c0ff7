"""Engines that divide experts among all their ranks: each answers what one rank does, whatever the others do meanwhile."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.clock import Clock
from quire.config import Config
from quire.offline import local_engine
from quire.supervisor.engine_group import EngineGroup
from tests.checkpoints import make_tiny
from tests.executor.thread_ranks import ThreadRanks
from tests.models.divisible import DIVISIBLE
from tests.parity.test_divided import GREEDY, SETTINGS, WITH_EXPERTS, answers, check_same, prompts, tokens_and_logprobs

ENGINES = 2


@contextmanager
def engines(directory: Path, monkeypatch: pytest.MonkeyPatch, tp: int = 1, **settings: Any) -> Iterator[list[LLM]]:
    """Of a model whose experts they divide."""
    with ExitStack() as opened:
        yield start(directory, monkeypatch, opened, tp, [SETTINGS | settings] * ENGINES)


def start(
    directory: Path, monkeypatch: pytest.MonkeyPatch, opened: ExitStack, tp: int, settings: list[dict[str, Any]]
) -> list[LLM]:
    """Each with settings of its own. All have to start, and to end, at the same time."""
    numbers, lock = iter(range(ENGINES)), threading.Lock()
    shared: list[EngineGroup] = []

    def executor_of(config: Config, clock: Clock) -> ThreadRanks:
        own = config.with_values(data_parallel_size=ENGINES)
        with lock:
            if not shared:
                shared.append(EngineGroup(own.parallel))
            return ThreadRanks(own, clock, shared[0].ends_of(next(numbers)))

    monkeypatch.setattr(local_engine, "build_executor", executor_of)
    pool = opened.enter_context(ThreadPoolExecutor(ENGINES))
    ranks = {"tensor_parallel_size": tp, "enable_expert_parallel": True}
    futures = [pool.submit(LLM, str(directory), **each | ranks) for each in settings]
    found = [future.result() for future in futures]

    def close() -> None:
        for done in [pool.submit(llm.close) for llm in found]:
            done.result()
        shared[0].close()

    opened.callback(close)
    return found


@pytest.fixture(scope="module")
def undivided(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def of(case: str) -> Path:
        torch.set_num_threads(1)
        return make_tiny(tmp_path_factory.mktemp("experts"), **{"num_hidden_layers": 3} | DIVISIBLE[case])

    return of


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.long("many cards"))])
@pytest.mark.parametrize("case", WITH_EXPERTS)
def test_each_engine_says_what_one_rank_says(
    case: str, tp: int, undivided: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of uneven loads that begin and end at different times."""
    directory, rng = undivided(case), random.Random(1)
    batches = [[[rng.randrange(3, 320) for _ in range(rng.randrange(2, 90))] for _ in range(n)] for n in (1, 5, 2)]
    with LLM(str(directory), **SETTINGS) as one:
        expected = [tokens_and_logprobs(one.generate(batch, GREEDY)) for batch in batches]
    with engines(directory, monkeypatch, tp, max_num_batched_tokens=48) as both:

        def serve(engine: int) -> list[Any]:
            time.sleep(0.1 * engine)
            order = batches if engine else batches[::-1]
            found = [tokens_and_logprobs(both[engine].generate(batch, GREEDY)) for batch in order]
            return found if engine else found[::-1]

        with ThreadPoolExecutor(ENGINES) as pool:
            several = list(pool.map(serve, range(ENGINES)))
        alone = tokens_and_logprobs(both[1].generate(batches[2], GREEDY))
    for found in (*several, [expected[0], expected[1], alone]):
        for batch, wanted in zip(found, expected, strict=True):
            assert [tokens for tokens, _ in batch] == [tokens for tokens, _ in wanted]
            for (_, logprobs), (_, exact) in zip(batch, wanted, strict=True):
                assert logprobs == pytest.approx(exact, abs=1e-3)
