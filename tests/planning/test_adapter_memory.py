"""What is reckoned for adapters is what they take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.compute.mesh import Mesh
from quire.foundation.config import Config
from quire.models.layers.factory import LayerFactory
from quire.models.lora.updates import AdapterMemory, LowRankUpdates
from quire.models.model import build_model
from quire.models.rank_spec import rank_share
from quire.models.spec import read_spec
from quire.models.weights.tensor_options import TensorOptions
from quire.planning.footprint import adapter_bytes
from tests.checkpoints import make_llama, make_tiny
from tests.models.divisible import DIVISIBLE


@pytest.mark.parametrize(("slots", "rank"), [(1, 16), (3, 20)])
def test_slots_take_what_was_reckoned(tmp_path: Path, slots: int, rank: int) -> None:
    spec = read_spec(make_llama(tmp_path, tokenizer=False))
    updates = LowRankUpdates(slots, rank, "cpu")
    build_model(spec, LayerFactory(TensorOptions(torch.device("cpu"), torch.float32), updates=updates))
    memory = AdapterMemory(updates, torch.float32, torch.device("cpu"))
    values = {"dtype": "float32", "enable_lora": True, "max_loras": slots, "max_lora_rank": rank}
    assert adapter_bytes(Config().with_values(device="cuda", **values), spec) == memory._weights.nbytes
    kept = Config().with_values(device="cpu", max_cpu_loras=slots + 2, **values)
    assert adapter_bytes(kept, spec) == memory._weights.nbytes // slots * (2 * slots + 2)
    assert adapter_bytes(Config().with_values(device="cpu", dtype="float32"), spec) == 0


@pytest.mark.parametrize("case", ["mixtral", "glm4 moe"])
@pytest.mark.parametrize("mesh", [Mesh(1, tp=2), Mesh(3, tp=4), Mesh(1, pp=2), Mesh(0, tp=2, ep=2)])
def test_each_rank_takes_what_was_reckoned_for_its_share(case: str, tmp_path: Path, mesh: Mesh) -> None:
    spec = read_spec(make_tiny(tmp_path, **DIVISIBLE[case]))
    updates, undivided = LowRankUpdates(1, 16, "cpu"), LowRankUpdates(1, 16, "cpu")
    options = TensorOptions(torch.device("cpu"), torch.float32)
    build_model(spec, LayerFactory(options, None, mesh, updates=updates))
    build_model(spec, LayerFactory(options, updates=undivided))
    config = Config().with_values(dtype="float32", enable_lora=True, device="cpu")
    assert adapter_bytes(config, rank_share(spec, mesh)) == 2 * 4 * updates.size
    assert updates.size < 0.85 * undivided.size


@pytest.mark.parametrize("architecture", ["Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_experts_take_what_was_reckoned(architecture: str, tmp_path: Path, device: str) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}
    spec = read_spec(make_tiny(tmp_path, architecture, **sizes))
    updates = LowRankUpdates(1, 16, device)
    build_model(spec, LayerFactory(TensorOptions(torch.device("cpu"), torch.float32), updates=updates))
    assert updates.experts
    config = Config().with_values(dtype="float32", enable_lora=True, device=device)
    assert adapter_bytes(config, spec) == (2 if device == "cpu" else 1) * 4 * updates.size
