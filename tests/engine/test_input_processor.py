"""Limits and seeds of a request, resolved."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from quire.engine.input_processor import InputProcessor, choice_seed
from quire.errors import ContextLengthError, RequestError
from quire.foundation.clock import SystemClock
from quire.foundation.messages.from_engine import Ready
from quire.foundation.messages.to_engine import CLIENT_SHIFT
from quire.sampling_params import SamplingParams


def input_processor(num_blocks: int = 8, max_model_len: int = 100, number: int = 2) -> InputProcessor:
    ready = Ready("m", max_model_len, 50, num_blocks, 16, capacity=min(max_model_len, num_blocks * 16))
    return InputProcessor(number, ready, [7], 5, "fcfs", SystemClock(), iter(range(1000, 2000)).__next__)


def test_ids_name_their_client_and_are_never_reused() -> None:
    made = input_processor()
    ids = [add.id for _ in range(3) for add in made.adds([1], SamplingParams(n=2))]
    assert len(set(ids)) == 6
    assert {i >> CLIENT_SHIFT for i in ids} == {2}


def test_seeds_are_fresh_or_derived_from_the_requests_own() -> None:
    made = input_processor()
    assert [add.seed for add in made.adds([1], SamplingParams())] == [1000]
    given = [add.seed for add in made.adds([1], SamplingParams(seed=-1, n=3))]
    assert given == [choice_seed(-1, 0), choice_seed(-1, 1), choice_seed(-1, 2)]
    assert given[0] == 2**64 - 1
    assert len({choice_seed(5, i) for i in range(10_000)}) == 10_000


def test_only_the_first_choice_carries_the_prompt() -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=4)
    first, *others = input_processor().adds([1, 2, 3], params)
    assert [(fork.id, fork.seed, fork.generated) for fork in first.forks] == [(a.id, a.seed, []) for a in others]
    assert all(other.tokens is first.tokens and other.fork_of == first.id and not other.forks for other in others)
    one, many = (
        len(msgspec.msgpack.encode(input_processor().adds([1] * 90, SamplingParams(n=n, max_tokens=4))[0]))
        for n in (1, 8)
    )
    assert many - one < 7 * 32


def test_max_tokens_is_what_is_left() -> None:
    (add,) = input_processor().adds([1] * 30, SamplingParams(max_tokens=None))
    assert add.sampling.max_tokens == 70
    (add,) = input_processor(num_blocks=2).adds([1] * 30, SamplingParams(max_tokens=None))
    assert add.sampling.max_tokens == 2


@pytest.mark.parametrize(
    ("settings", "bad_words"),
    [
        ({"allowed_token_ids": [7, 9], "stop_token_ids": [9], "min_tokens": 1}, []),
        ({"allowed_token_ids": [4, 5]}, [[4], [5], [6, 5]]),
        ({"allowed_token_ids": [4, 7], "min_tokens": 2}, [[4]]),
    ],
)
def test_some_allowed_token_can_be_drawn(settings: dict[str, Any], bad_words: list[list[int]]) -> None:
    made = input_processor()
    with pytest.raises(RequestError, match="leaves no token to draw") as raised:
        made.adds([1], SamplingParams(**settings), bad_words=bad_words)
    assert raised.value.param == "allowed_token_ids"
    more = settings | {"allowed_token_ids": [*settings["allowed_token_ids"], 6]}
    assert made.adds([1], SamplingParams(**more), bad_words=bad_words)
    assert made.adds([1], SamplingParams(**settings | {"min_tokens": 0}), bad_words=bad_words[1:])


def test_stop_ids_are_the_models_and_the_requests() -> None:
    made = input_processor()
    assert made.adds([1], SamplingParams(stop_token_ids=[9]))[0].stop_ids == [7, 9]
    assert made.adds([1], SamplingParams(stop_token_ids=[9], ignore_eos=True))[0].stop_ids == [9]


@pytest.mark.parametrize(
    ("tokens", "params", "error", "message"),
    [
        ([], SamplingParams(), RequestError, "empty"),
        ([50], SamplingParams(), RequestError, "Token id 50"),
        ([-1], SamplingParams(), RequestError, "Token id -1"),
        ([1] * 100, SamplingParams(max_tokens=None), ContextLengthError, "length is 100 tokens"),
        ([1] * 90, SamplingParams(max_tokens=11), ContextLengthError, "lower max_tokens to 10"),
        ([1] * 90, SamplingParams(max_tokens=None, min_tokens=11), ContextLengthError, "min_tokens is 11"),
        ([1], SamplingParams(logprobs=6), RequestError, "at most 5"),
        ([1], SamplingParams(stop_token_ids=[50]), RequestError, "stop_token_ids: 50"),
    ],
)
def test_what_cannot_run_is_refused_with_the_numbers(
    tokens: list[int], params: SamplingParams, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        input_processor().adds(tokens, params)
