"""What adapters add to products of experts: pairs in groups, B A x of them, and whole mixtures, against fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference import experts as reference
from quire.compute.kernels.reference.experts import Coded, ExpertAdapters, StackedLowRank, stack_weights
from quire.compute.kernels.reference.linear import ScaledWeight
from quire.compute.kernels.routing import Routing
from quire.compute.kernels.triton.experts import expert_adapters as ours
from quire.compute.kernels.triton.experts.expert_gemms import ExpertConfigs
from quire.compute.kernels.triton.experts.experts import (
    coded_experts,
    experts,
    experts_with_configs,
    scaled_configs,
)
from quire.compute.kernels.triton.experts.routing import group_by_adapter
from quire.compute.kernels.triton.launching.device_properties import program_memory
from quire.compute.kernels.triton.linear.gemm import GemmConfig
from quire.compute.kernels.triton.linear.gemv import GemvConfig
from tests.kernels.triton.experts.expected import close_in_codes, quantized, update
from tests.kernels.triton.experts.test_coded_experts import dense
from tests.kernels.triton.experts.test_experts import ALL, NEAR, WAYS, close, mixture
from tests.kernels.triton.linear.coded_weights import CODED

SLOTS, EXPERTS = 3, 5
Empty = Callable[..., Tensor]


def stacked(
    modules: int, rank: int, columns: int, outputs: int, dtype: torch.dtype, device: str, experts: int = EXPERTS
) -> StackedLowRank:
    """Adapters side by side in one memory, as on a device, with other products between those of two experts. The second
    slot leaves the first expert alone, and the others have ranks that are not in use."""
    a_size, b_size = modules * rank * columns, outputs * rank
    memory = torch.randn(SLOTS, 32 + experts * (a_size + b_size + 48), device=device).to(dtype)
    apart = memory[:, 32:].view(SLOTS, experts, -1)
    a = apart[:, :, :a_size].unflatten(2, (modules * rank, columns))
    b = apart[:, :, a_size : a_size + b_size].unflatten(2, (outputs, rank))
    a /= columns**0.5
    b /= 4
    ranks = torch.zeros(SLOTS, 2, 2 * experts + 1, dtype=torch.int64, device=device)
    own = ranks[:, 0, 1::2]
    for slot in range(SLOTS):
        for number in range(experts):
            own[slot, number] = used = 0 if (slot, number) == (1, 0) else max(1, rank - 7 * slot - number)
            a[slot, number].view(modules, rank, columns)[:, used:] = 0
            b[slot, number, :, used:] = 0
    return StackedLowRank(a, b, own)


def adapters_of(
    tokens: int, rank: int, hidden: int, width: int, dtype: torch.dtype, device: str, experts: int = EXPERTS
) -> ExpertAdapters:
    """The first token and each fourth one has none."""
    slots = torch.arange(tokens, device=device) % (SLOTS + 1)
    gate_up = stacked(2, rank, hidden, 2 * width, dtype, device, experts)
    return ExpertAdapters(slots, gate_up, stacked(1, rank, width, hidden, dtype, device, experts))


def exact(
    x: Tensor, gate_up: Tensor, down: Tensor, numbers: Tensor, weights: Tensor, adapters: ExpertAdapters
) -> Tensor:
    """In fp64, pair by pair, with B A in the weights."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, slot in enumerate(adapters.slots.tolist()):
        for number, weight in zip(numbers[token].tolist(), weights[token].tolist(), strict=True):
            if number >= len(down):
                continue
            first, second = gate_up[number].double(), down[number].double()
            if slot:
                first = first + update(adapters.gate_up, slot, number)
                second = second + update(adapters.down, slot, number)
            gate, up = (first @ x[token].double()).chunk(2)
            out[token] += weight * (second @ (F.silu(gate) * up))
    return out


