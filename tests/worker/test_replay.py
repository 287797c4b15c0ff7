"""Replayed steps give the same results as others. On a CPU, what was captured is run again: the same launches, of the
references of a GPU's kernels, with all that the host knew at capture, on newly staged inputs.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from quire.compute.attention.backend import AttentionBackend, KVView
from quire.compute.kernels.dispatch import KERNELS
from quire.foundation.messages.workers import PromptLogprobsRow, Result, TokenLogprobs
from quire.models.spec import read_spec
from quire.runtime.worker import buffer_ring, model_runner, worker_parts
from quire.runtime.worker.graph_shapes import GraphShape
from tests.checkpoints import make_llama, make_tiny
from tests.parity.cases import CASES
from tests.worker.driver import Driver, Sequence, config_for, hand_out
from tests.worker.replay_by_running import CountedBufferRing, ReplayByRunning

MOST = 128
STEPS = 30
SEED = 5
LONGEST = 200


def attention(
    kv: KVView,
    heads: list[int],
    max_rows: int,
    step_tokens: int,
    max_length: int,
    dtype: torch.dtype,
    has_slopes: bool = False,
) -> AttentionBackend:
    """A GPU's, with references for its kernels."""
    from quire.compute.attention.triton import TritonAttention

    with pytest.MonkeyPatch.context() as patch:
        attends = ("decode_attention", "prefill_attention", "prefill_attention_split_kv", "prefill_attention_dense")
        for op in ("compute_slot_mapping", "plan_kv_splits", "gather_kv", *attends):
            patch.setitem(KERNELS, (op, "cuda"), f"quire.compute.kernels.reference.paged_attention:{op}")
        patch.setitem(
            KERNELS,
            ("qk_norm_rope_and_cache", "cuda"),
            "quire.compute.kernels.reference.rowwise_attention:qk_norm_rope_and_cache",
        )
        return TritonAttention(kv, heads[0], max_rows, step_tokens, max_length, dtype, has_slopes)


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "CudaGraphs", ReplayByRunning)
    monkeypatch.setattr(model_runner, "BufferRing", CountedBufferRing)
    monkeypatch.setattr(buffer_ring, "_has_memory", lambda device: True)
    monkeypatch.setattr(worker_parts, "attention_backend", attention)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("tiny"), tokenizer=False)


def driver_of(directory: Path, *, captured: bool, **values: Any) -> Driver:
    config = config_for(directory, num_gpu_blocks_override=1000, **values)
    driver = Driver(config, len(read_spec(directory).kv_groups()))
    if captured:
        driver.worker._runner.capture_graphs(MOST, precompiled=True)
    return driver


def replayed(driver: Driver) -> list[GraphShape]:
    return driver.worker._runner._replayable.replayed  # type: ignore[attr-defined, no-any-return]


# --- steps of single tokens -----------------------------------------------------------------------------------------

PLAIN: list[dict[str, Any]] = [
    {},
    {"temperature": 1.3, "seed": 7},
    {"temperature": 0.8, "top_k": 5, "seed": 3},
    {"temperature": 2.0, "top_p": 0.9, "min_p": 0.01, "seed": 11},
    {"temperature": 1.0, "seed": 2**64 - 1},
]
REPORTING: list[dict[str, Any]] = [{"logprobs": 2}, {}, {"temperature": 0.7, "logprobs": 0, "seed": 5}]
TRANSFORMED: list[dict[str, Any]] = [
    {"presence_penalty": 1.5, "prompt_len": 3, "history": [5, 6, 7]},
    {"temperature": 1.1, "seed": 4},
    {"logit_bias": {9: 30.0}},
]


def texts(
    tiny: Path, owners: list[dict[str, Any]], *, captured: bool, mode: str
) -> tuple[list[Sequence], list[GraphShape]]:
    """What sequences sample in 12 steps: the first ones together, then one joins, then one is left."""
    driver = driver_of(tiny, captured=captured, logprobs_mode=mode)
    sequences = [driver.admit(slot, [5, 6, 7 + slot], **owner) for slot, owner in enumerate(owners)]
    driver.generate(sequences[:-1], 5)
    driver.generate(sequences, 9)
    driver.generate(sequences[:1], 12)
    return sequences, replayed(driver)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("owners", [PLAIN, REPORTING, TRANSFORMED, PLAIN[:2] + TRANSFORMED + REPORTING])
