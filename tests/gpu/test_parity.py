"""Every architecture on the card, through LLM: bf16 as near to the exact logits as transformers' own bf16, and fp32
greedy text that is transformers' own, also over cached blocks, after preemptions and beside aborted requests.

What the engine answers is judged token by token: transformers reads prompt and answer and says what it would have drawn
each token from. So a tie that falls the other way on a card spoils nothing that comes after it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import LLM, SamplingParams
from quire.models.spec import read_spec
from quire.outputs import RequestOutput
from quire.runtime.worker.replay import CudaGraphs
from quire.runtime.worker.step import Step
from tests.checkpoints import make_llama, make_tiny
from tests.parity.cases import CASES
from tests.parity.oracle import Oracle
from tests.parity.test_architectures import CHUNK, LENGTHS, TOKENS, prompts

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
NOT_HERE = ("gemma3n", "nemotron-h, mixers, mlps and experts")
"""What names of other cases begin with: transformers 5.17 reads per-layer embeddings of tokens that have none, after
which nothing runs on a card; and experts without gates run on a CPU only."""
ON_CARDS = [case for case in CASES if not case.startswith(NOT_HERE)]
MEAN, MOST = 1.25, 1.5
"""How much larger our errors may be than transformers' own in the same dtype: their mean, and the largest."""
TIE = 1e-3
"""Log probabilities this close together are equal in fp32."""
SETTINGS: dict[str, Any] = {
    "device": DEVICE,
    "block_size": 16,
    "max_num_seqs": 8,
    "skip_tokenizer_init": True,
}
BLOCKS: dict[str, Any] = {"max_num_batched_tokens": 40, "num_gpu_blocks_override": 300, "max_model_len": "auto"}
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=2)
EVERYTHING = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=-1)


@pytest.mark.parametrize("case", ON_CARDS)
def test_bfloat16_is_as_near_as_transformers(case: str, tmp_path: Path) -> None:
    directory = make_tiny(tmp_path, **CASES[case])
    with LLM(str(directory), dtype="bfloat16", **EXACTLY, **BLOCKS, **SETTINGS) as llm:
        answers = answers_of(llm, prompts(), EVERYTHING)
    assert_near(directory, prompts(), answers)


def test_bfloat16_in_the_shapes_of_a_real_model(tmp_path: Path) -> None:
    """Prompts of several chunks, and a batch that a graph of more rows serves."""
    shape = {"hidden": 2048, "intermediate": 5632, "layers": 2, "heads": 16, "kv_heads": 4, "head_dim": 128}
    directory = make_llama(
        tmp_path, **shape, max_len=4096, vocab_size=1500, dtype="bfloat16", tokenizer=False, std=0.03
    )
    batch = long_prompts()
    large = {"dtype": "bfloat16", "max_num_batched_tokens": 512, "num_gpu_blocks_override": 400}
    with LLM(str(directory), **large, **EXACTLY, **SETTINGS) as llm:
        answers = answers_of(llm, batch, EVERYTHING)
    assert_near(directory, batch, answers)


@pytest.mark.parametrize("case", ON_CARDS)
def test_float32_text_is_transformers(case: str, tmp_path: Path) -> None:
    directory = make_tiny(tmp_path, **CASES[case])
    reference, batch = Oracle(directory, device=DEVICE), prompts()
    with LLM(str(directory), dtype="float32", **BLOCKS, **SETTINGS) as llm:
        for prompt, output in zip(batch, llm.generate(batch, GREEDY), strict=True):
            assert_greedy(reference, prompt, output)
        longer = batch[2][:80] + batch[3][:10]
        same, other = llm.generate([batch[2], longer], GREEDY)
        assert same.num_cached_tokens == other.num_cached_tokens == 80
        assert_greedy(reference, batch[2], same)
        assert_greedy(reference, longer, other)
        assert_all_free(llm)
    preempted(directory, reference, batch)


def preempted(directory: Path, reference: Oracle, batch: list[list[int]]) -> None:
    """On so few blocks that sequences are preempted, in both modes."""
    reaches = read_spec(directory).kv_groups()
    for_one = sum(reach.max_blocks(max(LENGTHS) + TOKENS, CHUNK, SETTINGS["block_size"]) for reach in reaches)
    for mode in ("recompute", "swap"):
        assert_preempted(directory, reference, batch, mode, for_one + 1, SETTINGS)


