"""How memory is divided between KV blocks and states, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.compute.mesh import Mesh
from quire.errors import ConfigError, MemoryBudgetError, SetupError
from quire.foundation.config import Config, SchedulerConfig, environment
from quire.models.rank_spec import rank_share
from quire.planning.auto_config import ResolvedConfig, batch_limits, resolve
from quire.planning.footprint import GIB, format_bytes
from quire.planning.kv_cache_plan import MeasuredMemory, NumBlocks, plan_kv_cache
from quire.planning.machine import Gpu, Machine
from quire.planning.state_memory import most_sequences, scratch_states
from quire.planning.step_limits import StepLimits
from quire.runtime.worker.kv_tensors import allocate_kv_cache
from quire.runtime.worker.state_tensors import StateTensors
from quire.tools.sizing.report import _caches
from tests.checkpoints import make_tiny
from tests.models_sweep.rows import ROWS, SHAPE

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    return {
        name: make_tiny(directory / name, name, **SHAPE | ROWS[name] | {"max_position_embeddings": 2048})
        for name in ("Qwen3NextForCausalLM", "Mamba2ForCausalLM", "MambaForCausalLM")
    }


def resolved(model: Path, memory: int = GIB, **settings: Any) -> ResolvedConfig:
    values = {"dtype": "float32", "device": "cpu", "max_num_seqs": 4, "max_model_len": 2048, "swap_space": 0.0}
    return resolve(Config().with_values(model=str(model), **values | settings), Machine(memory, fast_bfloat16=True))


@pytest.mark.parametrize("name", ["Qwen3NextForCausalLM", "Mamba2ForCausalLM"])
@pytest.mark.parametrize("drafts", [0, 3])
def test_the_worker_takes_what_the_report_says(models: dict[str, Path], name: str, drafts: int) -> None:
    asked = {"method": "ngram", "num_speculative_tokens": drafts}
    found = resolved(models[name], **({"speculative_config": asked} if drafts else {}))
    again = plan_kv_cache(found.config, found.spec, MeasuredMemory())
    assert again.blocks == found.memory.blocks
    scratch = scratch_states(StepLimits.of(found.config))
    assert scratch == (4 if drafts else 0)
    states = StateTensors(found.spec, again.num_states, torch.float32, CPU, scratch)
    tensors = [tensor for layer in found.spec.state_layers for tensor in states.by_layer.tensors_of(layer)]
    assert sum(tensor.nbytes for tensor in tensors) == found.memory.footprint.states
    cache = allocate_kv_cache(found.spec, again.num_blocks, 16, torch.float32, CPU)
    cached = sum(tensor.nbytes for tensor in cache.tensors)
    assert cached == (found.memory.footprint.kv_cache if found.spec.kv_groups() else 0)
    assert any(line.startswith("states ") and f"{again.num_states - 4:,} checkpoints" in line for line in found.reasons)


def test_checkpoints_take_their_share_and_no_more_than_can_be_used(models: dict[str, Path]) -> None:
    model, roomy = models["Qwen3NextForCausalLM"], resolved(models["Qwen3NextForCausalLM"], gpu_memory_utilization=1.0)
    rest, size = roomy.memory.footprint, roomy.spec.state_bytes("float32")
    memory = rest.weights + rest.activations + 5 * size + 400 * size  # after the states of sequences and the dummy
    for share in (0.0, 0.1, 0.5):
        found = resolved(model, memory, gpu_memory_utilization=1.0, mamba_block_size=16, mamba_cache_share=share)
        assert found.memory.num_states == pytest.approx(4 + share * 400, abs=1)  # the dummy block
    assert resolved(model, 8 * GIB).memory.num_states == 4 + 4 * (2048 // 1024 + 3)
    assert resolved(model, 8 * GIB, mamba_block_size=64).memory.num_states == 4 + 4 * (2048 // 64 + 3)
    assert resolved(model, 8 * GIB, mamba_cache_mode="none").memory.num_states == 4 + 4 * 3
    assert resolved(model, num_states_override=9).memory.num_states == 9


def test_fewer_sequences_run_by_default_where_their_states_are_large(models: dict[str, Path]) -> None:
    found = resolved(models["Mamba2ForCausalLM"], 8 * GIB, max_num_seqs=None)
    size, default = found.spec.state_bytes("float32"), found.config.scheduler.max_num_seqs or 0
    assert most_sequences(found.spec, "float32", 1000 * size) == 200
    assert batch_limits(SchedulerConfig(), None, most_seqs=3)[0].max_num_seqs == 3 < default
    assert batch_limits(SchedulerConfig(max_num_seqs=5), None, most_seqs=3)[0].max_num_seqs == 5
    assert resolved(models["Mamba2ForCausalLM"], max_num_seqs=300).config.scheduler.max_num_seqs == 300


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"mamba_block_size": 40}, ConfigError, "multiple of --block-size 16"),
        ({"num_states_override": 3}, ConfigError, r"at least --max-num-seqs \(4\)"),
        ({"mamba_cache_share": 1.0}, ConfigError, "less than 1"),
        ({"mamba_cache_mode": "all"}, SetupError, "align, none"),
        ({"max_num_seqs": 100_000}, MemoryBudgetError, "give --max-num-seqs"),
    ],
    ids=["spacing", "states", "share", "mode", "sequences"],
)
def test_what_cannot_be_served_is_refused(
    models: dict[str, Path], settings: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        resolved(models["Qwen3NextForCausalLM"], **settings)


def test_a_draft_model_does_not_follow_a_model_that_caches_no_tokens(models: dict[str, Path]) -> None:
    asked = {"model": "another", "num_speculative_tokens": 2}
    with pytest.raises(ConfigError, match="no layer of Mamba2ForCausalLM caches tokens"):
        resolved(models["Mamba2ForCausalLM"], speculative_config=asked)


GPU = Machine(64 * GIB, fast_bfloat16=True, gpu=Gpu("NVIDIA H100", (9, 0), 80 * GIB, 79 * GIB), why_no_gpu="")


def test_on_a_gpu_transformers_modules_compute_layers_without_kernels(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "fallback_cache", lambda: tmp_path / "descriptions")
    config = Config().with_values(model=str(models["MambaForCausalLM"]))
    found = resolve(config, GPU)
    assert found.spec.fallback is not None
    assert found.config.model.model_impl == "transformers"
    assert resolve(found.config, GPU).spec == found.spec  # what is resolved stays so
    (line,) = (line for line in found.reasons if line.startswith("model impl"))
    assert "some of Quire's own layers for it run on a CPU alone so far" in line
    with pytest.raises(ConfigError, match="--model-impl transformers or --device cpu"):
        resolve(config.with_values(model_impl="quire"), GPU)


@pytest.mark.parametrize("architecture", ["Qwen3NextForCausalLM", "Mamba2ForCausalLM"])
def test_a_gpu_computes_the_layers_that_it_has_kernels_for(models: dict[str, Path], architecture: str) -> None:
    found = resolve(Config().with_values(model=str(models[architecture])), GPU)
    assert found.spec.fallback is None
    assert found.spec.state_layers


def test_a_model_without_attention_is_divided_and_planned(models: dict[str, Path]) -> None:
    spec = resolved(models["Mamba2ForCausalLM"]).spec
    assert spec.kv_groups() == rank_share(spec, Mesh(tp=2)).kv_groups() == ()
    assert rank_share(spec, Mesh(tp=2)).state_bytes("float32") < spec.state_bytes("float32")
    (line,) = _caches(spec)
    assert line == f"States: 3 layers, {format_bytes(spec.state_bytes('bfloat16'))} a sequence in bf16"


def test_ranks_without_layers_that_keep_states_have_room_for_any_number() -> None:
    assert NumBlocks(9, 4, 0).smaller(NumBlocks(7, 5, 12)) == NumBlocks(7, 4, 12)
    assert NumBlocks(9, 4, 20).smaller(NumBlocks(9, 4, 12)).states == 12


def test_states_are_copied_in_order(models: dict[str, Path]) -> None:
    spec = resolved(models["Qwen3NextForCausalLM"]).spec
    states = StateTensors(spec, 5, torch.float32, CPU)
    tensors = [tensor for layer in spec.state_layers for tensor in states.by_layer.tensors_of(layer)]
    for tensor in tensors:
        tensor.copy_(
            torch.arange(6.0).view(6, *[1] * (tensor.dim() - 1)).expand_as(tensor) + 10
        )  # the dummy is no zero
    states.load([(3, 1), (0, 3), (1, 2), (3, 4)])
    states.save([(2, 5)])
    for tensor in tensors:
        assert [float(each.min()) for each in tensor] == [10, 13, 13, 0, 0, 13]
        assert torch.equal(tensor.flatten(1).amin(1), tensor.flatten(1).amax(1))
