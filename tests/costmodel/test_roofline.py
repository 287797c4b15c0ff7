"""Roofline predictions grow with what they should, and learn from what is measured."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from quire.models.spec import read_spec
from quire.planning.costmodel.hardware import Hardware
from quire.planning.costmodel.roofline import Correction, Roofline
from quire.planning.costmodel.step_work import UsedWeights
from tests.checkpoints import edit_config, make_llama

HARDWARE = Hardware(flops=1e9, bandwidth=1e9, host_bandwidth=1e8, overhead_ms=0.5)


@pytest.fixture(scope="module")
def roofline(tmp_path_factory: pytest.TempPathFactory) -> Roofline:
    spec = read_spec(make_llama(tmp_path_factory.mktemp("llama") / "model", tokenizer=False))
    return Roofline(spec, "float32", HARDWARE, block_size=16)


def test_few_rows_cost_the_weights_and_many_the_products(roofline: Roofline) -> None:
    assert roofline.step_ms(1, 0) == roofline.step_ms(2, 0)
    assert roofline.step_ms(100, 0) > 20 * roofline.step_ms(1, 0)
    assert roofline.step_ms(1, 10_000) > roofline.step_ms(1, 0)


def test_tokens_cost_more_the_longer_their_context(roofline: Roofline) -> None:
    assert roofline.token_ms(10_000) > 2 * roofline.token_ms(0)
    assert roofline.recompute_ms(200) > 2 * roofline.recompute_ms(100)
    assert roofline.swap_ms(10) == 10 * roofline.swap_ms(1)


def test_steps_and_chunks_are_learned_apart(tmp_path: Path) -> None:
    spec = read_spec(make_llama(tmp_path / "model", tokenizer=False))
    roofline = Roofline(spec, "float32", HARDWARE, 16)
    token = roofline.token_ms(0)
    for _ in range(50):
        roofline.learn(roofline.step_ms(4, 100), 0.0, measured_ms=30.0)
    assert roofline.step_ms(4, 100) == pytest.approx(30.0, rel=0.01)
    assert roofline.token_ms(0) == token
    for _ in range(50):
        chunk = 100 * roofline.token_ms(0)
        roofline.learn(roofline.step_ms(4, 100), chunk, measured_ms=roofline.step_ms(4, 100) + 7.0)
    assert 100 * roofline.token_ms(0) == pytest.approx(7.0, rel=0.05)


def test_a_short_chunk_teaches_nothing_about_tokens(tmp_path: Path) -> None:
    spec = read_spec(make_llama(tmp_path / "model", tokenizer=False))
    roofline = Roofline(spec, "float32", replace(HARDWARE, launch_ms=10.0), 16)
    token, launch = roofline.token_ms(0), 10.0 * len(spec.layers)
    roofline.learn(roofline.step_ms(4, 100), 0.9 * launch, measured_ms=3 * launch)
    assert roofline.token_ms(0) == token
    roofline.learn(roofline.step_ms(4, 100), 1.1 * launch, measured_ms=3 * launch)
    assert roofline.token_ms(0) > token


def test_a_stall_of_the_machine_teaches_nothing() -> None:
    correction = Correction()
    correction.learn(1.0, 1_000.0)
    assert correction.factor == 1.0


MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 1_000, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 96,
    "mlp_only_layers": [0], "decoder_sparse_step": 1, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}  # fmt: skip
EXPERT = 3 * 64 * 96  # weights of one expert in one of the three layers that have them


def test_a_mixture_of_experts_reads_what_its_tokens_touch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    spec = read_spec(tmp_path)
    used, rng = UsedWeights(spec), random.Random(0)
    dense = spec.num_parameters - 3 * 32 * EXPERT - 1_000 * 64
    assert used.per_token == dense + 3 * 4 * EXPERT
    for tokens in (1, 5, 20, 300):
        touched = [len({e for _ in range(tokens) for e in rng.sample(range(32), 4)}) for _ in range(400)]
        expected = dense + 3 * EXPERT * sum(touched) / len(touched)
        assert used.read(tokens) == pytest.approx(expected, rel=0.02)
    assert used.read(10_000) == pytest.approx(spec.num_parameters - 1_000 * 64)


def test_a_step_of_a_mixture_is_bound_by_its_reads_for_longer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    roofline = Roofline(read_spec(tmp_path), "bfloat16", HARDWARE, 16)
    used = UsedWeights(read_spec(tmp_path))
    assert roofline.step_ms(1, 0) == pytest.approx(0.5 + 1e3 * max(2 * used.read(1), 2 * used.per_token) / 1e9)
    assert roofline.step_ms(64, 0) < 64 * roofline.step_ms(1, 0)
    least_ms = 0.5 + 1e3 * 2 * used.read(10_000) / 1e9
    assert roofline.free_tokens == int(least_ms / roofline.token_ms(0)) > 2
    assert roofline.token_ms(0) == pytest.approx(1e3 * 2 * used.per_token / 1e9)


def test_chunks_teach_however_much_sooner_they_were_done(tmp_path: Path) -> None:
    make_llama(tmp_path, layers=4, tokenizer=False)
    roofline = Roofline(read_spec(tmp_path), "float32", HARDWARE, 16)
    expected = 3 * roofline.free_tokens * roofline.token_ms(0)
    tokens = expected / roofline.token_ms(0)
    for _ in range(100):
        roofline.learn(1.0, tokens * roofline.token_ms(0), 1.0 + 0.15 * expected)
    assert tokens * roofline.token_ms(0) == pytest.approx(0.15 * expected, rel=0.02)


def test_layers_with_a_window_see_no_farther(tmp_path: Path) -> None:
    make_llama(tmp_path, layers=4, tokenizer=False)
    full = Roofline(read_spec(tmp_path), "float32", HARDWARE, 16)
    edit_config(tmp_path, {
        "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 32,
        "max_window_layers": 3,
    })  # fmt: skip
    spec = read_spec(tmp_path)
    assert [group.reach.length for group in spec.kv_groups()].count(32) == 1
    windowed = Roofline(spec, "float32", HARDWARE, 16)
    for price in ("step", "token"):

        def cost(roofline: Roofline, context: int, price: str = price) -> float:
            return roofline.step_ms(2, 2 * context) if price == "step" else roofline.token_ms(context)

        assert cost(windowed, 32) - cost(windowed, 0) == pytest.approx(cost(full, 32) - cost(full, 0))
        assert cost(windowed, 1_032) - cost(windowed, 32) == pytest.approx(0.75 * (cost(full, 1_032) - cost(full, 32)))
