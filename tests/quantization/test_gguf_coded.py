"""GGUF's types in the form that a GPU keeps them in: the same weights, as small as it is said."""

from __future__ import annotations

import pytest
import torch

from quire.compute.gguf.tensor_types import QUANTIZED
from quire.compute.kernels.reference.gguf_blocks import dequantize
from quire.models.quantization.formats import GgufFormat
from quire.models.quantization.gguf_coded import CodedPart, GgufExperts, coded_weight, read_coded
from quire.models.quantization.scheme import ExpertNames, ExpertsShape, LinearShape
from quire.models.weights.checkpoint import StoredTensor
from quire.models.weights.tensor_options import TensorOptions

made = pytest.importorskip("tests.gguf.made", reason="needs the gguf package")
CPU = torch.device("cpu")
OPTIONS = TensorOptions(CPU, torch.float32)


class Blocks:
    """A checkpoint of random blocks, by the names of modules."""

    def __init__(self, modules: dict[str, tuple[str, int, int]]) -> None:
        self.types = {f"{module}.weight": name for module, (name, _, _) in modules.items()}
        self.blocks = {
            f"{module}.weight": torch.from_numpy(made.random_blocks(name, rows, columns))
            for module, (name, rows, columns) in modules.items()
        }

    def contents(self) -> dict[str, StoredTensor]:
        return {name: StoredTensor(tuple(blocks.shape), self.types[name]) for name, blocks in self.blocks.items()}

    def read(self, name: str, out: torch.Tensor, start: object = None) -> None:
        if (blocks := self.blocks.get(name)) is None:
            return
        out.copy_(blocks if out.dtype == torch.uint8 else dequantize(blocks, self.types[name]))

    def close(self) -> None: ...


@pytest.mark.parametrize("name", QUANTIZED)
def test_no_weight_is_less_exact_than_in_bf16(name: str) -> None:
    """Those without a minimum are exact."""
    blocks = torch.from_numpy(made.random_blocks(name, 16, 1024))
    expected, weight = dequantize(blocks, name), coded_weight(blocks, name)
    error = torch.linalg.vector_norm(weight.dense() - expected)
    rounding = torch.linalg.vector_norm(expected.bfloat16().float() - expected)
    assert error < 0.5 * rounding
    if not QUANTIZED[name].has_minimum:
        assert error < 1e-6 * torch.linalg.vector_norm(expected)
    held = sum(part.nbytes for part in weight[:3] if isinstance(part, torch.Tensor))
    assert held == QUANTIZED[name].coded_bytes(16, 1024) < 0.7 * 2 * 16 * 1024


def test_groups_that_are_nothing_but_their_minimum() -> None:
    """Scales of 0, or much smaller than the minimum, have no zero that fp16 could say."""
    block = torch.zeros(1, 3 * QUANTIZED["Q4_1"].block_bytes, dtype=torch.uint8).view(3, -1)
    block[:, 4:] = 0x73
    halves = torch.tensor([[0.0, -0.5], [1e-7, 2.0], [0.0, 0.0]], dtype=torch.float16)
    block[:, :4] = halves.view(torch.uint8)
    weight = coded_weight(block.view(1, -1), "Q4_1").dense()
    torch.testing.assert_close(weight, dequantize(block.view(1, -1), "Q4_1"), rtol=1e-3, atol=0)


def test_a_layer_of_several_modules() -> None:
    checkpoint = Blocks({"a": ("Q4_K", 32, 256), "b": ("Q4_K", 8, 256)})
    weight = read_coded(LinearShape(("a", "b"), (32, 8), 256), "Q4_K", checkpoint, CPU)
    expected = torch.cat([dequantize(blocks, "Q4_K") for blocks in checkpoint.blocks.values()])
    assert torch.linalg.vector_norm(weight.dense() - expected) < 1e-3 * torch.linalg.vector_norm(expected)


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0", "IQ4_XS"])
def test_what_the_compile_warm_up_launches_is_what_steps_launch(name: str) -> None:
    shape = LinearShape(("a",), (16,), 512)
    parts = []
    for checkpoint in (Blocks({"a": (name, 16, 512)}), Blocks({})):
        part = CodedPart(shape, name, OPTIONS)
        part.load(checkpoint)
        parts.append(part._weight)
    for real, empty in zip(*parts, strict=True):
        if isinstance(real, torch.Tensor):
            assert isinstance(empty, torch.Tensor)
            assert (real.shape, real.dtype) == (empty.shape, empty.dtype)
        else:
            assert real == empty


@pytest.mark.parametrize(("gates", "stacked"), [(("Q4_K", "Q4_K"), True), (("Q4_K", "Q5_K"), False)])
def test_experts(gates: tuple[str, str], stacked: bool) -> None:
    shape = ExpertsShape("e", ExpertNames(), count=2, hidden=256, width=256)
    modules = {
        f"e.{number}.{projection}": (name, 256, 256)
        for number in range(2)
        for projection, name in zip(("gate_proj", "up_proj", "down_proj"), (*gates, "Q6_K"), strict=True)
    }
    checkpoint = Blocks(modules)
    experts = GgufExperts(GgufFormat((("Q4_K", 4), ("Q5_K", 2))), shape, OPTIONS)
    experts.load(checkpoint)
    assert (type(experts._ways[0]).__name__ == "StackedBlocks") == stacked
    x, numbers, weights = torch.randn(3, 256), torch.tensor([[0], [1], [1]]), torch.ones(3, 1)
    found = experts.multiply(x, numbers, weights)
    w = {name: dequantize(blocks, checkpoint.types[name]) for name, blocks in checkpoint.blocks.items()}
    for row, number in enumerate(numbers[:, 0].tolist()):
        gate, up, down = (w[f"e.{number}.{name}.weight"] for name in ("gate_proj", "up_proj", "down_proj"))
        expected = (torch.nn.functional.silu(x[row] @ gate.T) * (x[row] @ up.T)) @ down.T
        assert torch.linalg.vector_norm(found[row] - expected) < 2e-3 * torch.linalg.vector_norm(expected)
    experts.load(Blocks({}))
    assert len(experts._ways) == 3
