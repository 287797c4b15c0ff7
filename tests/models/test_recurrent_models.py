"""Models with states compute the same, however their tokens are divided over steps; and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire import LLM
from quire.compute.attention.backend import StepRows
from quire.compute.attention.cpu import CpuAttention
from quire.errors import CheckpointError
from quire.models.layers.rotary import Positions
from quire.models.spec import read_spec
from quire.offline import local_engine
from quire.runtime.worker.kv_tensors import allocate_kv_cache, kv_view
from tests.checkpoints import TINY, edit_config, make_tiny
from tests.executor.thread_ranks import ThreadRanks
from tests.models.forward import CPU, Loaded, beside_states, load, logits_of, logits_of_ranks, set_rows
from tests.models_sweep.rows import ROWS, SHAPE
from tests.offline.test_lora import Stage, random_prompts
from tests.parity.oracle import Oracle

NAMES = (
    "Lfm2ForCausalLM",
    "NemotronHForCausalLM",
    "Qwen3_5ForCausalLM",
    "JambaForCausalLM",
    "KimiLinearForCausalLM",
    "OlmoHybridForCausalLM",
    "BailingHybridForCausalLM",
    "Zamba2ForCausalLM",
)
STEPS = [(64, 1), (1, 1), (37, 1), (1, 3), (47, 2)]
"""Tokens of each of two rows in each step; the first ends at the gated delta rule's usual chunk."""


def hidden_in_steps(loaded: Loaded, rows: list[Tensor], steps: list[tuple[int, ...]]) -> list[Tensor]:
    """[length, hidden] of each row, whose tokens are computed so many in each step."""
    spec, n = loaded.spec, len(rows)
    groups = len(spec.kv_groups())
    cache = allocate_kv_cache(spec, n * 16 * groups, 16, loaded.dtype, CPU)
    backend = beside_states(CpuAttention(kv_view(cache, spec)), spec, n, loaded.dtype)
    tables = tuple((1 + torch.arange(groups * n * 16).view(groups, n, 16)).unbind())
    done, outputs = np.zeros(n, dtype=np.int64), [[] for _ in rows]  # type: ignore[var-annotated]
    for step in steps:
        counts = np.array(step)
        of_token = np.repeat(np.arange(n), counts)
        parts = [row[at : at + count] for row, at, count in zip(rows, done, step, strict=True)]
        positions = torch.cat([torch.arange(at, at + count) for at, count in zip(done, step, strict=True)])
        slots = torch.from_numpy(of_token)
        starts = torch.from_numpy(done.copy())
        backend.prepare(
            StepRows(counts, of_token, done, slots, starts, positions, torch.arange(n), torch.tensor(step), tables)
        )
        set_rows(backend, list(step))
        hidden = loaded.model.hidden(torch.cat(parts), Positions(positions), backend)
        for each, part in zip(outputs, hidden.split(step), strict=True):
            each.append(part)
        done += counts
    return [torch.cat(each) for each in outputs]


@pytest.fixture(scope="module", params=NAMES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model"), request.param, **SHAPE | ROWS[request.param])


@torch.inference_mode()
def test_steps_of_any_size_are_one_text(checkpoint: Path) -> None:
    loaded = load(checkpoint)
    texts = [torch.randint(3, 320, (sum(sizes),)) for sizes in zip(*STEPS, strict=True)]
    for text, hidden in zip(texts, hidden_in_steps(loaded, texts, STEPS), strict=True):
        theirs = Oracle(checkpoint).logits(text.tolist())
        assert (loaded.model.logits(hidden) - theirs).abs().max() <= 1e-4 * theirs.abs().max()


@torch.inference_mode()
@pytest.mark.parametrize("architecture", [*NAMES, "GraniteMoeHybridForCausalLM", "Qwen3NextForCausalLM"])
def test_two_ranks(architecture: str, tmp_path: Path) -> None:
    """Granite's ranks share one norm, and one input and output of states; Qwen3-Next stores all of a head together."""
    checkpoint = make_tiny(tmp_path, architecture, **SHAPE | ROWS[architecture])
    text = torch.randint(3, 320, (40,), generator=torch.Generator().manual_seed(0))
    whole = logits_of(checkpoint, text, torch.float32)
    first, second = logits_of_ranks(checkpoint, text, torch.float32, 2)
    assert torch.equal(first, second)
    assert (first - whole).abs().max() < 3e-5 * whole.abs().max()


@torch.inference_mode()
def test_a_model_that_reads_images_too(tmp_path: Path) -> None:
    """Its text model is served: the tower's weights are left out, and rotations of text are the usual ones."""
    import transformers

    text: dict[str, Any] = TINY | SHAPE | ROWS["Qwen3_5ForCausalLM"]
    text["rope_parameters"] = text["rope_parameters"] | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    tower = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    whole = transformers.Qwen3_5ForConditionalGeneration
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"text_config": text, "vision_config": tower | {"num_position_embeddings": 16}}
    model = whole(whole.config_class(**sizes))
    model.save_pretrained(tmp_path)
    tokens = torch.randint(3, 320, (70,))
    theirs = model(tokens[None]).logits[0]
    assert (logits_of(tmp_path, tokens, torch.float32) - theirs).abs().max() < 1e-4 * theirs.abs().max()