def assert_preempted(
    directory: Path, reference: Oracle, batch: list[list[int]], mode: str, blocks: int, settings: dict[str, Any]
) -> None:
    """On so many blocks sequences are preempted in this mode, and fp32 greedy text is the reference's."""
    few: dict[str, Any] = {"num_gpu_blocks_override": blocks, "preemption_mode": mode, "swap_space": 0.01}
    few |= {"max_model_len": "auto"}
    with LLM(str(directory), dtype="float32", max_num_batched_tokens=CHUNK, **few, **settings) as llm:
        if mode == "swap":
            wait_for_swap_space(llm)
        for prompt, output in zip(batch, llm.generate(batch, GREEDY), strict=True):
            assert_greedy(reference, prompt, output)
        assert llm._engine.counts()["preemptions"] > 0


def wait_for_swap_space(llm: LLM) -> None:
    """Until its first part is pinned, which is all of it where it is small: the results of steps say so."""
    deadline = time.monotonic() + 60
    while not llm._engine.counts()["host_blocks"]:
        assert time.monotonic() < deadline
        llm.generate([[5]], SamplingParams(max_tokens=1), use_tqdm=False)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("qwen3"), **CASES["qwen3, wide heads"])


def test_choices_of_one_prompt_share_its_blocks_and_part(qwen3: Path) -> None:
    seeded: dict[str, Any] = {"temperature": 1.1, "seed": 11, "max_tokens": 12, "ignore_eos": True}
    batch = prompts()
    with LLM(str(qwen3), dtype="float32", **BLOCKS, **SETTINGS) as llm:
        several = llm.generate([batch[1]], SamplingParams(n=3, **seeded))[0].outputs
        assert several[0].token_ids == llm.generate([batch[1]], SamplingParams(**seeded))[0].outputs[0].token_ids
        assert len({tuple(choice.token_ids) for choice in several}) == 3
        assert_all_free(llm)


