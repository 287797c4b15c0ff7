"""What is reported at the start is what is then used."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quire.compute.mesh import Mesh
from quire.errors import ConfigError, MemoryBudgetError
from quire.foundation.config import Config
from quire.models.layers.factory import LayerFactory
from quire.models.layers.layer import weight_specs_of
from quire.models.model import build_model
from quire.models.rank_spec import rank_share
from quire.models.weights.tensor_options import TensorOptions
from quire.planning.auto_config import resolve
from quire.planning.footprint import GIB
from quire.planning.kv_cache_plan import MeasuredMemory, plan_kv_cache
from quire.planning.machine import Gpu, Machine
from quire.runtime.worker.kv_tensors import allocate_kv_cache
from tests.checkpoints import edit_config, make_llama, make_tiny
from tests.e2e.process_usage import PROMPT_MALLOC

MANY_LOGITS = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 131_072, "hidden_size": 512, "intermediate_size": 1_408,
    "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 768,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "eos_token_id": 2,
}  # fmt: skip
WIDE = MANY_LOGITS | {
    "vocab_size": 4_096, "hidden_size": 1_024, "intermediate_size": 4_096, "num_hidden_layers": 2,
    "num_key_value_heads": 2,
}  # fmt: skip


@pytest.mark.long("engine")
@pytest.mark.parametrize("keeps", [False, True], ids=["nothing kept", "the library as it is"])
@pytest.mark.parametrize(
    ("model", "tokens", "near", "kernels"),
    [(MANY_LOGITS, 512, (0.05, 0.06), None), (WIDE, 4_096, (0.03, 0.2), None), (WIDE, 4_096, (0.03, 0.2), "none")],
    ids=["many logits", "wide", "wide, torch alone"],
)
def test_the_report_is_near_what_is_used(
    tmp_path: Path,
    model: dict[str, object],
    tokens: int,
    near: tuple[float, float],
    kernels: str | None,
    keeps: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process's own memory at its highest (weights, a KV cache written to its last block, the largest steps), less
    what the process had before: 660 MiB of weights and many logits, then 150 MiB of weights and large steps.

    Where the C library returns each buffer that is freed, this is the same in every run. As it is, how many it keeps
    depends on which thread frees first: one more is 4% of the smaller model. `near` is of either."""
    if kernels is not None:
        monkeypatch.setenv("QUIRE_CPU_ISA", kernels)
    for name, value in PROMPT_MALLOC.items() if not keeps else ():
        monkeypatch.setenv(name, value)
    (tmp_path / "config.json").write_text(json.dumps(model))
    found = used_memory({
        "model": str(tmp_path), "dtype": "float32", "load_format": "dummy", "use_tqdm_on_load": False,
        "max_num_seqs": 8, "num_gpu_blocks_override": 8 * 768 // 16, "swap_space": 0, "max_num_batched_tokens": tokens,
    })  # fmt: skip
    reported = found["weights"] + found["kv"] + found["step"]
    assert reported == pytest.approx(found["used"], rel=near[keeps]), found


def used_memory(settings: dict[str, object]) -> dict[str, int]:
    answer = subprocess.run(
        [sys.executable, "-m", "tests.planning.measure_memory", json.dumps(settings)],
        capture_output=True, text=True, check=True, timeout=250, env={**os.environ, "OMP_NUM_THREADS": "2"},
    )  # fmt: skip
    found: dict[str, int] = json.loads(answer.stdout)
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_and_kv_cache_are_reported_to_the_byte(tmp_path: Path, dtype: str) -> None:
    make_llama(tmp_path, tie=True, attention_bias=True, tokenizer=False)
    resolved = resolve(
        Config().with_values(model=str(tmp_path), dtype=dtype, num_gpu_blocks_override=10, max_model_len=64)
    )
    spec, torch_dtype = resolved.spec, getattr(torch, dtype)
    factory = LayerFactory(TensorOptions(torch.device("cpu"), torch_dtype))
    build_model(spec, factory)
    weights = sum(math.prod(spec.shape) for spec in weight_specs_of(factory.layers)) * torch_dtype.itemsize
    assert resolved.memory.footprint.weights == weights
    storage = allocate_kv_cache(spec, 10, 16, torch_dtype, torch.device("cpu"))
    assert resolved.memory.footprint.kv_cache == sum(tensor.nbytes for tensor in storage.tensors)


