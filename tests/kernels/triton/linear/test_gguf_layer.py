"""Layers of a GGUF file as a GPU has them, by the GPU's kernels."""

from __future__ import annotations

import pytest
import torch

from quire.compute.kernels import dispatch
from quire.compute.kernels.reference.gguf_blocks import dequantize
from quire.models.quantization import dense, gguf, gguf_coded, kernel_experts
from quire.models.quantization.formats import GgufFormat
from quire.models.quantization.scheme import ExpertNames, ExpertsShape, LinearShape
from quire.models.weights.tensor_options import TensorOptions
from tests.kernels.triton.experts.test_expert_adapters import adapters_of, exact
from tests.kernels.triton.experts.test_experts import mixture

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
    whole = torch.cat([dequantize(checkpoint.blocks[f"{name}.weight"], TYPES[name][0]) for name in names]).to(device)
    expected = x.double() @ whole.double().T + bias.double()
    close(weight.multiply(x, bias), expected)
    gate, up = expected.chunk(2, dim=1)
    close(weight.multiply_silu_and_mul(x, bias), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("types", [("Q4_K", "Q4_K", "Q6_K"), ("IQ4_NL", "IQ4_NL", "Q5_1"), ("Q4_K", "Q5_K", "Q6_K")])
def test_experts_with_adapters(types: tuple[str, str, str], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept as codes, or dense where gates are of another type than ups."""
    from tests.quantization.test_gguf_coded import Blocks

    for module in (dense, gguf_coded, kernel_experts):
        monkeypatch.setattr(module, "kernel", lambda op, _: dispatch.kernel(op, "cuda"))
    count, size = 3, 256
    shape, projections = ExpertsShape("e", ExpertNames(), count, size, size), ("gate_proj", "up_proj", "down_proj")
    checkpoint = Blocks({
        f"e.{number}.{projection}": (name, size, size)
        for number in range(count)
        for projection, name in zip(projections, types, strict=True)
    })  # fmt: skip
    form = GgufFormat(tuple((name, 1) for name in sorted(set(types))))
    experts = gguf_coded.GgufExperts(form, shape, TensorOptions(torch.device(device), torch.bfloat16))
    experts.load(checkpoint)
    weights = {name: dequantize(blocks, checkpoint.types[name]) for name, blocks in checkpoint.blocks.items()}
    gate, up, down = (
        torch.stack([weights[f"e.{number}.{projection}.weight"] for number in range(count)]).to(device)
        for projection in projections
    )
    x, _, _, numbers, shares = mixture(9, count, 2, size, size, torch.bfloat16, device)
    adapters = adapters_of(9, 16, size, size, torch.bfloat16, device, count)
    expected = exact(x, torch.cat((gate, up), 1), down, numbers, shares, adapters)
    close(experts.multiply_adapted(x, numbers, shares, adapters), expected)
    without = adapters.slots == 0
    close(experts.multiply(x, numbers, shares)[without], expected[without])


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found.double() - expected).abs().max() < 2e-2 * expected.abs().max()
