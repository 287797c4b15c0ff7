"""What cannot be meant is refused with a sentence that says what is expected, never with an error of Python's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, AsyncLLM, BeamSearchParams, LLMEngine, SamplingParams
from quire.errors import RequestError
from tests.checkpoints import make_llama

PROMPTS: tuple[Any, ...] = (None, 5, 2.5, b"hi", object(), [None], [b"hi"], [5.5], [["a"]], [[1, "a"]], {},
                            {"prompt": 5}, {"prompt_token_ids": 5}, {"prompt_token_ids": "5"}, [True, "a"],
                            {"prompt_token_ids": [5, True]})  # fmt: skip
CONVERSATIONS: tuple[Any, ...] = ("hi", {"role": "user", "content": "hi"}, None, 5, ["hi"], [["hi"]], [{}], [5],
                                  [{"content": "hi"}], [{"role": 5}])  # fmt: skip
WRONG_PARAMS: tuple[Any, ...] = ({"temperature": 0}, "greedy", 5, [{"temperature": 0}], [5])
WRONG: tuple[Any, ...] = (object(), "x", b"x", 2.5, -3, float("nan"), [1], ["a"], [None], {"a": 1}, {1: "x"})
TAKES = {
    "repetition_penalty": 2, "temperature": 2, "seed": 2, "stop": 2, "stop_token_ids": 2, "bad_words": 2,
    "logprob_token_ids": 2, "allowed_token_ids": 2, "extra_args": 2,
}  # fmt: skip
"""How many of WRONG some fields may take."""


def shown(value: Any) -> str:
    return "an object" if type(value) is object else repr(value)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), dtype="float32", skip_tokenizer_init=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def chatting() -> Iterator[LLM]:
    with LLM(max_model_len=128) as llm:
        yield llm


def refused(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(RequestError) as caught:
        call()
    assert said in caught.value.message, caught.value.message


@pytest.mark.parametrize("prompt", PROMPTS, ids=shown)
def test_what_is_no_prompt(llm: LLM, prompt: Any) -> None:
    refused(lambda: llm.generate(prompt), "A prompt is a string, a list of token ids")
    refused(lambda: llm.beam_search(prompt, BeamSearchParams(beam_width=2, max_tokens=2)), "A prompt is a string")


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=shown)
def test_what_is_no_conversation(chatting: LLM, messages: Any) -> None:
    refused(lambda: chatting.chat(messages), "A conversation is a list of messages")


@pytest.mark.parametrize("params", WRONG_PARAMS, ids=shown)
def test_what_are_no_sampling_params(llm: LLM, params: Any) -> None:
    refused(lambda: llm.generate([[5]], params), "sampling_params must be SamplingParams, got ")
    refused(lambda: llm.beam_search([[5]], params), "params must be BeamSearchParams, got ")


def test_the_other_engines_say_the_same(checkpoint: Path) -> None:
    engine, streaming = LLMEngine(str(checkpoint)), AsyncLLM(str(checkpoint))

    async def stream(prompt: Any, params: Any) -> None:
        async for _ in streaming.generate(prompt, params):
            pass

    wrong: Any = {"temperature": 0}
    refused(lambda: engine.add_request("1", [5], wrong), "got dict: write SamplingParams(**values)")
    refused(lambda: engine.add_request("1", b"x", SamplingParams()), "A prompt is a string")
    refused(lambda: asyncio.run(stream([5], wrong)), "got dict: write SamplingParams(**values)")
    refused(lambda: asyncio.run(stream(5, SamplingParams())), "A prompt is a string")
    engine.close()
    streaming.shutdown()


def test_prompts_may_come_from_any_iterable(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2)
    assert len(llm.generate(([number, 6] for number in (5, 6, 7)), params)) == 3  # type: ignore[arg-type]
    assert llm.generate(range(5, 8), params)[0].prompt_token_ids == [5, 6, 7]
    for ids in (torch.tensor([5, 6, 7]), np.array([5, 6, 7]), (5, 6, 7), [5, np.int64(6), 7]):
        assert llm.generate({"prompt_token_ids": ids}, params)[0].prompt_token_ids == [5, 6, 7]
    refused(lambda: llm.generate([[5]], params, priority=5), "a list of as many priorities")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SamplingParams.__struct_fields__)
def test_every_sampling_parameter_refuses_wrong_types_by_name(name: str) -> None:
    named = []
    for value in WRONG:
        try:
            SamplingParams(**{name: value})
        except RequestError as error:
            named.append(error.param)
    assert set(named) == {"structured_outputs" if name == "guided_decoding" else name}
    assert len(named) >= len(WRONG) - TAKES.get(name, 0)


def test_a_misspelt_sampling_parameter_gets_the_nearest() -> None:
    wrong: Any = {"temprature": 1}
    with pytest.raises(TypeError, match=r"SamplingParams has no parameter 'temprature'\. Did you mean 'temperature'\?"):
        SamplingParams(**wrong)
    refused(lambda: SamplingParams(stop=5), "stop must be a list of strings, got 5.")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"SamplingParams takes names alone, such as SamplingParams\(max_tokens=64\)\."):
        SamplingParams(0.5)  # type: ignore[misc]
    with pytest.raises(TypeError, match=r"BeamSearchParams has no parameter 'width'\. Did you mean 'beam_width'\?"):
        BeamSearchParams(width=3, max_tokens=5)  # type: ignore[call-arg]


def test_parameters_are_copied_and_made_of_optional_values() -> None:
    params = SamplingParams(stop=["a"], temperature=0.5)
    copied = params.clone()
    assert copied == params
    assert copied.stop is not params.stop
    assert SamplingParams.from_optional(temperature=None, top_p=0.5, max_tokens=None) == SamplingParams(
        top_p=0.5, max_tokens=None
    )
    with pytest.raises(TypeError, match="Did you mean 'top_p'"):
        SamplingParams.from_optional(topp=None)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("sleep", "close()"),
        ("llm_engine", "LLMEngine"),
        ("genrate", "'generate'"),
    ],
)
def test_a_method_that_is_not_there_says_what_is(llm: LLM, name: str, said: str) -> None:
    assert not hasattr(llm, name)
    with pytest.raises(AttributeError) as caught:
        getattr(llm, name)
    assert str(caught.value).startswith(f"LLM has no '{name}'.")
    assert said in str(caught.value)