def test_windows_share_blocks_and_bytes(tmp_path: Path) -> None:
    """Layers with and without a window: a block is as deep as one group, and the report counts what is allocated."""
    make_llama(tmp_path, layers=4, tokenizer=False)
    edit_config(tmp_path, {
        "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 32,
        "max_window_layers": 2,
    })  # fmt: skip
    settings = {"dtype": "float32", "num_gpu_blocks_override": 10, "max_model_len": 64}
    resolved = resolve(Config().with_values(model=str(tmp_path), **settings))
    assert len(resolved.spec.kv_groups()) == 2
    storage = allocate_kv_cache(resolved.spec, 10, 16, torch.float32, torch.device("cpu"))
    assert resolved.memory.footprint.kv_cache == sum(tensor.nbytes for tensor in storage.tensors)
    assert [len(tensor) for tensor in storage.tensors] == [2]


def test_latents_take_one_plane_on_every_rank(tmp_path: Path) -> None:
    """Of a token, the latent and the rotated part of keys, however many heads there are."""
    latents = {"q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
    shape = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "first_k_dense_replace": 2}
    make_tiny(tmp_path, "DeepseekV2ForCausalLM", num_hidden_layers=2, **shape, **latents)
    settings = {"dtype": "float32", "num_gpu_blocks_override": 10, "max_model_len": 64, "skip_tokenizer_init": True}
    resolved = resolve(Config().with_values(model=str(tmp_path), **settings))
    token = 2 * (32 + 8) * 4
    assert resolved.memory.footprint.kv_cache == 11 * 16 * token
    for spec in (resolved.spec, rank_share(resolved.spec, Mesh(tp=2))):
        storage = allocate_kv_cache(spec, 10, 16, torch.float32, torch.device("cpu"))
        assert sum(tensor.nbytes for tensor in storage.tensors) == 11 * 16 * token
        assert spec.kv_bytes_per_token("float32") == token
    with pytest.raises(ConfigError, match="--kv-cache-dtype fp8 is not served with DeepseekV2ForCausalLM"):
        resolve(Config().with_values(model=str(tmp_path), **settings, kv_cache_dtype="fp8"))


GPU = Machine(64 * GIB, fast_bfloat16=True, gpu=Gpu("H100", (9, 0), 80 * GIB, 79 * GIB), why_no_gpu="")
CPU = Machine(64 * GIB, fast_bfloat16=True)
NO_COMPILER = Machine(64 * GIB, fast_bfloat16=True, own_kernels=False)


@pytest.mark.parametrize("machine", [CPU, NO_COMPILER, GPU], ids=["cpu", "torch alone", "gpu"])
@pytest.mark.parametrize("settings", [{}, {"swap_space": 1.7}, {"kv_cache_memory_bytes": 10**7}, {"block_size": 32}])
def test_a_worker_that_finds_the_estimated_bytes_makes_the_same_plan(
    tmp_path: Path, machine: Machine, settings: dict[str, object]
) -> None:
    make_llama(tmp_path, tokenizer=False)
    resolved = resolve(Config().with_values(model=str(tmp_path), **settings), machine)
    left = resolved.memory.footprint.kv_cache if machine.gpu else None
    measured = plan_kv_cache(resolved.config, resolved.spec, MeasuredMemory(left, machine.own_kernels))
    expected = resolved.memory
    assert measured.footprint == expected.footprint
    assert (measured.num_blocks, measured.num_host_blocks) == (expected.num_blocks, expected.num_host_blocks)
    assert measured.max_model_len == expected.max_model_len


def test_the_kv_cache_gets_what_the_worker_measured(tmp_path: Path) -> None:
    make_llama(tmp_path, tokenizer=False)
    resolved = resolve(Config().with_values(model=str(tmp_path), max_model_len=96), GPU)
    block = resolved.spec.kv_block_bytes(resolved.config.model.dtype, 16)
    plan = plan_kv_cache(resolved.config, resolved.spec, MeasuredMemory(8 * block - 1))
    assert plan.num_blocks == 6  # of seven whole ones, one is the dummy
    assert not plan.is_estimate
    with pytest.raises(MemoryBudgetError, match=r"\(96 tokens\).* leave 5 blocks of the GPU: give --max-model-len 80,"):
        plan_kv_cache(resolved.config, resolved.spec, MeasuredMemory(7 * block - 1))
    for left in (2 * block - 1, 0, -block):
        with pytest.raises(MemoryBudgetError, match=r"leave 0\.00 GiB of the GPU for the KV cache: raise --gpu-mem"):
            plan_kv_cache(resolved.config, resolved.spec, MeasuredMemory(left))