def close_to_codes(
    found: Tensor,
    x: Tensor,
    gate_up: Coded,
    down: Coded,
    numbers: Tensor,
    weights: Tensor,
    adapters: ExpertAdapters,
    others: int = 0,
) -> None:
    """To what the op makes of codes of 8 bits; also alone where there is no adapter, as adapters add more than that."""
    assert isinstance(gate_up, ScaledWeight)
    assert isinstance(down, ScaledWeight)
    sizes = (len(down.codes) + others, numbers.shape[1], *down.codes.shape[1:])
    block = down.block[1] if down.scales.shape[2] > 1 else None
    configs = scaled_configs(sizes, len(x), down.codes.dtype, block, program_memory(x.device))
    if isinstance(configs[0], GemvConfig):
        close(found, exact(x, dense(gate_up), dense(down), numbers, weights, adapters))
        return
    expected = quantized(x, gate_up, down, numbers, weights, configs, adapters)
    close_in_codes(found, expected)
    plain = adapters.slots == 0
    if plain.any():
        close_in_codes(found[plain], expected[plain])


@pytest.fixture
def other_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel leaves unwritten is whatever was there."""
    empty, new_empty = torch.empty, Tensor.new_empty

    def fill(tensor: Tensor) -> Tensor:
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 77)

    monkeypatch.setattr(torch, "empty", lambda *size, **kind: fill(empty(*size, **kind)))
    monkeypatch.setattr(Tensor, "new_empty", lambda *of, **kind: fill(new_empty(*of, **kind)))


@pytest.mark.usefixtures("other_memory")
@pytest.mark.parametrize(
    ("tokens", "here", "chosen", "tile"), [(1, 6, 2, 16), (17, 6, 3, 16), (70, 2, 3, 16), (129, 6, 4, 32)]
)
def test_every_adapted_pair_stands_once_in_its_group(
    tokens: int, here: int, chosen: int, tile: int, device: str
) -> None:
    numbers = torch.rand(tokens, 6).topk(chosen).indices.clamp(max=here).to(device, torch.int32)
    for slots in (
        torch.randint(0, SLOTS + 1, (tokens,)),
        torch.zeros(tokens, dtype=torch.int64),
        torch.full((tokens,), SLOTS),
    ):
        order, tiles = group_by_adapter(numbers, slots.to(device), here, SLOTS, tile)
        expected = {
            (token * chosen + choice, (slot - 1) * here + number)
            for token, slot in enumerate(slots.tolist())
            for choice, number in enumerate(numbers[token].tolist())
            if slot and number < here
        }
        assert tiles.shape[1] <= tokens * chosen
        found: list[tuple[int, int]] = []
        for group, begin, end in tiles.T.tolist():
            assert begin <= end <= begin + tile
            found += [(pair, group) for pair in order[begin:end].tolist()]
        assert sorted(found) == sorted(expected)
        order_of_tiles = [group for group, begin, end in tiles.T.tolist() if begin < end]
        assert order_of_tiles == sorted(order_of_tiles)


@pytest.mark.usefixtures("other_memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "modules", "rank", "columns", "outputs"),
    [
        (1, 2, 16, 80, 96),
        (7, 1, 32, 1_100, 150),  # several programs share a row
        (70, 2, 48, 64, 64),
        (4, 2, 128, 72, 320),
        (200, 1, 16, 64, 48),  # large tiles
    ],
)
def test_low_rank_products_of_pairs(
    tokens: int, modules: int, rank: int, columns: int, outputs: int, dtype: torch.dtype, device: str
) -> None:
    chosen = 3
    weights = stacked(modules, rank, columns, outputs, dtype, device)
    numbers = torch.rand(tokens, EXPERTS + 1).topk(chosen).indices.to(device, torch.int32)  # the last is elsewhere
    numbers[0, 0] = 0
    slots = torch.randint(0, SLOTS + 1, (tokens,)).to(device)
    slots[0] = 2
    pairs = ours.group_adapted_pairs(numbers, slots, weights)
    assert pairs.size == (64 if tokens == 200 else 16)
    known = reference.group_adapted_pairs(numbers, slots, weights)
    adapted = (known.slots > 0) & (known.numbers < EXPERTS)
    for sharing in (1, chosen):
        x = torch.randn(tokens * chosen // sharing, columns, device=device).to(dtype)
        expected = reference.lora_of_pairs(x, weights, known, sharing)
        found = ours.lora_of_pairs(x, weights, pairs, sharing)
        error = (found[adapted].float() - expected[adapted].float()).abs().max()
        assert error <= NEAR[dtype] * max(1.0, float(expected.float().abs().max()))
        assert not found[0].any()  # its adapter leaves this expert alone
        assert not expected[~adapted].any()


@pytest.mark.usefixtures("other_memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("configs", WAYS)
@pytest.mark.parametrize("others", [0, 2])
def test_products_with_adapters(others: int, configs: ExpertConfigs, dtype: torch.dtype, device: str) -> None:
    """Tokens of three adapters and of none; with experts that are elsewhere, some tokens have none here."""
    x, gate_up, down, numbers, weights = mixture(9, EXPERTS + others, 3, 80, 48, dtype, device)
    if others:
        numbers[1] = torch.tensor([6, 5, 6])
    numbers, gate_up, down = numbers.clamp(max=EXPERTS), gate_up[:EXPERTS], down[:EXPERTS]
    weights = weights.where(numbers < EXPERTS, 0)
    adapters = adapters_of(9, 16, 80, 48, dtype, device)
    out = torch.empty_like(x)
    experts_with_configs(
        x, gate_up, down, numbers, weights, out, configs, overlap=False, others=others, adapters=adapters
    )
    expected = exact(x, gate_up, down, numbers, weights, adapters)
    close(out, expected)
    plain = torch.empty_like(x)
    experts_with_configs(x, gate_up, down, numbers, weights, plain, configs, overlap=False, others=others)
    without = adapters.slots == 0
    assert torch.equal(out[without], plain[without])
    changed = (adapters.slots % 2 > 0) & (numbers < EXPERTS).any(1)  # the second one's may be an expert it leaves alone
    assert changed.any()
    assert (out[changed] != plain[changed]).any(1).all()
    reference.experts(x, gate_up, down, numbers, weights, out, others, adapters)
    close(out, expected)


def test_rows_of_the_base_model_are_the_same_to_the_bit_when_no_row_has_an_adapter(device: str) -> None:
    config = GemmConfig(16, 32, 32, 1, 4, 3, False)
    arguments = mixture(20, EXPERTS, 3, 80, 48, torch.bfloat16, device)
    adapters = adapters_of(20, 16, 80, 48, torch.bfloat16, device)
    found, plain = torch.empty_like(arguments[0]), torch.empty_like(arguments[0])
    none = adapters._replace(slots=torch.zeros_like(adapters.slots))
    experts_with_configs(*arguments, found, (config, config), overlap=False, adapters=none)
    experts_with_configs(*arguments, plain, (config, config), overlap=False)
    assert torch.equal(found, plain)


@pytest.mark.usefixtures("other_memory")
@pytest.mark.parametrize(
    ("tokens", "scheme", "columns"),
    [(9, "nf4, groups of 64", 128), (9, "fp8, blocks", 128), (9, "fp8, blocks", 256), (1, "fp8, blocks", 256)],
)
def test_products_of_codes_with_adapters(tokens: int, scheme: str, columns: int, device: str) -> None:
    count, make = 3, CODED[scheme]
    gate_up = stack_weights(count, lambda number: make(2 * columns, columns, number, device))
    down = stack_weights(count, lambda number: make(columns, columns, 10 + number, device))
    x, _, _, numbers, weights = mixture(tokens, count + 1, 2, columns, columns, torch.bfloat16, device)
    weights = weights.where(numbers < count, 0)
    adapters = adapters_of(tokens, 16, columns, columns, torch.bfloat16, device, count)
    if tokens == 1:
        adapters = adapters._replace(slots=adapters.slots + 1)
    out = torch.empty_like(x)
    coded_experts(x, gate_up, down, numbers, weights, out, 1, adapters)
    expected = exact(x, dense(gate_up), dense(down), numbers, weights, adapters)
    if isinstance(gate_up, ScaledWeight):
        close_to_codes(out, x, gate_up, down, numbers, weights, adapters, 1)
    else:
        close(out, expected)
    reference.coded_experts(x, gate_up, down, numbers, weights, out, 1, adapters)
    close(out, expected)


def test_op_in_fp32(device: str) -> None:
    for tokens in (0, 1, 19):
        arguments = mixture(tokens, EXPERTS, 2, 32, 48, torch.float32, device)
        adapters = adapters_of(tokens, 16, 32, 48, torch.float32, device)
        out = torch.full_like(arguments[0], float("nan"))
        experts(*arguments, out, 0, adapters)
        if tokens:
            close(out, exact(*arguments, adapters))


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 33, 130])
@pytest.mark.parametrize(("measured", "configs"), ALL)
def test_every_choice_on_a_card_with_adapters(
    measured: tuple[int, int, int, int], configs: ExpertConfigs, tokens: int, overlap: bool
) -> None:
    count, chosen, hidden, width = measured
    hidden, width = min(hidden, 1024), min(width, 512)
    arguments = mixture(tokens, count, chosen, hidden, width, torch.bfloat16, "cuda")
    adapters = adapters_of(tokens, 32, hidden, width, torch.bfloat16, "cuda", count)
    adapters = adapters._replace(slots=(adapters.slots + 1) % (SLOTS + 1))
    results = []
    for _ in range(5):
        out = torch.full_like(arguments[0], float("nan"))
        experts_with_configs(*arguments, out, configs, overlap=overlap, adapters=adapters)
        results.append(out)
    close(results[0], exact(*arguments, adapters))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.gpu
@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 40, 300])
def test_layers_with_adapters_in_a_graph(tokens: int, coded: bool) -> None:
    """Each reads what the one before wrote; every replay goes to other experts, and its tokens have other adapters."""
    count, hidden, width, dtype = 16, 256 if coded else 128, 128, torch.bfloat16
    chosen, make = 2, CODED["fp8, blocks"]
    layers: list[tuple[Any, Any]] = [mixture(1, count, chosen, hidden, width, dtype, "cuda")[1:3] for _ in range(4)]
    if coded:
        layers = [
            (
                stack_weights(count, lambda number: make(2 * width, hidden, number, "cuda")),
                stack_weights(count, lambda number: make(hidden, width, 10 + number, "cuda")),
            )
            for _ in layers
        ]
    op = kernel("coded_experts" if coded else "experts", "cuda")
    all_adapters = [adapters_of(tokens, 16, hidden, width, dtype, "cuda", count) for _ in layers]
    routers = [torch.randn(count, hidden, dtype=dtype, device="cuda") / 8 for _ in layers]
    x, weight = torch.empty(tokens, hidden, dtype=dtype, device="cuda"), torch.ones(hidden, dtype=dtype, device="cuda")
    slots = torch.zeros(tokens, dtype=torch.int64, device="cuda")
    seen: list[tuple[Any, ...]] = []

    def run() -> None:
        y = x
        for router, (gate_up, down), own in zip(routers, layers, all_adapters, strict=True):
            normed, out = torch.empty_like(y), torch.empty_like(y)
            kernel("rms_norm", "cuda")(y, weight, 1e-6, normed)
            weights, numbers = kernel("route", "cuda")(F.linear(normed, router), Routing(chosen, True))
            adapters = own._replace(slots=slots)
            op(normed, gate_up, down, numbers, weights, out, 0, adapters)
            seen.append((normed, gate_up, down, numbers, weights, adapters, out))
            y = out

    run()
    seen.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for number in range(6):
        x.normal_()
        slots.copy_(torch.randint(0, SLOTS + 1, (tokens,)) * (number > 0))
        graph.replay()
        for normed, gate_up, down, numbers, weights, adapters, out in seen:
            if coded:
                close_to_codes(out, normed, gate_up, down, numbers, weights, adapters)
            else:
                close(out, exact(normed, gate_up, down, numbers, weights, adapters))
