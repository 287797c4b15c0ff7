"""`AsyncLLM`: what `LLM` says, piece by piece, for many coroutines; and how streams end."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import quire
from quire import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    AsyncLLMEngine,
    PoolingParams,
    SamplingParams,
    StructuredOutputsParams,
)
from quire.errors import ConfigError, ContextLengthError, EngineDeadError, RequestError
from quire.outputs import RequestOutput
from quire.sampling_params import RequestOutputKind
from tests.checkpoints import make_llama, make_tiny
from tests.models.pooled import texts
from tests.models_sweep.pooled_rows import POOLED_ROWS

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama") / "model", max_len=4096)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[AsyncLLM]:
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(str(checkpoint), **SETTINGS))
    yield llm
    llm.shutdown()


@pytest.fixture
def awaited_readers(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine goes on once readers have had what a step brought, and said what they say then. Else it may be far
    ahead of them, or done, if they get no processor for some milliseconds."""
    engine = llm._engine
    hand_on = engine._call

    def hand_on_and_wait(function: Callable[[Any], None], value: object) -> None:
        was_read, loop = threading.Event(), engine._loop

        def take(value: object) -> None:
            function(value)  # wakes readers: they come before what is called soon
            asyncio.get_running_loop().call_soon(was_read.set)

        hand_on(take, value)
        while not was_read.wait(0.01) and loop is not None and loop.is_running() and loop is engine._loop:
            pass  # a loop that has ended, of an earlier test or call, reads no more

    monkeypatch.setattr(engine, "_call", hand_on_and_wait)


async def outputs(llm: AsyncLLM, prompt: Any, params: SamplingParams = GREEDY, **more: Any) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, params, **more)]


async def is_free(llm: AsyncLLM) -> bool:
    """Whether the engine holds nothing, soon."""
    for _ in range(6_000):
        counts = await llm.counts()
        if counts["requests"] == counts["in_flight"] == 0:
            return True
        await asyncio.sleep(0.01)
    return False


def test_the_older_names() -> None:
    assert AsyncLLMEngine is AsyncLLM
    assert {"AsyncLLM", "AsyncLLMEngine", "AsyncEngineArgs"} <= set(quire.__all__)


@pytest.mark.usefixtures("awaited_readers")
def test_streams_grow_to_what_llm_returns(checkpoint: Path, llm: AsyncLLM) -> None:
    prompts = ["the quick brown", [5, 6, 7], {"prompt_token_ids": [9, 8]}, "Paris is"]
    with LLM(str(checkpoint), **SETTINGS) as offline:
        expected = offline.generate(prompts, GREEDY, use_tqdm=False)

    async def all_at_once() -> list[list[RequestOutput]]:
        return await asyncio.gather(*(outputs(llm, prompt, request_id=f"r{i}") for i, prompt in enumerate(prompts)))

    for number, (stream, whole) in enumerate(zip(asyncio.run(all_at_once()), expected, strict=True)):
        assert len(stream) > 5
        assert [output.finished for output in stream] == [False] * (len(stream) - 1) + [True]
        assert {output.request_id for output in stream} == {f"r{number}"}
        last, (choice,) = stream[-1], whole.outputs
        assert (last.prompt, last.prompt_token_ids) == (whole.prompt, whole.prompt_token_ids)
        assert last.outputs[0] == choice
        for before, after in itertools.pairwise(stream):
            assert after.outputs[0].text.startswith(before.outputs[0].text)
            assert len(after.outputs[0].token_ids) > len(before.outputs[0].token_ids)


def test_final_only_comes_once_with_all_sequences(llm: AsyncLLM) -> None:
    params = SamplingParams(n=3, seed=3, max_tokens=9, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
    (output,) = asyncio.run(outputs(llm, "one two", params))
    assert output.finished
    assert len({tuple(choice.token_ids) for choice in output.outputs}) == 3
    assert [choice.finish_reason for choice in output.outputs] == ["length"] * 3


@pytest.mark.usefixtures("awaited_readers")
@pytest.mark.parametrize("n", [1, 3])
def test_deltas_add_up_to_the_whole(llm: AsyncLLM, n: int) -> None:
    fixed: dict[str, Any] = {"n": n, "seed": 5, "max_tokens": 20, "ignore_eos": True, "logprobs": 1}
    (whole,) = asyncio.run(
        outputs(llm, "one two", SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, prompt_logprobs=1, **fixed))
    )
    pieces = asyncio.run(
        outputs(llm, "one two", SamplingParams(output_kind=RequestOutputKind.DELTA, prompt_logprobs=1, **fixed))
    )
    assert len(pieces) > 5
    assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert [piece.prompt_logprobs for piece in pieces if piece.prompt_logprobs] == [whole.prompt_logprobs]
    for expected in whole.outputs:
        mine = [output for piece in pieces for output in piece.outputs if output.index == expected.index]
        assert "".join(output.text for output in mine) == expected.text
        assert [token for output in mine for token in output.token_ids] == expected.token_ids
        assert [entry for output in mine for entry in output.logprobs or ()] == expected.logprobs
        assert [output.finish_reason for output in mine] == [None] * (len(mine) - 1) + ["length"]
        assert mine[-1].cumulative_logprob == pytest.approx(expected.cumulative_logprob)


