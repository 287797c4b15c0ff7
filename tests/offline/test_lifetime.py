"""Who may use an engine in this process, and until when: after it was closed, from several threads, in a fork."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncLLM, BeamSearchParams, LLMEngine, SamplingParams
from quire.errors import ConfigError, EngineDeadError
from tests.checkpoints import make_llama

SETTINGS: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 8}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)
PATIENCE_S = 60.0
FORK = """
import asyncio, gc, os, sys
from quire import LLM, AsyncLLM, LLMEngine, SamplingParams
from quire.errors import EngineDeadError

async def whole(llm):
    return [output async for output in llm.generate([5, 6, 7], GREEDY)][-1].outputs[0].token_ids

def engine_tokens(engine):
    engine.add_request("1", [5, 6, 7], GREEDY)
    while not (outputs := engine.step()) or not outputs[0].finished:
        pass
    return outputs[0].outputs[0].token_ids

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
kinds, checkpoint, ranks = sys.argv[1:]
for kind in kinds.split(","):
    made = globals()[kind](checkpoint, dtype="float32", tensor_parallel_size=int(ranks))
    use = {
        "LLM": lambda: made.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids,
        "LLMEngine": lambda: engine_tokens(made),
        "AsyncLLM": lambda: asyncio.run(whole(made)),
    }[kind]
    close = getattr(made, "close", None) or made.shutdown
    expected, parent = use(), os.getpid()
    if not (child := os.fork()):
        try:
            use()
        except EngineDeadError as error:
            assert f"This {kind} was made in process {parent}" in error.message, error.message
            close()
            del made, use, close
            gc.collect()
            sys.exit(7)
        sys.exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert use() == expected
    close()
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama") / "model", max_len=4096)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), disable_log_stats=False, **SETTINGS) as llm:
        yield llm


def in_thread(call: Callable[[], Any]) -> Future[Any]:
    """Its result, from a thread that does not keep the process alive."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("twice", [False, True])
def test_a_closed_llm_says_so_in_every_call(checkpoint: Path, twice: bool) -> None:
    with LLM(str(checkpoint), disable_log_stats=False, **SETTINGS) as llm:
        llm.generate([[5]], GREEDY)
    if twice:
        llm.close()
    calls: list[Callable[[], Any]] = [
        lambda: llm.generate([[5]], GREEDY),
        lambda: llm.chat([{"role": "user", "content": "hi"}], GREEDY, chat_template="hi"),
        lambda: llm.beam_search([[5]], BeamSearchParams(beam_width=2, max_tokens=2)),
        llm.reset_prefix_cache,
        llm.get_metrics,
    ]
    for call in calls:
        with pytest.raises(EngineDeadError, match=r"The engine was shut down\. Create a new LLM\."):
            in_thread(call).result(PATIENCE_S)


def test_a_closed_llm_engine_says_so_in_every_call(checkpoint: Path) -> None:
    engine = LLMEngine(str(checkpoint), **SETTINGS)
    engine.add_request("1", [5], GREEDY)
    engine.close()
    calls: list[Callable[[], Any]] = [
        lambda: engine.add_request("2", [5], GREEDY),
        engine.step,
        lambda: engine.abort_request("1"),
    ]
    for call in calls:
        with pytest.raises(EngineDeadError, match=r"The engine was shut down\. Create a new LLMEngine\."):
            in_thread(call).result(PATIENCE_S)


def test_threads_that_share_an_llm_get_what_each_gets_alone(llm: LLM) -> None:
    beams = BeamSearchParams(beam_width=2, max_tokens=3)
    prompts = [[[5 + number, 6, 7], [9, number + 1]] for number in range(6)]

    def generate(own: list[list[int]]) -> Any:
        found: list[Any] = [output.outputs[0].token_ids for _ in range(4) for output in llm.generate(own, GREEDY)]
        found += [[beam.tokens for beam in output.sequences] for output in llm.beam_search(own, beams)]
        llm.reset_prefix_cache()
        llm.get_metrics()
        return found

    alone = [generate(own) for own in prompts]
    together = [in_thread(lambda own=own: generate(own)) for own in prompts]  # type: ignore[misc]
    assert [each.result(PATIENCE_S) for each in together] == alone


def test_threads_that_share_an_llm_engine(checkpoint: Path) -> None:
    engine = LLMEngine(str(checkpoint), **SETTINGS)
    finished: dict[str, list[int]] = {}

    def add_all(thread: int) -> None:
        for number in range(5):
            engine.add_request(f"{thread}.{number}", [5 + thread, 6, number], GREEDY)

    def step_until_all() -> None:
        while len(finished) < 15:
            finished.update({each.request_id: each.outputs[0].token_ids for each in engine.step() if each.finished})

    calls = [in_thread(lambda thread=thread: add_all(thread)) for thread in range(3)]  # type: ignore[misc]
    calls += [in_thread(step_until_all) for _ in range(2)]
    for call in calls:
        call.result(PATIENCE_S)
    assert {name: len(tokens) for name, tokens in finished.items()} == {
        f"{thread}.{number}": GREEDY.max_tokens for thread in range(3) for number in range(5)
    }
    engine.close()


def test_closing_in_another_thread_ends_calls_that_run_and_that_wait(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint), **SETTINGS)
    running = in_thread(lambda: llm.generate([[5]], LONG))
    wait_until(lambda: llm._engine.counts()["in_flight"] > 0)
    waiting = in_thread(lambda: llm.generate([[6]], GREEDY))
    in_thread(llm.close).result(PATIENCE_S)
    for call in (running, waiting):
        with pytest.raises(EngineDeadError, match="was shut down"):
            call.result(PATIENCE_S)


def test_closing_an_llm_engine_in_another_thread_ends_its_step(checkpoint: Path) -> None:
    engine = LLMEngine(str(checkpoint), **SETTINGS)
    engine.add_request("1", [5], SamplingParams(max_tokens=4000, ignore_eos=True))

    def step() -> None:
        while True:
            engine.step()

    stepping = in_thread(step)
    in_thread(engine.close).result(PATIENCE_S)
    with pytest.raises(EngineDeadError, match="was shut down"):
        stepping.result(PATIENCE_S)


def test_threads_with_event_loops_of_their_own_share_an_async_llm_or_are_told(checkpoint: Path) -> None:
    """No call hangs: the loop that has requests is served, the others are refused."""
    llm = AsyncLLM(str(checkpoint), **SETTINGS)

    async def generate() -> int:
        return len([output async for output in llm.generate([5, 6], GREEDY)][-1].outputs[0].token_ids)

    def call(_: int) -> int | str:
        try:
            return asyncio.run(asyncio.wait_for(generate(), PATIENCE_S))
        except ConfigError as error:
            return error.message

    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(call, range(60)))
    llm.shutdown()
    assert found <= {GREEDY.max_tokens, "An AsyncLLM serves one event loop at a time."}
    assert GREEDY.max_tokens in found


@pytest.mark.parametrize(("kinds", "ranks"), [("LLM", 2), ("LLM,LLMEngine,AsyncLLM", 1)])
def test_a_fork_is_told_and_leaves_its_parent_s_engine_alone(checkpoint: Path, kinds: str, ranks: int) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORK, kinds, str(checkpoint), str(ranks)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
