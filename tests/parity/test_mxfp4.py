"""gpt-oss's experts in mxfp4, as it is published, against transformers on the weights that the codes stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import LLM
from quire.models.spec import read_spec
from tests.checkpoints import edit_config, make_tiny
from tests.parity.oracle import Oracle
from tests.parity.test_architectures import GREEDY, SETTINGS, assert_greedy, prompts

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
QUANTIZATION = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def to_blocks(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks [experts, rows, groups, 16] and scales [experts, rows, groups] of a weight [experts, rows, columns], and
    what they stand for."""
    groups = weight.unflatten(-1, (-1, 32))
    exponents = (groups.abs().amax(-1) / 6).log2().ceil()
    scaled = groups / exponents.exp2().unsqueeze(-1)
    codes = (scaled.abs().unsqueeze(-1) - VALUES).abs().argmin(-1)
    meant = VALUES[codes] * scaled.sign() * exponents.exp2().unsqueeze(-1)
    codes = (codes + 8 * (scaled < 0)).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8), meant.flatten(-2)


def checkpoints(directory: Path, **changes: int) -> tuple[Path, Path]:
    """A checkpoint in mxfp4, and one of the weights that it stands for."""
    shape = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_local_experts": 4} | changes
    limits = {"num_experts_per_tok": 2, "sliding_window": 8, "swiglu_limit": 0.6, "num_hidden_layers": 2}
    dense = make_tiny(directory / "dense", "GptOssForCausalLM", **shape, **limits)  # type: ignore[arg-type]
    coded = make_tiny(directory / "coded", "GptOssForCausalLM", **shape, **limits)  # type: ignore[arg-type]
    weights = load_file(dense / "model.safetensors")
    blocks = dict(weights)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        codes, scales, meant = to_blocks(weights[name].transpose(1, 2))
        del blocks[name]
        blocks |= {f"{name}_blocks": codes.contiguous(), f"{name}_scales": scales}
        weights[name] = meant.transpose(1, 2).contiguous()
    save_file(weights, dense / "model.safetensors", {"format": "pt"})
    save_file(blocks, coded / "model.safetensors", {"format": "pt"})
    edit_config(coded, {"quantization_config": QUANTIZATION})
    return coded, dense


def test_parity_of_mxfp4(tmp_path: Path) -> None:
    coded, dense = checkpoints(tmp_path)
    reference, batch = Oracle(dense), prompts()
    with LLM(str(coded), max_num_batched_tokens=40, **SETTINGS) as llm:
        for prompt, output in zip(batch, llm.generate(batch, GREEDY), strict=True):
            assert_greedy(reference, prompt, output.outputs[0])


def test_memory_is_what_the_codes_take(tmp_path: Path) -> None:
    coded, dense = checkpoints(tmp_path)
    data = (coded / "model.safetensors").read_bytes()
    spec, size = read_spec(coded), len(data) - 8 - int.from_bytes(data[:8], "little")
    assert spec.weight_bytes("float32") == pytest.approx(size, rel=1e-3)
    assert spec.num_parameters == read_spec(dense).num_parameters
