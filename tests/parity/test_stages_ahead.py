"""Stages of a pipeline on devices that run ahead of their hosts, as GPUs do: CPUs take their places, whose steps are
staged and replayed by the same code. `tests/gpu/test_pipeline_parallel.py` is the same on cards.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.foundation.clock import SystemClock
from quire.runtime.worker import kernel_profile
from quire.runtime.worker.worker import Worker
from tests.checkpoints import make_llama
from tests.executor.gpu_ranks_in_threads import executor_of, use_ranks_in_threads
from tests.executor.masked_requests import serve
from tests.executor.test_cpu_executor import first, next_
from tests.executor.test_gpu_executor import run
from tests.parity.test_divided import MODES, answers, check_same, divided, undivided
from tests.reference import Reference
from tests.worker.driver import config_for

pytestmark = pytest.mark.long("many cards")

__all__ = ["undivided"]


@pytest.mark.parametrize(
    ("case", "tp", "pp", "modes"),
    [
        ("llama, biases", 1, 2, MODES),
        ("qwen3 moe", 1, 3, MODES[:1]),
        ("qwen2, tied", 2, 2, MODES[1:]),
        ("qwen3", 2, 1, ()),
        ("gemma3", 1, 2, ()),
        ("mistral, window", 1, 3, MODES),
        ("gpt2", 1, 2, MODES[:1]),
    ],
)
def test_stages_say_what_one_rank_says(
    case: str,
    tp: int,
    pp: int,
    modes: tuple[str, ...],
    undivided: Callable[[str], tuple[Path, dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps are replayed in all of them, in the same shapes but where prompts' log probabilities are asked for."""
    directory, one = undivided(case)
    graphs = use_ranks_in_threads(monkeypatch)
    check_same(answers(directory, divided(tp, pp), modes), one)
    assert len(graphs) == tp * pp * (1 + len(modes))
    first, last = graphs[0].replayed, graphs[tp * pp - 1].replayed
    assert any(shape.is_decode for shape in last)
    assert any(not shape.is_decode for shape in last)
    assert len(first) >= len(last)


@pytest.mark.parametrize("ranks", [{"pipeline_parallel_size": 2}, {"pipeline_parallel_size": 3}])
def test_masked_requests_are_served(tmp_path: Path, ranks: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans come while a step of the last stage waits for its bitmasks."""
    use_ranks_in_threads(monkeypatch)
    tiny = make_llama(tmp_path, tokenizer=False, std=0.12)
    settings = {"max_num_batched_tokens": 64}
    executor = executor_of(config_for(tiny, **ranks, **settings), SystemClock())
    serve(Reference(tiny), executor, settings | ranks).client.close()


def test_kernels_of_all_ranks_are_profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Profile:
        def __init__(self) -> None:
            self._steps = len(launched)

        def end(self) -> dict[str, tuple[float, int]]:
            return {"steps": (0.5, len(launched) - self._steps)}

    launched = list[int]()
    launch = Worker.launch
    monkeypatch.setattr(Worker, "launch", lambda self, plan: (launched.append(plan.step), launch(self, plan))[1])
    monkeypatch.setattr(kernel_profile, "KernelProfile", Profile)
    use_ranks_in_threads(monkeypatch)
    tiny = make_llama(tmp_path, tokenizer=False)
    executor = executor_of(config_for(tiny, pipeline_parallel_size=2), SystemClock())
    executor.start()
    profiles = executor.profile_kernels(lambda: run(executor, [first(), *map(next_, range(2, 6))]))
    assert all(set(each) == {"steps"} and 5 <= each["steps"][1] <= 10 for each in profiles)
    assert len(profiles) == 2
    executor.close()
