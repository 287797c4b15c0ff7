"""A layer of a GGUF file as a GPU has it, by the GPU's kernels."""

from __future__ import annotations

import pytest
import torch

from quire.kernels import dispatch
from quire.kernels.reference.gguf_blocks import dequantize
from quire.quantization import gguf, gguf_coded
from quire.quantization.formats import GgufFormat
from quire.quantization.scheme import LinearShape
from quire.weights.tensor_options import TensorOptions

pytest.importorskip("gguf")
TYPES = {"q": ("Q4_K", 32, 512), "k": ("Q4_K", 16, 512), "v": ("Q6_K", 16, 512), "w": ("IQ4_NL", 16, 512)}


@pytest.mark.parametrize("tokens", [1, 17])
@pytest.mark.parametrize("names", ["qkvw", "qk"])
def test_modules_of_several_types(names: str, tokens: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.quantization.test_gguf_coded import Blocks

    for module in (gguf, gguf_coded):
        monkeypatch.setattr(module, "kernel", lambda op, _: dispatch.kernel(op, "cuda"))
    checkpoint = Blocks({name: TYPES[name] for name in names})
    shape = LinearShape(tuple(names), tuple(TYPES[name][1] for name in names), 512)
    form = GgufFormat((("Q4_K", 2), ("Q6_K", 1), ("IQ4_NL", 1)))
    weight = gguf.GgufLinearWeight(form, shape, TensorOptions(torch.device(device), torch.bfloat16))
    weight._block_part = gguf_coded.CodedPart
    weight.load(checkpoint)
    x = torch.randn(tokens, 512, device=device).bfloat16()
    bias = torch.randn(shape.outputs, device=device).bfloat16()
    dense = torch.cat([dequantize(checkpoint.blocks[f"{name}.weight"], TYPES[name][0]) for name in names]).to(device)
    expected = x.double() @ dense.double().T + bias.double()
    close(weight.multiply(x, bias), expected)
    gate, up = expected.chunk(2, dim=1)
    close(weight.multiply_silu_and_mul(x, bias), torch.nn.functional.silu(gate) * up)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found.double() - expected).abs().max() < 2e-2 * expected.abs().max()
