"""Checkpoints that other people's tools wrote, beside the logits of the weights that the tool itself makes of them.

Each directory of `by_tools/` is a Llama of one layer, and `expected.safetensors` has tokens and the logits, in fp32, of
transformers with the tool's own reader: compressed-tensors 0.19 (`run_compressed=False`, which rounds activations too)
for what llm-compressor 0.14 wrote; or with the weights that GPTQModel 7.6 dequantizes (`dequantize_weight`, scales in
fp32) for its own.
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
def test_logits_are_those_of_the_tools_own_weights(directory: Path) -> None:
    expected = load_file(directory / "expected.safetensors")
    ours, theirs = logits_of(directory, expected["tokens"], torch.float32), expected["logits"]
    most = next((most for name, most in ROUNDING.items() if name in directory.name), WEIGHT_ONLY)
    assert torch.linalg.vector_norm(ours - theirs) < most * torch.linalg.vector_norm(theirs)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
