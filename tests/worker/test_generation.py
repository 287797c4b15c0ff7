"""Greedy text equals transformers', whatever the checkpoint's flags, the batch, the chunking and the block size."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.foundation.messages.workers import Result
from tests.checkpoints import LLAMA3_ROPE, edit_config, make_llama
from tests.worker.driver import Driver, Sequence, config_for, hand_out

TOKENS = 64
LENGTHS = (1, 37, 5, 90, 16, 64)


def prompts(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[list[int]]:
    random_ = random.Random(seed)
    return [[random_.randrange(3, 320) for _ in range(n)] for n in lengths]


def reference(directory: Path, prompt: list[int], count: int = TOKENS) -> list[int]:
    """What transformers generates greedily in fp32, past any end of sequence."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    tokens = torch.tensor([prompt])
    output = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return output[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def assert_greedy(directory: Path, sequences: list[Sequence]) -> None:
    """Every sampled token is transformers' likeliest one after those before it, so the text is what it generates
    greedily.
    """
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for s in sequences:
        with torch.inference_mode():
            likeliest = model(torch.tensor([s.prompt + s.sampled])).logits[0].argmax(-1).tolist()
        assert s.sampled == likeliest[len(s.prompt) - 1 : -1], f"prompt of {len(s.prompt)} tokens"


VARIANTS: dict[str, dict[str, Any]] = {
    "grouped heads": {"heads": 6, "kv_heads": 2, "hidden": 96},
    "one kv head": {"heads": 4, "kv_heads": 1},
    "as many kv heads": {"heads": 4, "kv_heads": 4},
    "tied, sharded": {"tie": True, "shards": "40KB"},
    "llama3 rope": {"rope": "llama3"},
    "llama3 rope, files of 4.x": {"rope": LLAMA3_ROPE | {"factor": 4.0, "rope_theta": 5e5}, "generation": 4},
    "wide heads": {"head_dim": 24},
    "biases": {"attention_bias": True, "mlp_bias": True},
}


@pytest.mark.parametrize(("block_size", "chunk"), [(8, 512), (16, 7), (64, 19)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_mixed_batch_equals_transformers(variant: str, block_size: int, chunk: int, tmp_path: Path) -> None:
    directory = make_llama(tmp_path, tokenizer=False, **VARIANTS[variant])
    driver = Driver(config_for(directory, block_size=block_size))
    batch = [driver.admit(slot, prompt) for slot, prompt in enumerate(prompts())]
    driver.generate(batch, TOKENS, chunk)
    assert_greedy(directory, batch)
    if block_size == 16:
        assert batch[1].sampled == reference(directory, batch[1].prompt)


def test_old_key_of_the_rope_type_is_read(tmp_path: Path) -> None:
    directory = make_llama(tmp_path, tokenizer=False, rope="llama3", generation=4)
    expected = reference(directory, prompts()[3])

    def rename(config: dict[str, Any]) -> None:
        config["rope_scaling"]["type"] = config["rope_scaling"].pop("rope_type")

    edit_config(directory, rename)
    driver = Driver(config_for(directory))
    assert driver.generate([driver.admit(0, prompts()[3])], TOKENS) == [expected]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("plain"), tokenizer=False)


def test_rows_join_and_leave_between_steps(plain: Path) -> None:
    """A sequence samples the same tokens while others are prefilled in chunks beside it, start late or end early."""
    driver = Driver(config_for(plain, block_size=8))
    long, short, late = prompts((80, 3, 21))
    first, second = driver.admit(3, long), driver.admit(0, short)
    driver.move([(second, 3), (first, 33)])
    driver.move([(first, 2), (second, 1)])
    third = driver.admit(1, late)
    driver.move([(third, 20), (first, 45), (second, 1)])
    driver.move([(second, 1), (third, 1)])
    driver.generate([first, third, second], TOKENS)
    assert_greedy(plain, [first, third, second])


def test_slots_and_blocks_are_used_again(plain: Path) -> None:
    """New owners of the same slots, on the blocks of the old ones in another order."""
    driver = Driver(config_for(plain, num_gpu_blocks_override=24))
    for round_ in range(3):
        driver.generate([driver.admit(s, p) for s, p in enumerate(prompts((9, 90, 40), seed=7 + round_))], 20)
        driver.free.reverse()
        again = [driver.admit(s, p) for s, p in enumerate(prompts((70, 9, 31), seed=1))]
        driver.generate(again, 40)
        assert_greedy(plain, again)


def test_a_plan_needs_no_tokens_of_the_one_before(plain: Path) -> None:
    """All plans are made before the first result is taken: what a step samples stays on the device."""
    driver = Driver(config_for(plain))
    batch = [driver.admit(slot, prompt) for slot, prompt in enumerate(prompts((5, 40)))]
    plans = [driver.plan([(s, len(s.prompt)) for s in batch])]
    plans += [driver.plan([(s, 1) for s in batch]) for _ in range(TOKENS - 1)]
    results: list[Result] = [driver.worker.execute(plan) for plan, _ in plans]
    for result, (_, samplers) in zip(results, plans, strict=True):
        hand_out(result, samplers)
    assert [len(s.sampled) for s in batch] == [TOKENS, TOKENS]
    assert_greedy(plain, batch)


def test_readmitted_sequence_goes_on_as_before(plain: Path) -> None:
    """After a preemption: prompt and sampled tokens are given again, and the random numbers go on where they were."""
    sampling = {"temperature": 0.9, "top_p": 0.95, "seed": 2**63 + 5}
    prompt = prompts((30,))[0]
    driver = Driver(config_for(plain))
    whole = driver.generate([driver.admit(0, prompt, **sampling)], 40)[0]
    start = driver.generate([driver.admit(1, prompt, **sampling)], 15)[0]
    rest = driver.admit(4, prompt + start, num_sampled=15, **sampling)
    other = driver.admit(2, prompts((50,), seed=3)[0], temperature=1.0)
    driver.generate([other, rest], 25, chunk=13)
    assert start + rest.sampled == whole


def test_a_step_without_reads_or_rows(plain: Path) -> None:
    driver = Driver(config_for(plain))
    sequence = driver.admit(0, prompts((20,))[0])
    result = driver.move([(sequence, 7)])
    assert (result.counts, result.tokens) == ([], [])
    result = driver.move([])
    assert (result.step, result.counts, result.tokens) == (2, [], [])
    driver.generate([sequence], 20)
    assert_greedy(plain, [sequence])


def test_broken_row_fails_alone(tmp_path: Path) -> None:
    """A token whose embedding is NaN: its positions are errors; no other sequence changes, even on its old blocks."""
    from safetensors.torch import load_file, save_file

    directory = make_llama(tmp_path, tokenizer=False)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.embed_tokens.weight"][7] = float("nan")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    healthy = [[t if t != 7 else 8 for t in p] for p in prompts((12, 20))]
    driver = Driver(config_for(directory, num_gpu_blocks_override=16, max_model_len=128))
    first, broken, last = (
        driver.admit(0, healthy[0], logprobs=1),
        driver.admit(1, [9, 7, 9] * 9, logprobs=2, temperature=1.0, top_k=3, top_p=0.5, min_p=0.1),
        driver.admit(2, healthy[1], temperature=0.7, top_k=5),
    )
    driver.move([(s, len(s.prompt)) for s in (first, broken, last)])
    for _ in range(9):
        driver.move([(s, 1) for s in (first, broken, last)])
    assert (len(broken.errors), broken.sampled, broken.logprobs) == (10, [], [])
    assert "not a number" in broken.errors[0]
    alone = Driver(config_for(directory, num_gpu_blocks_override=16, max_model_len=128))
    for sequence, sampling in ((first, {}), (last, {"temperature": 0.7, "top_k": 5})):
        expected = alone.generate([alone.admit(0, sequence.prompt, **sampling)], 10)[0]
        assert sequence.sampled == expected
        assert driver.generate([driver.admit(1, sequence.prompt, **sampling)], 10)[0] == expected
