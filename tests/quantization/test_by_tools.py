"""Checkpoints that other people's tools wrote, beside the logits of the weights that the tool itself makes of them.

Each directory of `by_tools/` is a Llama of one layer, and `expected.safetensors` has tokens and the logits, in fp32, of
transformers with the tool's own reader: compressed-tensors 0.19 (`run_compressed=False`, which rounds activations too)
for what llm-compressor 0.14 wrote; with the weights that compressed-tensors 0.20's `dequantize` makes of fp32 scales
for its AWQ and NVFP4, because that version's reader rounds weights to bf16; with those that GPTQModel 7.6 dequantizes
(`dequantize_weight`, scales in fp32) for its own; and bitsandbytes 0.50's `dequantize_4bit`, or SCB · codes / 127.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.models.forward import logits_of

DIRECTORIES = sorted(path.parent for path in Path(__file__).parent.glob("by_tools/*/expected.safetensors"))
ROUNDING = {"w8a8": 0.04, "fp8": 1e-3}
"""Most relative error, for formats that round activations: int8 has one code more in compressed-tensors."""
WEIGHT_ONLY = 1e-5


@pytest.mark.parametrize("directory", DIRECTORIES, ids=lambda path: path.name)
@torch.inference_mode()
def test_logits_are_those_of_the_tools_own_weights(directory: Path, request: pytest.FixtureRequest) -> None:
    if "fp8" in directory.name:  # C++ does not round activations to fp8, which is 7% of such a model's logits
        request.getfixturevalue("torch_computes")
    expected = load_file(directory / "expected.safetensors")
    ours, theirs = logits_of(directory, expected["tokens"], torch.float32), expected["logits"]
    most = next((most for name, most in ROUNDING.items() if name in directory.name), WEIGHT_ONLY)
    assert torch.linalg.vector_norm(ours - theirs) < most * torch.linalg.vector_norm(theirs)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
