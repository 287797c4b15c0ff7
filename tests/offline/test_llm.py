"""`LLM` against transformers on tiny real checkpoints: tokens, log probabilities, batching, preemption."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError, ContextLengthError, RequestError
from quire.scheduling.scheduler.token_budget import TokenBudget
from quire.text.output_parsers.events import Tool, ToolCallDelta, ToolCallStart
from quire.text.output_parsers.registry import create_parser
from tests.checkpoints import VOCAB_SIZE, make_llama
from tests.reference import Reference

VARIANTS: dict[str, dict[str, Any]] = {
    "grouped heads": {"heads": 6, "kv_heads": 2, "hidden": 96},
    "tied embeddings": {"tie": True},
    "llama3 rope": {"rope": "llama3"},
    "wide heads": {"head_dim": 48},
    "biases, sharded, transformers 4": {"attention_bias": True, "mlp_bias": True, "shards": "40KB", "generation": 4},
}


def prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_equal_transformers_in_one_chunked_batch(variant: str, tmp_path: Path) -> None:
    directory = make_llama(tmp_path / "model", seed=3, **VARIANTS[variant])
    reference = Reference(directory)
    batch = prompts(6, 90)
    with LLM(str(directory), dtype="float32", max_num_batched_tokens=40, block_size=8) as llm:
        outputs = llm.generate(batch, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=3))
    for prompt, output in zip(batch, outputs, strict=True):
        (choice,) = output.outputs
        assert len(choice.token_ids) == 64
        assert choice.logprobs is not None
        expected = reference.logprobs(prompt + choice.token_ids)[len(prompt) - 1 :]
        for token, entries, row in zip(choice.token_ids, choice.logprobs, expected[:-1], strict=True):
            assert token == row.index(max(row))
            assert len(entries) == 3
            assert entries[token].rank == 1
            for candidate, entry in entries.items():
                assert entry.logprob == pytest.approx(row[candidate], abs=1e-3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama") / "model")


@pytest.mark.parametrize("num_blocks", [None, 40], ids=["roomy", "preempting"])
def test_64_at_once_get_what_each_gets_alone(checkpoint: Path, num_blocks: int | None) -> None:
    batch = prompts(64, 120, seed=7)
    params = [SamplingParams(temperature=0, max_tokens=20 + 2 * (i % 32), ignore_eos=True) for i in range(64)]
    with LLM(str(checkpoint), dtype="float32", num_gpu_blocks_override=num_blocks, max_num_batched_tokens=64) as llm:
        alone = [llm.generate([p], q)[0].outputs[0].token_ids for p, q in zip(batch, params, strict=True)]
        together = [output.outputs[0].token_ids for output in llm.generate(batch, params)]
        counts = llm._engine.counts()
    assert together == alone
    assert (counts["preemptions"] > 0) == (num_blocks is not None)
    assert counts["free_blocks"] == counts["blocks"]
    assert counts["free_slots"] == counts["slots"]


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Any:
    with LLM(str(checkpoint), dtype="float32") as llm:
        yield llm


def test_same_seed_same_tokens_whatever_else_runs(llm: LLM) -> None:
    params = SamplingParams(temperature=1.2, top_p=0.9, top_k=40, min_p=0.01, seed=42, max_tokens=30, ignore_eos=True)
    other = SamplingParams(temperature=0.7, max_tokens=25, ignore_eos=True)
    prompt = [5, 6, 7, 8]
    alone = llm.generate([prompt], params)[0].outputs[0].token_ids
    crowd = llm.generate([*prompts(10, 50), prompt, *prompts(10, 50, 1)], [other] * 10 + [params] + [other] * 10)
    assert crowd[10].outputs[0].token_ids == alone
    assert llm.generate([prompt], params)[0].outputs[0].token_ids == alone


def test_n_gives_different_sequences_and_the_first_is_the_seeds_own(llm: LLM) -> None:
    one = SamplingParams(temperature=1.0, seed=3, max_tokens=16, ignore_eos=True)
    several = SamplingParams(temperature=1.0, seed=3, max_tokens=16, ignore_eos=True, n=4)
    (output,) = llm.generate("the quick", several)
    assert [choice.index for choice in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(choice.token_ids) for choice in output.outputs}) == 4
    assert output.outputs[0].token_ids == llm.generate("the quick", one)[0].outputs[0].token_ids


def test_stop_string_ends_the_text_and_frees_the_sequence(llm: LLM) -> None:
    free = llm.generate("the quick", SamplingParams(temperature=0, max_tokens=60))[0].outputs[0]
    stop = free.text[10:12]
    cut = llm.generate("the quick", SamplingParams(temperature=0, max_tokens=60, stop=[stop]))[0].outputs[0]
    assert cut.text == free.text[: free.text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    kept = SamplingParams(temperature=0, max_tokens=60, stop=[stop], include_stop_str_in_output=True)
    assert llm.generate("the quick", kept)[0].outputs[0].text == cut.text + stop


def test_stop_token_is_named(llm: LLM) -> None:
    free = llm.generate("the quick", SamplingParams(temperature=0, max_tokens=20))[0].outputs[0].token_ids
    params = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[free[5]])
    cut = llm.generate("the quick", params)[0].outputs[0]
    assert cut.token_ids == free[: free.index(free[5]) + 1]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", free[5])


def test_chat_renders_the_models_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    params = SamplingParams(temperature=0, max_tokens=8)
    (output,) = llm.chat(messages, params)
    assert output.prompt == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert llm.chat([messages, messages], params)[1].outputs == output.outputs


def test_chat_shows_tools_to_the_template_and_calls_stand_in_the_text() -> None:
    function = {
        "name": "get_weather",
        "description": "Get the current weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
    messages = [{"role": "user", "content": "What is the weather in Oslo?"}]
    with LLM() as quill:
        (output,) = quill.chat(
            messages, SamplingParams(temperature=0, max_tokens=64), tools=[{"type": "function", "function": function}]
        )
    parser = create_parser("hermes", tools=[Tool("get_weather", function["parameters"])])
    events = [*parser.feed(output.outputs[0].text), *parser.finish()]
    assert [event.name for event in events if isinstance(event, ToolCallStart)] == ["get_weather"]
    arguments = "".join(event.arguments for event in events if isinstance(event, ToolCallDelta))
    assert json.loads(arguments) == {"city": "Oslo"}


def test_chat_takes_another_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    source = "{{ tools[0].function.name if tools else 'none' }}: {{ messages[0].content }}"
    params = SamplingParams(temperature=0, max_tokens=2)
    assert llm.chat(messages, params, chat_template=source, tools=tools)[0].prompt == "f: Hello"
    assert llm.chat(messages, params, chat_template=source)[0].prompt == "none: Hello"


def test_a_reset_prefix_cache_is_not_hit(llm: LLM) -> None:
    prompt, params = list(range(3, 60)), SamplingParams(temperature=0, max_tokens=2)
    first = llm.generate([prompt], params)[0]
    assert llm.generate([prompt], params)[0].num_cached_tokens > 0
    assert llm.reset_prefix_cache()
    again = llm.generate([prompt], params)[0]
    assert again.num_cached_tokens == 0
    assert again.outputs == first.outputs


def test_prompt_forms_are_the_same_prompt(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    ids = llm.get_tokenizer().encode("the quick")
    forms: list[Any] = ["the quick", ids, [ids], {"prompt": "the quick"}, [{"prompt_token_ids": ids}]]
    assert len({tuple(llm.generate(form, params)[0].outputs[0].token_ids) for form in forms}) == 1


def test_wrong_requests_start_nothing(llm: LLM) -> None:
    with pytest.raises(ContextLengthError, match=r"600 tokens; .* maximum context length is 512 tokens"):
        llm.generate([[5, 6], [7] * 600], SamplingParams(max_tokens=4))
    with pytest.raises(ContextLengthError, match="lower max_tokens to 412"):
        llm.generate([[7] * 100], SamplingParams(max_tokens=500))
    with pytest.raises(RequestError, match="Token id 320 is outside"):
        llm.generate([[320]])
    with pytest.raises(RequestError, match="prompt is empty"):
        llm.generate([{"prompt_token_ids": []}])
    with pytest.raises(RequestError, match="at most 20"):
        llm.generate("the", SamplingParams(logprobs=21))
    with pytest.raises(RequestError, match="3 prompts need"):
        llm.generate(["a", "b", "c"], [SamplingParams()] * 2)
    assert llm._engine.counts()["requests"] == 0


def test_unknown_and_unsupported_settings_are_named(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'max_num_seqs'"):
        LLM(str(checkpoint), max_num_seq=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="decode_context_parallel_size 2 is not supported"):
        LLM(str(checkpoint), decode_context_parallel_size=2)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="--max-model-len 513"):
        LLM(str(checkpoint), max_model_len=513)


@pytest.mark.parametrize(("asked", "mode"), [({}, "throughput"), ({"performance_mode": "balanced"}, "balanced")])
def test_prompts_need_not_wait_for_streams_unless_asked_to(
    checkpoint: Path, asked: dict[str, Any], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody reads an answer of this class before all are there."""
    modes: list[str] = []
    made = TokenBudget.__init__

    def note(self: TokenBudget, *limits: Any, **options: Any) -> None:
        made(self, *limits, **options)
        modes.append(self._mode)

    monkeypatch.setattr(TokenBudget, "__init__", note)
    LLM(str(checkpoint), **asked).close()
    assert modes == [mode]


