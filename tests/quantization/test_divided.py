"""Quantized weights that ranks divide: the same logits, or a refusal that says what cannot be cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.errors import CheckpointError
from tests.checkpoints import make_llama, make_tiny
from tests.models.forward import logits_of, logits_of_ranks
from tests.quantization import made
from tests.quantization.test_checkpoints import TOKENS, WEIGHT_ONLY, WITH_ACTIVATIONS, error

SHAPE: dict[str, Any] = {"hidden": 256, "heads": 4, "kv_heads": 2, "intermediate": 512, "layers": 1, "tokenizer": False}
REORDERED = ("gptq, act-order", "compressed, act-order")
EXPERTS: dict[str, Any] = {
    "architecture": "MixtralForCausalLM",
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
}
FLAT = "bitsandbytes nf4"
"""Codes without rows or columns."""


@pytest.mark.parametrize("case", [case for case in WEIGHT_ONLY if case not in (*REORDERED, FLAT)])
@torch.inference_mode()
def test_integers_are_cut_where_groups_end(case: str, tmp_path: Path) -> None:
    config, make = WEIGHT_ONLY[case]
    directory = make_llama(tmp_path / "model", **SHAPE)
    made.quantize(directory, config, make)
    whole = logits_of(directory, TOKENS, torch.float32)
    first, second = logits_of_ranks(directory, TOKENS, torch.float32, 2)
    assert float((first - whole).abs().max() / whole.abs().max()) < 1e-5
    assert torch.equal(first, second)


@pytest.mark.parametrize("case", WITH_ACTIVATIONS)
@torch.inference_mode()
def test_eight_bits_with_activations(case: str, tmp_path: Path) -> None:
    """Each rank has a scale of its own for its part of a row of activations: other errors, and no larger ones."""
    config, make = WITH_ACTIVATIONS[case]
    directory = make_llama(tmp_path / "model", **SHAPE)
    dense = made.quantize(directory, config, make)
    whole = error(logits_of(directory, TOKENS, torch.float32), dense)
    first, second = logits_of_ranks(directory, TOKENS, torch.float32, 2)
    assert error(first, dense) < 1.1 * whole
    assert torch.equal(first, second)


@pytest.mark.parametrize("case", REORDERED)
@torch.inference_mode()
def test_reordered_columns_are_refused(case: str, tmp_path: Path) -> None:
    config, make = WEIGHT_ONLY[case]
    directory = make_llama(tmp_path / "model", **SHAPE)
    made.quantize(directory, config, make)
    with pytest.raises(CheckpointError, match=r"o_proj\.\w*g_idx .* must not be reordered"):
        logits_of_ranks(directory, TOKENS, torch.float32, 2)


def test_codes_that_have_no_rows_are_refused_and_those_quantized_at_load_are_cut(tmp_path: Path) -> None:
    directory = make_llama(tmp_path / "model", **SHAPE)
    with torch.inference_mode():
        whole = logits_of(directory, TOKENS, torch.float32, "bitsandbytes")
        first, _ = logits_of_ranks(directory, TOKENS, torch.float32, 2, "bitsandbytes")
    assert float((first - whole).abs().max() / whole.abs().max()) < 1e-5
    made.quantize(directory, *WEIGHT_ONLY[FLAT])
    with pytest.raises(CheckpointError, match=r"q_proj\.weight .* cannot be divided"):
        logits_of_ranks(directory, TOKENS, torch.float32, 2)


@pytest.mark.parametrize("case", [case for case in WEIGHT_ONLY if case not in (*REORDERED, FLAT)])
@torch.inference_mode()
def test_ranks_have_whole_experts_in_every_form(case: str, tmp_path: Path) -> None:
    config, make = WEIGHT_ONLY[case]
    if "ignore" in config:
        config = config | {"ignore": [*config["ignore"], "re:.*gate$"]}  # as llm-compressor's recipes do
    directory = make_tiny(tmp_path / "model", **EXPERTS)
    made.quantize(directory, config, make)
    whole = logits_of(directory, TOKENS, torch.float32)
    first, second = logits_of_ranks(directory, TOKENS, torch.float32, 2, ep=2)
    assert float((first - whole).abs().max() / whole.abs().max()) < 1e-5
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("case", "dense"),
    [
        (REORDERED[1], {"ignore": ["re:.*self_attn", "re:.*gate$", "lm_head"]}),
        (FLAT, {"llm_int8_skip_modules": ["self_attn"]}),
    ],
)
@torch.inference_mode()
def test_whole_experts_may_be_what_cannot_be_divided(case: str, dense: dict[str, Any], tmp_path: Path) -> None:
    config, make = WEIGHT_ONLY[case][0] | dense, WEIGHT_ONLY[case][1]
    directory = make_tiny(tmp_path / "model", **EXPERTS)
    made.quantize(directory, config, make, lambda name: ".experts." in name)
    whole = logits_of(directory, TOKENS, torch.float32)
    first, second = logits_of_ranks(directory, TOKENS, torch.float32, 2, ep=2)
    assert float((first - whole).abs().max() / whole.abs().max()) < 1e-5
    assert torch.equal(first, second)
    with pytest.raises(CheckpointError, match=r"experts.* cannot be divided"):
        logits_of_ranks(directory, TOKENS, torch.float32, 2)


@torch.inference_mode()
def test_groups_that_ranks_would_cut_are_refused(tmp_path: Path) -> None:
    config, make = WEIGHT_ONLY["compressed"]  # groups of 128
    directory = make_llama(tmp_path / "model", **SHAPE)
    made.quantize(directory, config, make)
    with pytest.raises(CheckpointError, match="128"):
        logits_of_ranks(directory, TOKENS, torch.float32, 4)
