"""A KV cache of 8 bits: answers stay near those of a dense one, and scales are the checkpoint's or the text's."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from quire import LLM, SamplingParams
from quire.compute.kernels.cpu.library import library
from quire.errors import CheckpointError, ConfigError
from quire.foundation.clock import SystemClock
from quire.foundation.config import Config
from quire.planning.auto_config import resolve
from quire.runtime.worker.replay import RecordedSteps
from quire.runtime.worker.startup.kv_scales import CALIBRATION_TEXT
from quire.runtime.worker.worker import Worker
from tests.checkpoints import VOCAB_SIZE, make_llama, make_tiny
from tests.parity.cases import CASES
from tests.worker.driver import config_for

NEAR = {"fp8": 0.06, "fp8_e5m2": 0.12, "int8": 0.02}
"""Mean difference of log probabilities of prompts' tokens, in nats."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("kv") / "model", max_len=1024, std=0.1)


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(20, 120))] for _ in range(count)]


def prompt_logprobs(directory: Path, **settings: Any) -> Tensor:
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0, ignore_eos=True)
    with LLM(
        str(directory), dtype="float32", device="cpu", skip_tokenizer_init=True, max_num_batched_tokens=50, **settings
    ) as llm:
        outputs = llm.generate(prompts(5), params)
    entries = [entry for output in outputs for entry in (output.prompt_logprobs or [])[1:]]
    return torch.tensor([next(iter(each.values())).logprob for each in entries if each])


@pytest.mark.parametrize("case", ["llama, 7 heads a group, biases, sharded", "gemma2", "qwen3 moe"])
@pytest.mark.parametrize("kv_cache_dtype", NEAR)
def test_log_probabilities_stay_near(kv_cache_dtype: str, case: str, tmp_path: Path) -> None:
    directory = make_tiny(tmp_path, **CASES[case] | {"std": 0.1})
    difference = prompt_logprobs(directory, kv_cache_dtype=kv_cache_dtype) - prompt_logprobs(directory)
    assert 0 < float(difference.abs().mean()) < NEAR[kv_cache_dtype]


def test_it_is_replayed_and_swapped_like_any_other(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are recorded where there are kernels; preempted sequences come back as they were."""
    replayed: list[object] = []
    replay = RecordedSteps.replay
    monkeypatch.setattr(RecordedSteps, "replay", lambda *of, **kind: (replayed.append(of), replay(*of, **kind))[1])
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    tokens = []
    for blocks in (200, 26):
        with LLM(
            str(checkpoint), dtype="float32", device="cpu", kv_cache_dtype="fp8", num_gpu_blocks_override=blocks,
            skip_tokenizer_init=True, max_model_len=200, max_num_seqs=5, disable_log_stats=False,
        ) as llm:  # fmt: skip
            tokens.append([output.outputs[0].token_ids for output in llm.generate(prompts(5), params)])
            preempted = next(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
            assert (preempted > 0) == (blocks == 26)
    assert tokens[0] == tokens[1]
    assert bool(replayed) == (library() is not None)


def scales_of(directory: Path, **settings: Any) -> Tensor:
    """Of a worker that has loaded this model."""
    worker = Worker(config_for(directory, max_model_len=64, num_gpu_blocks_override=20, **settings), SystemClock())
    worker.load()
    worker.close()
    assert worker._kv_scales is not None
    return worker._kv_scales


@pytest.mark.parametrize(("kv_cache_dtype", "most", "room"), [("fp8", 448, 2), ("int8", 127, 1.1)])
def test_scales_are_what_transformers_caches_of_the_text(
    checkpoint: Path, kv_cache_dtype: str, most: float, room: float
) -> None:
    from transformers import AutoModelForCausalLM

    ids = Tokenizer.from_file(str(checkpoint / "tokenizer.json")).encode(CALIBRATION_TEXT.read_text()).ids[:512]
    with torch.inference_mode():
        cached = AutoModelForCausalLM.from_pretrained(checkpoint)(torch.tensor([ids])).past_key_values
    largest = torch.stack(
        [torch.stack((layer.keys, layer.values))[:, 0].abs().amax((2, 3)) for layer in cached.layers]
    )  # [layers, 2, kv_heads]
    expected = largest * room / most
    if kv_cache_dtype == "fp8":
        expected = torch.exp2(expected.log2().ceil())
    torch.testing.assert_close(scales_of(checkpoint, kv_cache_dtype=kv_cache_dtype), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    "names", [("self_attn.k_scale", "self_attn.v_scale"), ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale")]
)
def test_a_checkpoints_scales_are_used(checkpoint: Path, names: tuple[str, str], tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    for file in checkpoint.iterdir():
        (directory / file.name).symlink_to(file)
    tensors = load_file(checkpoint / "model.safetensors")
    for layer in range(3):
        for kind, name in enumerate(names):
            tensors[f"model.layers.{layer}.{name}"] = torch.tensor(0.01 * (1 + layer) + kind)
    (directory / "model.safetensors").unlink()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    found = scales_of(directory, kv_cache_dtype="fp8")
    expected = torch.tensor([[0.01 * (1 + layer) + kind for kind in (0, 1)] for layer in range(3)])
    torch.testing.assert_close(found, expected[:, :, None].expand(found.shape))
    tensors[f"model.layers.1.{names[1]}"] = torch.tensor(float("inf"))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1.*one number above 0"):
        scales_of(directory, kv_cache_dtype="fp8")


def test_the_same_memory_holds_as_many_more_tokens(checkpoint: Path) -> None:
    plain, short = (
        resolve(
            Config().with_values(
                model=str(checkpoint), kv_cache_memory_bytes=2**22, kv_cache_dtype=kind, dtype="bfloat16"
            )
        )
        for kind in ("auto", "fp8")
    )
    assert short.memory.num_blocks == pytest.approx(2 * plain.memory.num_blocks, abs=2)


def test_another_type_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype: 'turboquant' is not one of"):
        LLM(str(checkpoint), kv_cache_dtype="turboquant")
