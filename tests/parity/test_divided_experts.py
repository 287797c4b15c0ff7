"""Engines that divide experts among all their ranks: each says what one rank does, whatever the others do."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM
from quire.foundation.clock import Clock
from quire.foundation.config import Config
from quire.offline import local_engine
from quire.serving.supervisor.lives import GroupMemory
from tests.checkpoints import make_tiny
from tests.executor.thread_ranks import ThreadRanks
from tests.models.divisible import DIVISIBLE
from tests.parity.test_divided import GREEDY, MODES, SETTINGS, WITH_EXPERTS, answers, check_same, tokens_and_logprobs


@contextmanager
def engines(
    directory: Path, monkeypatch: pytest.MonkeyPatch, tp: int = 1, **settings: Any
) -> Iterator[tuple[LLM, LLM]]:
    """Two of a model, whose experts they divide. They start together, and end together."""
    lock, shared, started = threading.Lock(), list[GroupMemory](), iter(range(2))

    def executor_of(config: Config, clock: Clock) -> ThreadRanks:
        own = config.with_values(data_parallel_size=2)
        with lock:
            if not shared:
                shared.append(GroupMemory(own.parallel))
            return ThreadRanks(own, clock, shared[0].ends_of(next(started)))

    monkeypatch.setattr(local_engine, "build_executor", executor_of)
    settings |= {"tensor_parallel_size": tp, "enable_expert_parallel": True}
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: LLM(str(directory), **settings), range(2))
        yield first, second
        list(pool.map(LLM.close, (first, second)))
    shared[0].close()


def some_prompts(rng: random.Random, count: int, longest: int = 90) -> list[list[int]]:
    return [[rng.randrange(3, 320) for _ in range(rng.randrange(2, longest))] for _ in range(count)]


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
    batches = [some_prompts(rng, count) for count in (1, 5, 2)]
    with LLM(str(directory), **SETTINGS) as one:
        expected = [tokens_and_logprobs(one.generate(batch, GREEDY)) for batch in batches]
    with engines(directory, monkeypatch, tp, max_num_batched_tokens=48, **SETTINGS) as both:

        def serve(engine: int) -> list[Any]:
            time.sleep(0.1 * engine)
            order = batches if engine else batches[::-1]
            found = [tokens_and_logprobs(both[engine].generate(batch, GREEDY)) for batch in order]
            return found if engine else found[::-1]

        with ThreadPoolExecutor(2) as pool:
            several = list(pool.map(serve, range(2)))
        alone = tokens_and_logprobs(both[1].generate(batches[2], GREEDY))
    for found in (*several, [expected[0], expected[1], alone]):
        for batch, wanted in zip(found, expected, strict=True):
            assert [tokens for tokens, _ in batch] == [tokens for tokens, _ in wanted]
            for (_, logprobs), (_, exact) in zip(batch, wanted, strict=True):
                assert logprobs == pytest.approx(exact, abs=1e-3)


@pytest.mark.parametrize(
    ("case", "tp", "modes"),
    [
        ("qwen3 moe", 1, MODES),
        pytest.param("mixtral", 1, MODES[:1], marks=pytest.mark.long("many cards")),
        pytest.param("qwen3 moe", 2, MODES[1:], marks=pytest.mark.long("many cards")),
    ],
)
def test_whatever_an_engine_does_beside_a_busy_one_it_says_what_one_rank_says(
    case: str, tp: int, modes: tuple[str, ...], undivided: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks, on cached blocks, for several sequences of a prompt, with prompt log probabilities, preempted."""
    directory = undivided(case)
    one = answers(directory, {}, modes)
    others: list[int] = []

    @contextmanager
    def beside_a_busy_one(model: str, **settings: Any) -> Iterator[LLM]:
        with engines(Path(model), monkeypatch, tp, **settings) as (first, second), ThreadPoolExecutor(1) as pool:
            ended = threading.Event()

            def keep_busy() -> None:
                rng = random.Random(2)
                while not ended.is_set():
                    few = second.generate(some_prompts(rng, rng.randrange(1, 4), 40), GREEDY)
                    others.append(len(few))
                    time.sleep(rng.random() / 20)

            busy = pool.submit(keep_busy)
            yield first
            ended.set()
            busy.result()

    check_same(answers(directory, {}, modes, beside_a_busy_one), one)
    assert len(others) > 2