def test_interrupted_call_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    receive, calls = llm._engine.receive, 0

    def interrupt(timeout: float | None) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        return receive(timeout)

    monkeypatch.setattr(llm._engine, "receive", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts(5, 20), SamplingParams(max_tokens=100, ignore_eos=True))
    monkeypatch.undo()
    assert len(llm.generate(["the"], SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].token_ids) <= 4
    assert llm._engine.counts()["requests"] == 0


def test_a_shared_beginning_is_computed_once_unless_the_salt_differs(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    stem = [(i * 17) % 300 + 5 for i in range(400)]
    tails = [[5, 6, 7], [8, 9, 10, 11]]
    salted = [{"prompt_token_ids": stem + tail, "cache_salt": "mine"} for tail in tails]
    cold = llm.generate([salted[0]], params)[0]
    hit = llm.generate([salted[1]], params)[0]
    other = llm.generate([{"prompt_token_ids": stem + tails[1], "cache_salt": "yours"}], params)[0]
    assert (cold.num_cached_tokens, hit.num_cached_tokens, other.num_cached_tokens) == (0, 400, 0)
    assert hit.outputs == other.outputs
    with pytest.raises(RequestError, match="This model reads text alone: leave images out"):
        llm.generate([{"prompt": "a", "multi_modal_data": {"image": object()}}], params)


def test_a_program_that_closes_nothing_ends_well() -> None:
    """With the built-in model, which has work for several threads."""
    program = "import quire; quire.LLM().generate('Two plus two is', use_tqdm=False); print('done')"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr
