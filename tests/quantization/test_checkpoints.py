"""Quantized checkpoints: their logits are those of the dense weights that their tensors stand for, in transformers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.compute.kernels.reference.quantized_rows import QuantizedRows, Rows
from quire.errors import CheckpointError
from quire.models.quantization.scaled import ScaledLinearWeight
from quire.models.quantization.scheme import RowForm
from tests.checkpoints import make_llama
from tests.models.forward import logits_of
from tests.quantization import made

TOKENS = torch.randint(3, 320, (60,), generator=torch.Generator().manual_seed(4))
SHAPE: dict[str, Any] = {"hidden": 128, "intermediate": 256, "layers": 2, "tokenizer": False}


def packed(bits: int, group: int | None, symmetric: bool, actorder: str | None = None) -> dict[str, Any]:
    """compressed-tensors' description."""
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group" if group else "channel",
        "group_size": group,
        "actorder": actorder,
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": groups,
        "ignore": ["lm_head"],
    }


def gptq(bits: int, group: int, symmetric: bool, desc_act: bool = False, form: str = "gptq") -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": symmetric,
        "desc_act": desc_act,
        "checkpoint_format": form,
    }


def bitsandbytes(**config: Any) -> dict[str, Any]:
    return {"quant_method": "bitsandbytes", **config}


def floats(kind: str, group: int) -> dict[str, Any]:
    """compressed-tensors' description of 4-bit floats; NVFP4's activations are quantized as well."""
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": group, "symmetric": True}
    inputs = weights | {"dynamic": "local"} if kind == "nvfp4" else None
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-pack-quantized",
        "config_groups": groups,
        "ignore": ["lm_head"],
    }


QUARK: dict[str, Any] = {
    "quant_method": "quark",
    "global_quant_config": {
        "weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"},
        "input_tensors": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "is_dynamic": True},
    },
    "exclude": ["*lm_head"],
}


WEIGHT_ONLY: dict[str, tuple[dict[str, Any], Any]] = {
    "gptq": (gptq(4, 32, True), partial(made.gptq, bits=4, group=32, symmetric=True)),
    "gptq, zeros": (gptq(4, 64, False), partial(made.gptq, bits=4, group=64, symmetric=False)),
    "gptq, act-order": (gptq(4, 32, True, True), partial(made.gptq, bits=4, group=32, symmetric=True, reordered=True)),
    "gptq, one group": (gptq(4, -1, True, True), partial(made.gptq, bits=4, group=None, symmetric=True)),
    "gptq v2, 8 bits": (
        gptq(8, 128, False, form="gptq_v2"),
        partial(made.gptq, bits=8, group=128, symmetric=False, version=2),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"},
        partial(made.awq, group=64, symmetric=False),
    ),
    "compressed": (packed(4, 128, True), partial(made.compressed, bits=4, group=128, symmetric=True)),
    "compressed, zeros": (packed(4, 32, False), partial(made.compressed, bits=4, group=32, symmetric=False)),
    "compressed, channels": (packed(8, None, True), partial(made.compressed, bits=8, group=None, symmetric=True)),
    "bitsandbytes nf4": (bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"), made.bitsandbytes),
    "bitsandbytes int8": (bitsandbytes(load_in_8bit=True), made.bitsandbytes_int8),
    "mxfp4, compressed": (floats("mxfp4", 32), made.microscaled),
    "mxfp4, quark": (QUARK, partial(made.microscaled, codes_name="weight")),
    "nvfp4, compressed": (floats("nvfp4", 16), partial(made.nvfp4, tool="compressed-tensors")),
    "nvfp4, modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, partial(made.nvfp4, tool="modelopt")),
    "compressed, act-order": (
        packed(4, 32, False, "group"),
        partial(made.compressed, bits=4, group=32, symmetric=False, reordered=True),
    ),
}


def compressed_8_bits(kind: str, strategy: str) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": strategy}
    inputs = {"num_bits": 8, "type": kind, "strategy": "token", "dynamic": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "config_groups": groups,
        "ignore": ["lm_head"],
    }


WITH_ACTIVATIONS: dict[str, tuple[dict[str, Any], Any]] = {
    "fp8, tensor": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, partial(made.scaled, scales="tensor")),
    "fp8, blocks": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        partial(made.scaled, scales="block", name="weight_scale_inv"),
    ),
    "fp8, channels": (compressed_8_bits("float", "channel"), partial(made.scaled, scales="channel")),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, partial(made.scaled, scales="tensor")),
    "int8, channels": (
        compressed_8_bits("int", "channel"),
        partial(made.scaled, scales="channel", dtype=torch.int8),
    ),
}