def test_adapters_over_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of projections whose outputs are stored head by head, through prompts in chunks and tokens behind them."""
    monkeypatch.setattr(local_engine, "build_executor", ThreadRanks)
    name, modules = "Qwen3NextForCausalLM", ("q_proj", "o_proj", "in_proj_qkvz", "in_proj_ba", "out_proj")
    sizes = SHAPE | ROWS[name] | {"num_hidden_layers": 3, "layer_types": ["linear_attention"] * 2 + ["full_attention"]}
    checkpoint = make_tiny(tmp_path / "model", name, **sizes)
    stage = Stage(tmp_path, checkpoint, {"all": {"rank": 8, "modules": modules}}, start=False)
    prompts = random_prompts(3, [9, 33])
    with LLM(
        str(checkpoint), dtype="float32", device="cpu", enable_lora=True, max_lora_rank=8, skip_tokenizer_init=True,
        num_gpu_blocks_override=64, max_model_len=128, max_num_batched_tokens=24, tensor_parallel_size=2,
    ) as llm:  # fmt: skip
        stage.check(prompts, ["all", None], 8, llm)


@torch.inference_mode()
def test_bfloat16_is_near(checkpoint: Path) -> None:
    """Rows of bf16, whose states of heads are fp32."""
    text, steps = torch.randint(3, 320, (80,), generator=torch.Generator().manual_seed(0)), [(70,), (1,), (9,)]
    wide, narrow = (load(checkpoint, dtype) for dtype in (torch.float32, torch.bfloat16))
    (whole,), (half,) = (hidden_in_steps(each, [text], steps) for each in (wide, narrow))
    near = torch.nn.functional.cosine_similarity(whole, half.float())
    assert near.median() > 0.99  # norms of small vectors behind the delta rule make some differ more


@pytest.mark.parametrize(
    ("architecture", "change", "key"),
    [
        ("Lfm2ForCausalLM", {"layer_types": ["conv", "conv", "sliding_attention"]}, "layer_types"),
        ("Mamba2ForCausalLM", {"expand": 3}, "expand"),
        ("Mamba2ForCausalLM", {"n_groups": 3}, "n_groups"),
        ("Mamba2ForCausalLM", {"time_step_limit": [0.0]}, "time_step_limit"),
        ("Qwen3_5ForCausalLM", {"linear_num_value_heads": 5}, "linear_num_value_heads"),
        ("GraniteMoeHybridForCausalLM", {"position_embedding_type": "alibi"}, "position_embedding_type"),
        ("BambaForCausalLM", {"mamba_n_heads": 7}, "mamba_n_heads"),
        ("NemotronHForCausalLM", {"layers_block_type": ["linear_attention", "rwkv"]}, "layers_block_type"),
        ("NemotronHForCausalLM", {"moe_latent_size": 32, "mlp_bias": True}, "mlp_bias"),
        ("JambaForCausalLM", {"mamba_dt_rank": 0}, "mamba_dt_rank"),
        ("KimiLinearForCausalLM", {"mla_use_nope": False}, "mla_use_nope"),
        ("MiniMaxForCausalLM", {"linear_attn_beta_factor": 0.5}, "linear_attn_beta_factor"),
        ("MiniMaxForCausalLM", {"sliding_window": 8}, "sliding_window"),
        ("BailingHybridForCausalLM", {"kda_lower_bound": 1.0}, "kda_lower_bound"),
        ("OlmoHybridForCausalLM", {"linear_num_value_heads": 3}, "linear_num_value_heads"),
    ],
)
def test_what_is_not_served_is_refused(architecture: str, change: dict[str, Any], key: str, tmp_path: Path) -> None:
    checkpoint = make_tiny(tmp_path, architecture, **SHAPE | ROWS[architecture])
    read_spec(checkpoint)
    edit_config(checkpoint, change)
    with pytest.raises(CheckpointError, match=key):
        read_spec(checkpoint)


def test_kimi_linear_numbers_its_layers_from_one(tmp_path: Path) -> None:
    """As published files do, which also have sizes of heads in an object of their own."""
    checkpoint = make_tiny(tmp_path, "KimiLinearForCausalLM", **SHAPE | ROWS["KimiLinearForCausalLM"])
    named = read_spec(checkpoint).layers
    numbers = {"full_attn_layers": [3], "kda_layers": [1, 2, 4]}
    sizes = {"num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4}
    edit_config(checkpoint, {"layer_types": None, "linear_num_heads": 9, "linear_attn_config": numbers | sizes})
    assert read_spec(checkpoint).layers == named


def test_nemotron_h_names_its_layers_by_letters(tmp_path: Path) -> None:
    """As published files do."""
    checkpoint = make_tiny(tmp_path, "NemotronHForCausalLM", **SHAPE | ROWS["NemotronHForCausalLM"])
    named = read_spec(checkpoint).layers
    edit_config(
        checkpoint, {"layers_block_type": None, "hybrid_override_pattern": "M-M*E", "num_hidden_layers": len(named)}
    )
    assert read_spec(checkpoint).layers == named
