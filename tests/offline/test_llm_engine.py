"""`LLMEngine`: what `LLM` says, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, EngineArgs, LLMEngine, RequestOutput, SamplingParams, TextPrompt, TokensPrompt
from quire.errors import RequestError
from quire.sampling_params import RequestOutputKind
from tests.checkpoints import make_llama

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama") / "model", layers=1)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[LLMEngine]:
    engine = LLMEngine.from_engine_args(EngineArgs(str(checkpoint), **SETTINGS))
    yield engine
    engine.close()


def steps(engine: LLMEngine) -> list[RequestOutput]:
    """All outputs until nothing is left."""
    found = []
    while engine.has_unfinished_requests():
        found += engine.step()
    assert engine.get_num_unfinished_requests() == 0
    return found


def test_requests_that_come_between_steps_get_what_llm_returns(checkpoint: Path, engine: LLMEngine) -> None:
    prompts = [TextPrompt(prompt="the quick"), TokensPrompt(prompt_token_ids=[5, 6, 7]), "Paris"]
    with LLM(str(checkpoint), **SETTINGS) as llm:
        expected = llm.generate(prompts, SamplingParams(**GREEDY), use_tqdm=False)
    found: list[RequestOutput] = []
    for number, prompt in enumerate(prompts):
        assert engine.add_request(f"r{number}", prompt, SamplingParams(**GREEDY)) == f"r{number}"
        found += engine.step()
    found += steps(engine)
    last = {output.request_id: output for output in found if output.finished}
    assert [last[f"r{number}"].outputs for number in range(3)] == [output.outputs for output in expected]
    assert len(found) > 12


def test_the_output_kind_says_what_outputs_hold(engine: LLMEngine) -> None:
    for name, kind in (("all", RequestOutputKind.CUMULATIVE), ("last", RequestOutputKind.FINAL_ONLY),
                       ("new", RequestOutputKind.DELTA)):  # fmt: skip
        engine.add_request(name, "one two", SamplingParams(output_kind=kind, n=1, **GREEDY))
    found = steps(engine)
    texts = {name: [o.outputs[0].text for o in found if o.request_id == name] for name in ("all", "last", "new")}
    assert texts["last"] == texts["all"][-1:] == ["".join(texts["new"])]
    assert len(texts["all"]) > 3


def test_a_request_that_is_aborted_or_wrong_leaves_the_others(engine: LLMEngine) -> None:
    engine.add_request("long", "one", SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    engine.add_request("short", "two", SamplingParams(**GREEDY))
    engine.step()
    with pytest.raises(RequestError, match="open already"):
        engine.add_request("short", "two", SamplingParams(**GREEDY))
    with pytest.raises(RequestError, match="maximum context length"):
        engine.add_request("too long", [5] * 500, SamplingParams(**GREEDY))
    engine.abort_request(["long", "unknown"])
    assert {output.request_id for output in steps(engine)} == {"short"}
    assert engine.step() == []


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA])
def test_log_probabilities_of_a_prompt_come_when_all_of_it_is_computed(
    kind: RequestOutputKind, checkpoint: Path
) -> None:
    """The prompt takes three steps, and another request makes each of them bring something."""
    engine = LLMEngine(str(checkpoint), **SETTINGS, max_num_batched_tokens=16)
    try:
        engine.add_request("other", [5], SamplingParams(**GREEDY))
        params = SamplingParams(**{**GREEDY, "max_tokens": 2}, prompt_logprobs=1, output_kind=kind)
        engine.add_request("long", list(range(3, 43)), params)
        found = [output for output in steps(engine) if output.request_id == "long"]
    finally:
        engine.close()
    scored = [output.prompt_logprobs for output in found if output.prompt_logprobs is not None]
    assert [len(each) for each in scored] == [40] * (1 if kind is RequestOutputKind.DELTA else 2)
    assert [bool(output.outputs and output.outputs[0].token_ids) for output in found][-2:] == [True, True]