def test_what_an_interrupted_call_leaves_behind_is_nothing(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests are aborted while their steps are still on the device; those that come next are served well."""
    reference, batch = Oracle(qwen3, device=DEVICE), prompts()
    with LLM(str(qwen3), dtype="float32", **BLOCKS, **SETTINGS) as llm:
        receive, calls = llm._engine.receive, 0

        def interrupt(timeout: float | None) -> Any:
            nonlocal calls
            calls += 1
            if calls == 9:
                raise KeyboardInterrupt
            return receive(timeout)

        monkeypatch.setattr(llm._engine, "receive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(batch * 4, GREEDY)
        monkeypatch.undo()
        for prompt, output in zip(batch, llm.generate(batch, GREEDY), strict=True):
            assert_greedy(reference, prompt, output)
        assert llm._engine.counts()["requests"] == 0
        assert_all_free(llm)


def test_steps_without_graphs_say_the_same(qwen3: Path) -> None:
    reference, batch = Oracle(qwen3, device=DEVICE), prompts()
    with LLM(str(qwen3), dtype="float32", enforce_eager=True, **BLOCKS, **SETTINGS) as llm:
        for prompt, output in zip(batch, llm.generate(batch, GREEDY), strict=True):
            assert_greedy(reference, prompt, output)


@pytest.mark.parametrize("case", ["qwen3, wide heads", "gemma3", "qwen3 moe"])
def test_small_prompts_are_replayed_and_say_the_same(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many lengths: alone, together, behind cached blocks, and beside sequences that draw."""
    directory = make_tiny(tmp_path, **CASES[case])
    reference, replay, shapes = Oracle(directory, device=DEVICE), CudaGraphs.replay, []
    generator = torch.Generator().manual_seed(1)
    batch = [torch.randint(3, 320, (n,), generator=generator).tolist() for n in (2, 15, 16, 50, 130, 200, 300, 31)]

    def watched(self: CudaGraphs, step: Step) -> Tensor:
        shapes.append(step.shape)
        return replay(self, step)

    monkeypatch.setattr(CudaGraphs, "replay", watched)
    few = {"max_num_batched_tokens": 512, "num_gpu_blocks_override": 600}
    with LLM(str(directory), dtype="float32", **few, **SETTINGS) as llm:
        for prompt in batch[1:6:2]:
            assert_greedy(reference, prompt, llm.generate([prompt], GREEDY)[0])
        for prompts_ in (batch, [[*prompt, 9, 8, 7 + n] for n, prompt in enumerate(batch)]):
            for prompt, output in zip(prompts_, llm.generate(prompts_, GREEDY), strict=True):
                assert_greedy(reference, prompt, output)
    with_prompts = {shape for shape in shapes if not shape.is_decode}
    assert {shape.decode_rows > 0 for shape in with_prompts} == {False, True}
    assert len(with_prompts) >= 4


def test_log_probabilities_of_prompts(qwen3: Path) -> None:
    reference, prompt = Oracle(qwen3, device=DEVICE), prompts()[2]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with LLM(str(qwen3), dtype="float32", **BLOCKS, **SETTINGS) as llm:
        (output,) = llm.generate([prompt], params)
    rows = reference.after(prompt[:1], prompt[1:])
    assert output.prompt_logprobs is not None
    for token, row, entry in zip(prompt[1:], rows, output.prompt_logprobs[1:], strict=True):
        assert entry is not None
        assert entry[token].logprob == pytest.approx(float(row[token]), abs=TIE)


EXACTLY: dict[str, Any] = {"logprobs_mode": "raw_logits", "max_logprobs": -1}
"""Every logit of every token that is drawn."""


def long_prompts() -> list[list[int]]:
    """Of 1 to 1,500 tokens; one more than a graph of four rows holds."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 320, (n,), generator=generator).tolist() for n in (1, 200, 1500, 700, 64)]


def answers_of(llm: LLM, batch: list[list[int]], params: SamplingParams) -> list[tuple[list[int], Tensor]]:
    """By prompt: the tokens, and the logits [tokens, vocab] they were drawn from."""
    answers = []
    for output in llm.generate(batch, params):
        (choice,) = output.outputs
        assert choice.logprobs is not None
        rows = [[entries[token].logprob for token in sorted(entries)] for entries in choice.logprobs]
        answers.append((list(choice.token_ids), torch.tensor(rows, dtype=torch.float64)))
    return answers


def assert_near(
    directory: Path,
    batch: list[list[int]],
    answers: list[tuple[list[int], Tensor]],
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Our logits are nearly as exact as transformers' in this dtype, by those in fp32."""
    exact, rounded = (logits_of(directory, each, batch, answers) for each in (torch.float32, dtype))
    ours = torch.cat([logits for _, logits in answers])
    error, allowed = (ours - exact).abs(), (rounded - exact).abs()
    assert ours.shape == exact.shape
    assert allowed.mean() > 0
    assert error.mean() <= MEAN * allowed.mean()
    if read_spec(directory).mixture is None:  # a router may send a token elsewhere at the least difference
        assert error.max() <= MOST * allowed.max()


def logits_of(
    directory: Path, dtype: torch.dtype, batch: list[list[int]], answers: list[tuple[list[int], Tensor]]
) -> Tensor:
    """[tokens of all answers, vocab] of transformers."""
    oracle = Oracle(directory, dtype, DEVICE)
    pairs = zip(batch, answers, strict=True)
    return torch.cat([oracle.logits_after(prompt, tokens) for prompt, (tokens, _) in pairs])


def assert_greedy(reference: Oracle, prompt: list[int], output: RequestOutput) -> None:
    """Every token is the likeliest after what stands before it, with transformers' log probability."""
    (choice,) = output.outputs
    assert choice.logprobs is not None
    tokens = list(choice.token_ids)
    rows = reference.after(prompt, tokens)
    assert len(tokens) == TOKENS
    assert (rows.amax(-1) - rows[torch.arange(TOKENS), tokens]).max() < TIE
    for row, entries in zip(rows, choice.logprobs, strict=True):
        for token, entry in entries.items():
            assert entry.logprob == pytest.approx(float(row[token]), abs=TIE)


def assert_all_free(llm: LLM) -> None:
    counts = llm._engine.counts()
    assert counts["free_blocks"] == counts["blocks"]