def test_deltas_name_only_sequences_that_have_something_new(llm: AsyncLLM) -> None:
    params = SamplingParams(n=4, seed=1, max_tokens=30, output_kind=RequestOutputKind.DELTA, stop=["a", "e", "i"])
    pieces = asyncio.run(outputs(llm, "one two", params))
    for piece in pieces:
        assert all(output.token_ids or output.finish_reason for output in piece.outputs)
    ends = [output.index for piece in pieces for output in piece.outputs if output.finish_reason]
    assert sorted(ends) == [0, 1, 2, 3]


TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}{% if add_generation_prompt %}says{{ mark }}{% endif %}"


def test_a_conversation_is_answered_as_llm_answers_it(checkpoint: Path, llm: AsyncLLM) -> None:
    messages = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "three"}]
    options: dict[str, Any] = {"chat_template": TEMPLATE, "chat_template_kwargs": {"mark": ":"}}
    with LLM(str(checkpoint), **SETTINGS) as offline:
        (expected,) = offline.chat(messages, GREEDY, use_tqdm=False, **options)

    async def chat() -> list[RequestOutput]:
        return [output async for output in llm.chat(messages, GREEDY, "talk", **options)]

    last = asyncio.run(chat())[-1]
    assert (last.request_id, last.prompt) == ("talk", "one two three says:")
    assert last.outputs == expected.outputs


@pytest.mark.usefixtures("awaited_readers")
@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_pause_lets_new_requests_wait(llm: AsyncLLM, mode: Any) -> None:
    long = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)

    async def paused() -> tuple[str | None, int, bool]:
        running = llm.generate("the", long)
        await anext(running)
        await llm.pause_generation(mode=mode)
        assert await llm.is_paused()
        late = asyncio.create_task(outputs(llm, "one two"))
        await asyncio.sleep(0.05)
        assert not late.done()
        await llm.resume_generation()
        assert not await llm.is_paused()
        last = [output async for output in running][-1].outputs[0]
        await llm.wait_for_requests_to_drain(60)
        return last.finish_reason, len(last.token_ids), (await late)[-1].finished

    reason, length, served = asyncio.run(paused())
    assert served
    assert (reason == "abort", length == 120) == (mode == "abort", mode != "abort")


@pytest.mark.usefixtures("awaited_readers")
def test_a_drain_that_takes_too_long_is_told(llm: AsyncLLM) -> None:
    async def drain() -> None:
        stream = llm.generate("the", SamplingParams(max_tokens=200, ignore_eos=True))
        await anext(stream)
        with pytest.raises(TimeoutError):
            await llm.wait_for_requests_to_drain(0.01)
        await stream.aclose()
        await llm.wait_for_requests_to_drain(60)

    asyncio.run(drain())


def test_structured_output(llm: AsyncLLM) -> None:
    params = SamplingParams(max_tokens=40, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    assert asyncio.run(outputs(llm, "one"))[-1].finished
    assert asyncio.run(outputs(llm, "one", params))[-1].outputs[0].text in ("yes", "no")


@pytest.mark.usefixtures("awaited_readers")
def test_a_stream_that_is_left_or_aborted_ends_in_the_engine(llm: AsyncLLM) -> None:
    long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)

    async def leave() -> None:
        stream = llm.generate("the", long)
        assert not (await anext(stream)).finished
        await stream.aclose()
        assert await is_free(llm)

    async def abort() -> None:
        stream = llm.generate("the", long, "mine")
        await anext(stream)
        await llm.abort(["mine", "unknown"])
        last = [output async for output in stream][-1]
        assert last.finished
        assert last.outputs[0].finish_reason == "abort"
        assert await is_free(llm)

    asyncio.run(leave())
    asyncio.run(abort())


