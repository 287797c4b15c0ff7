"""mxfp4 experts in the layout for Hopper: what words and scales stand for, and products by all configs on a card."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.compute.kernels.activations import Activation
from quire.compute.kernels.reference import experts as reference
from quire.compute.kernels.reference.experts import ExpertBiases, one_of, stack_weights
from quire.compute.kernels.reference.linear import CodebookWeight
from quire.compute.kernels.triton.experts.experts import (
    PACKED,
    PACKED_IN_PAIRS,
    PackedConfigs,
    coded_experts,
    pack_coded_experts,
    packed_configs,
)
from quire.compute.kernels.triton.experts.mxfp4_few import FewConfig, mxfp4_few
from quire.compute.kernels.triton.experts.mxfp4_layout import PackedExperts, can_be_packed, gather_rows, pack_mxfp4
from quire.compute.kernels.triton.experts.mxfp4_many import ManyConfig, mxfp4_many
from tests.kernels.triton.experts.test_expert_adapters import adapters_of
from tests.kernels.triton.experts.test_experts import TERMS, biases_of, mixture
from tests.kernels.triton.linear.coded_weights import CODED

CHOSEN, HIDDEN, WIDTH = 4, 192, 256
CONFIGS: list[PackedConfigs] = [
    PACKED_IN_PAIRS,
    (FewConfig(0, 2, 1, 2), FewConfig(0, 1, 8, 1)),
    *(configs for _, configs in PACKED),
    (FewConfig(16, 1, 2, 2), FewConfig(16, 2, 4, 1)),
    (ManyConfig(16, 2, 2), ManyConfig(16, 1, 3)),
]


def stack(experts: int, rows: int, columns: int, seed: int, device: str) -> CodebookWeight:
    weight = stack_weights(experts, lambda number: CODED["mxfp4"](rows, columns, seed + number, device))
    assert isinstance(weight, CodebookWeight)
    return weight


def values_of(packed: PackedExperts, expert: int) -> Tensor:
    """[rows, columns] fp64, by the definition of the layout."""
    values = torch.empty((packed.rows, packed.columns), dtype=torch.float64)
    words, scales = (each[expert].cpu().numpy().view("uint32") for each in (packed.words, packed.scales))
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    bits = ((15, 6), (9, 0), (11, 12), (10, 3))  # of each code, where its sign is and where its magnitude begins
    row, lane, run, s = (torch.arange(128) // n % most for n, most in ((16, 8), (4, 4), (2, 2), (1, 2)))
    for strip in range(packed.rows // 16):
        for unit in range(packed.columns // 64):
            own = torch.from_numpy(words[strip, unit].astype("int64"))
            exponents = torch.from_numpy(scales[strip, unit].view("uint8").astype("int64")).view(8, 2, 2)
            for code in range(8):
                column_bit, half, e = code // 4, code // 2 % 2, code % 2
                sign, first = bits[2 * column_bit + half]
                part = own >> (16 * e)
                value = magnitudes[part >> first & 7] * (1 - 2 * (part >> sign & 1))
                exponent = exponents[row, run, half] - 63 - 127
                column = unit * 64 + run * 32 + lane * 8 + s * 4 + column_bit * 2 + e
                to = strip * 8 + row + half * (packed.rows // 2) if packed.gated else strip * 16 + half * 8 + row
                values[to, column] = value.double() * exponent.double().exp2()
    return values


@pytest.mark.parametrize("gated", [False, True])
def test_words_and_scales_are_those_of_the_weight(gated: bool, device: str) -> None:
    weight = stack(2, 128, 192, 5, device)
    packed = pack_mxfp4(weight, gated)
    for number in range(2):
        assert torch.equal(values_of(packed, number), one_of(weight, number).dense().cpu().double())


def test_shapes_that_tiles_do_not_divide_are_not_packed(device: str) -> None:
    assert can_be_packed(stack(1, 64, 64, 1, device))
    for rows, columns in ((48, 64), (64, 96)):
        weight = stack(1, rows, columns, 1, device)
        assert not can_be_packed(weight)
        assert pack_coded_experts(weight, False, torch.bfloat16) is weight


@pytest.mark.parametrize("pairs", [37, 5000])
def test_rows_are_gathered_in_the_tensor_core_s_order(pairs: int, device: str) -> None:
    order = torch.randperm(pairs).to(device, torch.int32)
    order[pairs // 2] = 1 << 30  # an undefined entry
    x = torch.randn((pairs + 1) // 2, 96, device=device).bfloat16()
    found = gather_rows(x, order, 2)
    own = x[(order % pairs // 2).long()].unflatten(1, (3, 4, 2, 2, 2)).permute(0, 1, 3, 4, 2, 5).flatten(1)
    known = order < pairs
    assert torch.equal(found[known], own[known])


def test_few_tokens_without_adapters_are_not_grouped() -> None:
    assert packed_configs(1, 4, 32, adapted=False) == PACKED_IN_PAIRS
    assert packed_configs(1, 3, 32, adapted=False) == packed_configs(1, 4, 32, adapted=True) == PACKED[0][1]
    assert packed_configs(8192, 4, 32, adapted=False) == PACKED[-1][1]


@pytest.mark.gpu
@pytest.mark.parametrize(("term", "others"), [(TERMS[0], 0), (TERMS[2], 3)], ids=["plain", "biases, others"])
@pytest.mark.parametrize("configs", CONFIGS, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 70, 600])
def test_every_config_on_a_card(
    tokens: int, configs: PackedConfigs, term: Activation, others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else there is in memory, and whichever program ends first."""
    experts, empty = 7, torch.empty
    x, _, _, numbers, weights = mixture(tokens, experts + others, CHOSEN, HIDDEN, WIDTH, torch.bfloat16, "cuda")
    numbers = numbers.clamp(max=experts)
    gate_up, down = stack(experts, 2 * WIDTH, HIDDEN, 1, "cuda"), stack(experts, HIDDEN, WIDTH, 30, "cuda")
    biases = biases_of(experts, HIDDEN, WIDTH, x.dtype, "cuda") if others else None
    packed = pack_mxfp4(gate_up, True), pack_mxfp4(down, False)
    expected = torch.empty(x.shape, device="cuda")
    wide = None if biases is None else ExpertBiases(*(each.float() for each in biases if each is not None))
    terms = {"activation": term, "biases": wide}
    reference.coded_experts(x.float(), gate_up, down, numbers.long(), weights.float(), expected, others, **terms)
    op = mxfp4_few if isinstance(configs[0], FewConfig) else mxfp4_many
    found = [torch.full_like(x, float("nan")) for _ in range(3)]
    with monkeypatch.context() as patch:
        patch.setattr(
            torch,
            "empty",
            lambda *size, **kind: empty(*size, **kind).fill_(77 if kind["dtype"] == torch.int32 else float("nan")),
        )
        for out in found:
            op(x, *packed, numbers, weights, out, configs, True, others > 0, None, term, biases)  # type: ignore[operator]
    error = (found[0].float() - expected).norm() / expected.norm()
    assert error < 0.01, f"{error:.2e}"
    assert all(torch.equal(out, found[0]) for out in found)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 40, 900])
def test_adapters_on_a_card(tokens: int) -> None:
    experts = 5
    x, _, _, numbers, weights = mixture(tokens, experts, CHOSEN, HIDDEN, WIDTH, torch.bfloat16, "cuda")
    gate_up, down = stack(experts, 2 * WIDTH, HIDDEN, 1, "cuda"), stack(experts, HIDDEN, WIDTH, 30, "cuda")
    adapters = adapters_of(tokens, 16, HIDDEN, WIDTH, x.dtype, "cuda", experts)
    expected, found = torch.empty_like(x), torch.full_like(x, float("nan"))
    reference.coded_experts(x, gate_up, down, numbers.long(), weights, expected, adapters=adapters)
    both = (pack_coded_experts(gate_up, True, x.dtype), pack_coded_experts(down, False, x.dtype))
    assert all(isinstance(each, PackedExperts) for each in both)
    coded_experts(x, *both, numbers, weights, found, adapters=adapters)
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    assert error < 0.02, f"{error:.2e}"
