"""Logits processors: they see every token in time, fail alone, and cost others nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError, GenerationError, RequestError
from quire.foundation.messages.workers import Plan
from tests.checkpoints import VOCAB_SIZE, make_llama
from tests.engine.harness import Engine, add, alone
from tests.executor.fake import FakeExecutor
from tests.sampling.processors import Breaks, CountUp, Spoils

COUNT_UP = "tests.sampling.processors:CountUp"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama") / "model")


SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "recomputing": {"max_model_len": "auto", "num_gpu_blocks_override": 10, "preemption_mode": "recompute"},
    "swapping": {"max_model_len": "auto", "num_gpu_blocks_override": 10, "preemption_mode": "swap", "swap_space": 0.01},
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_every_token_is_known_when_the_next_is_drawn(checkpoint: Path, settings: str) -> None:
    free = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompts = [[10 * i + 3, 5, 10 * i + 7] for i in range(9)]
    with LLM(
        str(checkpoint), dtype="float32", logits_processors=[CountUp, Breaks], block_size=8, **SETTINGS[settings]
    ) as llm:
        expected = [llm.generate([prompt], free)[0].outputs for prompt in prompts]
        params = [
            SamplingParams(max_tokens=30, ignore_eos=True, extra_args={"count_up": i}) if i % 3 else free
            for i in range(9)
        ]
        outputs = llm.generate(prompts, params)
        assert (llm._engine.counts()["preemptions"] > 0) == (settings != "roomy")
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        if i % 3:
            assert output.outputs[0].token_ids == [(prompt[-1] + i * k) % VOCAB_SIZE for k in range(1, 31)]
        else:
            assert output.outputs == expected[i]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"break_at": 2}, "A logits processor failed: ValueError: broken"),
        ({"break_at": 0}, "A logits processor failed: ValueError: broken"),
        ({"count_up": "x"}, "A logits processor failed: count_up must be an integer."),
        ({"break_at": -1}, r"A logits processor failed: TypeError: it must return logits of shape \(320,\)"),
    ],
)
def test_what_goes_wrong_fails_its_own_request(checkpoint: Path, arguments: dict[str, Any], message: str) -> None:
    with LLM(str(checkpoint), dtype="float32", logits_processors=[COUNT_UP, Breaks]) as llm:
        with pytest.raises(GenerationError, match=message):
            llm.generate([[5, 6]], SamplingParams(max_tokens=5, ignore_eos=True, extra_args=arguments))
        assert llm.generate([[5, 6]], SamplingParams(max_tokens=5, ignore_eos=True))[0].outputs[0].finish_reason


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_what_a_processor_spoils_is_not_said_to_be_the_models(checkpoint: Path, value: str) -> None:
    """Alone, and beside a request without rules."""
    plain = SamplingParams(max_tokens=5, ignore_eos=True)
    spoilt = SamplingParams(max_tokens=5, extra_args={"spoil": value})
    with LLM(str(checkpoint), dtype="float32", logits_processors=[Spoils]) as llm:
        for params in ([spoilt], [plain, spoilt]):
            with pytest.raises(GenerationError, match="this request's own rules"):
                llm.generate([[5, 6]] * len(params), params)


def test_arguments_that_nobody_reads_are_refused(checkpoint: Path) -> None:
    with (
        LLM(str(checkpoint), dtype="float32") as llm,
        pytest.raises(RequestError, match="needs a server with --logits-processors"),
    ):
        llm.generate([[5]], SamplingParams(extra_args={"count_up": 1}))


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        ("tests.sampling.processors:NoProcessor", r"no method for_request"),
        ("tests.sampling.processors:Nothing", r"AttributeError.*package.module:Class"),
        ("no_such_module:Class", r"ModuleNotFoundError"),
        ("tests.sampling.processors", r"package.module:Class"),
        (lambda: None, r"no class that can be imported"),
    ],
)
def test_what_is_no_processor_is_said_at_the_start(checkpoint: Path, processor: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(checkpoint), dtype="float32", logits_processors=[processor])


class Watching(FakeExecutor):
    """Notes in which steps each slot stands, and in which of them it draws."""

    def __init__(self) -> None:
        super().__init__()
        self.unprocessed: list[Plan] = []
        self.overlaps: dict[int, int] = {}

    def submit(self, plan: Plan) -> None:
        for earlier in self.unprocessed:
            drawing = {earlier.slots[row] for row in earlier.sampled_rows}
            for slot in drawing & set(plan.slots):
                self.overlaps[slot] = self.overlaps.get(slot, 0) + 1
        self.unprocessed.append(plan)
        super().submit(plan)

    def collect(self, timeout: float | None) -> Any:
        result = super().collect(timeout)
        self.unprocessed.pop(0)
        return result


def test_a_host_bound_request_is_never_planned_ahead_and_others_are() -> None:
    executor = Watching()
    engine = Engine(executor, logits_processors=(COUNT_UP,))
    bound = add(1, [1, 2, 3], 20, extra_args={"count_up": 1})
    free = add(2, [4, 5, 6], 20)
    outcome = engine.run([bound, free])
    assert outcome.tokens == {1: alone([1, 2, 3], 20), 2: alone([4, 5, 6], 20)}
    assert list(executor.overlaps) == [1]  # the second slot
    assert executor.overlaps[1] > 10
    engine.assert_all_free()


def test_a_request_that_a_processor_refuses_is_host_bound_too() -> None:
    executor = Watching()
    engine = Engine(executor, logits_processors=(COUNT_UP,))
    engine.run([add(1, [1, 2, 3], 8, extra_args={"count_up": "x"})])
    assert executor.overlaps == {}