def error(ours: torch.Tensor, directory: Path, tokens: torch.Tensor = TOKENS) -> float:
    """Beside transformers' logits of the dense equal."""
    from transformers import AutoModelForCausalLM

    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        theirs = model(tokens.unsqueeze(0)).logits[0]
    return float(torch.linalg.vector_norm(ours - theirs) / torch.linalg.vector_norm(theirs))


@pytest.mark.parametrize("case", WEIGHT_ONLY)
@torch.inference_mode()
def test_weight_only_formats_are_their_dense_weights(case: str, tmp_path: Path) -> None:
    config, make = WEIGHT_ONLY[case]
    directory = make_llama(tmp_path / "model", **SHAPE)
    dense = made.quantize(directory, config, make)
    assert error(logits_of(directory, TOKENS, torch.float32), dense) < 1e-5


@pytest.mark.parametrize("case", WITH_ACTIVATIONS)
@torch.inference_mode()
def test_formats_with_activations_are_within_their_rounding(case: str, tmp_path: Path) -> None:
    config, make = WITH_ACTIVATIONS[case]
    directory = make_llama(tmp_path / "model", **SHAPE, std=0.05)
    dense = made.quantize(directory, config, make)
    assert error(logits_of(directory, TOKENS, torch.float32), dense) < (0.02 if "int8" in case else 0.06)


@pytest.mark.parametrize("case", ["fp8, channels", "int8, channels"])
@torch.inference_mode()
def test_rows_may_be_quantized_by_the_norms_in_front_of_products(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch_computes: None
) -> None:
    """As on a GPU, whose products quantize dense rows in the same way; C++ leaves them as they are. A single
    row may be wanted dense; every norm in front of a product quantizes all others."""
    config, make = WITH_ACTIVATIONS[case]
    directory = make_llama(tmp_path / "model", **SHAPE)
    made.quantize(directory, config, make)
    expected = logits_of(directory, TOKENS, torch.float32)
    given = []

    def row_form(weight: ScaledLinearWeight) -> RowForm:
        return RowForm(torch.int8 if case.startswith("int8") else torch.float8_e4m3fn, dense_up_to=1)

    def multiply(weight: ScaledLinearWeight, x: Rows, bias: torch.Tensor | None) -> torch.Tensor:
        given.append(type(x))
        return plain(weight, x, bias)

    plain = ScaledLinearWeight.multiply
    monkeypatch.setattr(ScaledLinearWeight, "row_form", property(row_form, lambda weight, form: None), raising=False)
    monkeypatch.setattr(ScaledLinearWeight, "multiply", multiply)
    found = logits_of(directory, TOKENS, torch.float32)
    assert torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected) < 2e-3
    assert given.count(QuantizedRows) == SHAPE["layers"]  # queries, keys and values of each layer
    given.clear()
    logits_of(directory, TOKENS[:1], torch.float32)
    assert QuantizedRows not in given


@torch.inference_mode()
def test_a_dense_checkpoint_is_quantized_at_load(tmp_path: Path) -> None:
    """As one that was quantized by channels before."""
    directory = make_llama(tmp_path / "model", **SHAPE)
    at_load = logits_of(directory, TOKENS, torch.float32, "fp8")
    config, make = WITH_ACTIVATIONS["fp8, channels"]
    made.quantize(directory, config, make)
    before = logits_of(directory, TOKENS, torch.float32)
    assert torch.linalg.vector_norm(at_load - before) / torch.linalg.vector_norm(before) < 1e-3