def test_replayed_steps_sample_and_report_the_same(owners: list[dict[str, Any]], mode: str, tiny: Path) -> None:
    plain, none = texts(tiny, owners, captured=False, mode=mode)
    again, shapes = texts(tiny, owners, captured=True, mode=mode)
    assert not none
    assert len({shape for shape in shapes if shape.is_decode}) > 1
    assert [s.sampled for s in again] == [s.sampled for s in plain]
    for one, other in zip(again, plain, strict=True):
        assert_near(one.logprobs, other.logprobs)
    assert len({tuple(s.sampled) for s in plain}) == len(plain)


# --- steps with prompts in them -------------------------------------------------------------------------------------

WISHES = [{}, {}, *PLAIN[1:], *REPORTING, *TRANSFORMED, {"prompt_logprobs": 1}]


def results(directory: Path, *, captured: bool, mode: str) -> tuple[list[Result], list[GraphShape]]:
    """Of random steps: sequences come and go, prompts are computed whole or in chunks, also of one token, some of them
    without a sampled position, beside sequences that decode.
    """
    choose = random.Random(SEED)
    driver = driver_of(directory, captured=captured, logprobs_mode=mode)
    running: dict[int, Sequence] = {}
    found = []
    for _ in range(STEPS):
        for slot in range(choose.choice((1, 3, 12))):
            if slot not in running:
                prompt = [choose.randrange(3, 320) for _ in range(choose.choice((1, 2, 15, 16, 40, 127, LONGEST)))]
                asked = dict(choose.choice(WISHES))
                if "history" in asked:
                    asked |= {"history": prompt, "prompt_len": len(prompt)}
                running[slot] = driver.admit(slot, prompt, **asked)
        moves, room = [], choose.choice((16, 64, MOST, 2 * MOST))
        for sequence in choose.sample(list(running.values()), choose.randint(1, len(running))):
            left = len(sequence.prompt) - sequence.length
            count = min(room, choose.choice((left, choose.randint(1, left))) if left > 0 else 1)
            if count:
                moves.append((sequence, count))
            room -= count
        plan, samplers = driver.plan(moves)
        found.append(driver.worker.execute(plan))
        hand_out(found[-1], samplers)
        running = {s: one for s, one in running.items() if one.length < len(one.prompt) + 9}
    return found, replayed(driver)


@pytest.mark.parametrize("case", ["llama", "gemma3", "qwen3 moe", "gpt2", "longrope, phi3, 4.x"])
def test_small_steps_of_any_rows_give_the_same(case: str, tiny: Path, tmp_path: Path) -> None:
    """Also where layers have windows and tables of their own, and where tokens choose experts."""
    directory = tiny if case == "llama" else make_tiny(tmp_path, **CASES[case])
    for mode in ("raw_logprobs", "processed_logits"):
        plain, none = results(directory, captured=False, mode=mode)
        again, shapes = results(directory, captured=True, mode=mode)
        assert not none
        of_prompts = [shape for shape in shapes if not shape.is_decode]
        assert len(of_prompts) > 5
        assert {shape.decode_rows > 0 for shape in of_prompts} == {False, True}
        assert any(not result.counts for result in plain)
        for one, other in zip(again, plain, strict=True):
            assert (one.counts, one.tokens, one.errors) == (other.counts, other.tokens, other.errors)
            assert_near(one.logprobs, other.logprobs)


def test_log_probabilities_of_prompts_are_not_replayed(tiny: Path) -> None:
    driver = driver_of(tiny, captured=True)
    plan, _ = driver.plan([(driver.admit(0, [5] * 30, prompt_logprobs=1), 30)])
    result = driver.worker.execute(msgspec.structs.replace(plan, prompt_logprobs_rows=[PromptLogprobsRow(0, 0, 20, 5)]))
    assert len(result.prompt_logprobs[0]) == 20
    assert not replayed(driver)
    driver.move([(driver.admit(1, [5] * 30), 30)])
    assert len(replayed(driver)) == 1


def assert_near(ours: list[TokenLogprobs | None], others: list[TokenLogprobs | None]) -> None:
    assert len(ours) == len(others)
    for entry, same in zip(ours, others, strict=True):
        assert (entry is None) == (same is None)
        if entry is not None and same is not None:
            assert (entry.rank, entry.top_ids) == (same.rank, same.top_ids)
            assert [entry.logprob, *entry.top_logprobs] == pytest.approx([same.logprob, *same.top_logprobs], abs=1e-4)