@pytest.mark.usefixtures("awaited_readers")
def test_wrong_requests_fail_alone(llm: AsyncLLM) -> None:
    async def several() -> list[Any]:
        open_one = outputs(llm, "the", request_id="same")
        same = outputs(llm, "the", request_id="same")
        long = outputs(llm, [5] * 300)
        return await asyncio.gather(open_one, same, long, outputs(llm, "one two"), return_exceptions=True)

    first, same, long, other = asyncio.run(several())
    assert first[-1].finished
    assert isinstance(same, RequestError)
    assert isinstance(long, RequestError)
    assert other[-1].finished


def test_a_cached_prefix_can_be_forgotten(llm: AsyncLLM) -> None:
    async def cached() -> list[int]:
        found = []
        for forget in (False, False, True):
            if forget:
                assert await llm.reset_prefix_cache()
            found.append((await outputs(llm, [7] * 100))[-1].num_cached_tokens)
        return found

    assert asyncio.run(cached()) == [0, 96, 0]


def test_shutdown_ends_open_streams_and_refuses_new_ones(checkpoint: Path) -> None:
    llm = AsyncLLM(str(checkpoint), **SETTINGS | {"max_model_len": 4096})

    async def shut_down() -> None:
        await llm.check_health()
        stream = llm.generate("the", SamplingParams(max_tokens=4_000, ignore_eos=True))  # takes seconds
        await anext(stream)
        assert llm.is_running
        llm.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            async for _ in stream:
                pass
        with pytest.raises(EngineDeadError, match="shut down"):
            await outputs(llm, "the")
        with pytest.raises(EngineDeadError):
            await llm.check_health()

    asyncio.run(shut_down())
    assert llm.errored
    llm.shutdown()


def test_a_step_that_fails_is_told_to_every_stream(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = AsyncLLM(str(checkpoint), **SETTINGS)

    def broken(message: Any) -> None:
        raise RuntimeError("the device is lost")

    async def both() -> list[Any]:
        monkeypatch.setattr(llm._local.client._core, "turn", broken)
        return await asyncio.gather(outputs(llm, "the"), outputs(llm, "one"), return_exceptions=True)

    for error in asyncio.run(both()):
        assert isinstance(error, EngineDeadError)
    llm.shutdown()


def test_what_loading_raises_is_raised() -> None:
    with pytest.raises(ConfigError, match="no_such_setting"):
        AsyncLLM(no_such_setting=1)  # type: ignore[call-arg]


def test_texts_are_pooled_as_llm_pools_them(tmp_path: Path) -> None:
    """Many at a time; a wrong one and one that is aborted fail alone, and one that is left frees its place."""
    directory = make_tiny(tmp_path, "BertModel", **POOLED_ROWS["BertModel"])
    settings: dict[str, Any] = {"dtype": "float32", "pooler_config": {"pooling_type": "MEAN"}}
    settings["skip_tokenizer_init"] = True
    asked: list[Any] = [{"prompt_token_ids": row.tolist()} for row in texts()]
    with LLM(str(directory), **settings) as offline:
        expected = [each.outputs.data for each in offline.encode(asked, use_tqdm=False)]
    llm = AsyncLLM(str(directory), **settings)

    async def one(prompt: Any, params: PoolingParams | None = None, **more: Any) -> Any:
        return [each async for each in llm.encode(prompt, params, **more)]

    async def several() -> list[Any]:
        wrong = one(asked[0], PoolingParams(task="classify"))
        long = one({"prompt_token_ids": [7] * 513})
        cut = one({"prompt_token_ids": [*asked[1]["prompt_token_ids"], 9]}, truncate_prompt_tokens=40)
        every = [one(each, PoolingParams(), request_id=f"text {place}") for place, each in enumerate(asked)]
        found = await asyncio.gather(*every, cut, wrong, long, return_exceptions=True)
        left = llm.encode(asked[3])
        await left.asend(None)
        await left.aclose()
        assert await is_free(llm)
        return found

    try:
        *whole, cut, wrong, long = asyncio.run(several())
    finally:
        llm.shutdown()
    assert [output.request_id for (output,) in whole] == [f"text {place}" for place in range(len(asked))]
    for (output,), other in zip(whole, expected, strict=True):
        assert output.finished
        assert (output.outputs.data - other).abs().max() < 1e-6
    assert (cut[0].outputs.data - expected[1]).abs().max() < 1e-6
    assert isinstance(wrong, RequestError)
    assert isinstance(long, ContextLengthError)