@torch.inference_mode()
def test_a_dense_checkpoint_becomes_what_bitsandbytes_makes_of_it(tmp_path: Path) -> None:
    directory = make_llama(tmp_path / "model", **SHAPE)
    at_load = logits_of(directory, TOKENS, torch.float32, "bitsandbytes")
    config, make = WEIGHT_ONLY["bitsandbytes nf4"]
    dense = made.quantize(directory, config, make)
    assert torch.equal(at_load, logits_of(directory, TOKENS, torch.float32))
    assert error(at_load, dense) < 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 3}, "3 bits"),
        ({"group_size": 48}, "groups of 48"),
        ({"dynamic": {"-:.*": {}}}, "dynamic"),
        ({"bits": None}, "None bits"),
        ({"quant_method": "aqlm"}, "aqlm.*not supported"),
        ({"quant_method": "bitsandbytes"}, "neither load_in_4bit nor load_in_8bit"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "af4"}, "af4.*nf4 and fp4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"}, "stored as bf"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "W4A8_AWQ.*FP8 and NVFP4"),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}}, "Quark's fp8_e4m3"),
        ({"quant_method": "torchao"}, "torchao.*not supported"),
        ({"quant_method": "awq", "version": "gemv"}, "gemv"),
    ],
)
def test_what_is_not_served_is_refused_by_name(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    directory = make_llama(tmp_path / "model", **SHAPE)
    made.quantize(directory, gptq(4, 32, True) | change, WEIGHT_ONLY["gptq"][1])
    with pytest.raises(CheckpointError, match=message) as refused:
        logits_of(directory, TOKENS, torch.float32)
    assert "bf16 checkpoint" in refused.value.message


@torch.inference_mode()
def test_modules_may_have_formats_of_their_own(tmp_path: Path) -> None:
    directory = make_llama(tmp_path / "model", **SHAPE)
    names = [f"model.layers.{layer}.mlp.{part}_proj" for layer in range(2) for part in ("gate", "up", "down")]
    layers = {name: {"quant_algo": "W4A16_NVFP4", "group_size": 16} for name in names}
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    dense = made.quantize(directory, config, partial(made.nvfp4, tool="modelopt"), lambda name: "mlp" in name)
    assert error(logits_of(directory, TOKENS, torch.float32), dense) < 1e-5


def test_stacked_modules_that_are_not_quantized_alike_are_refused(tmp_path: Path) -> None:
    directory = make_llama(tmp_path / "model", **SHAPE)
    config = gptq(4, 32, True) | {"modules_to_not_convert": ["k_proj"]}
    made.quantize(directory, config, WEIGHT_ONLY["gptq"][1], lambda name: "k_proj" not in name)
    with pytest.raises(CheckpointError, match="not quantized alike"):
        logits_of(directory, TOKENS, torch.float32)


@torch.inference_mode()
def test_ignored_modules_are_dense(tmp_path: Path) -> None:
    directory = make_llama(tmp_path / "model", **SHAPE)
    config, make = WEIGHT_ONLY["compressed"]
    config = config | {"ignore": ["lm_head", "re:.*down_proj", "model.layers.1.self_attn.o_proj"]}
    kept = ("down_proj", "layers.1.self_attn.o_proj")
    dense = made.quantize(directory, config, make, lambda name: not name.endswith(kept))
    assert error(logits_of(directory, TOKENS, torch.float32), dense) < 1e-5


def test_scales_that_are_missing_are_named(tmp_path: Path) -> None:
    directory = make_llama(tmp_path / "model", **SHAPE)
    config, make = WEIGHT_ONLY["awq"]
    made.quantize(directory, config, make)
    stored = load_file(directory / "model.safetensors")
    del stored["model.layers.0.mlp.up_proj.scales"]
    stored["model.layers.1.mlp.up_proj.qweight"] = stored["model.layers.1.mlp.up_proj.qweight"].float()
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError) as refused:
        logits_of(directory, TOKENS, torch.float32)
    assert "model.layers.0.mlp.up_proj.scales: missing" in refused.value.message
    assert "model.layers.1.mlp.up_proj.qweight: dtype F32 is not one of I32" in refused.value.message
