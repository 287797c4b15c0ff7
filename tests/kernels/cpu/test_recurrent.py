"""Recurrent ops equal those of transformers, however their tokens are divided over steps."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers.models.mamba.modeling_mamba import mamba_selective_scan
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated, mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextRMSNormGated,
    torch_chunk_gated_delta_rule,
)

from quire.compute.kernels.cpu.gated_delta import gated_delta
from quire.compute.kernels.cpu.gated_norm import gated_norm
from quire.compute.kernels.cpu.selective_scan import selective_scan
from quire.compute.kernels.cpu.short_conv import short_conv
from quire.compute.kernels.cpu.ssd_scan import ssd_scan
from quire.compute.kernels.reference.state_inputs import StateRows

DTYPES = [torch.float32, torch.bfloat16]
STEPS = [(70, 1, 1, 0), (1, 1, 33, 1), (1, 66, 1, 16), (3, 1, 1, 32)]
"""Tokens of each of four rows in each step; the pieces of tokens that pass at a time end within some of them."""
ROWS, UNUSED = [3, 1, 5, 2], [0, 4]

pytestmark = pytest.mark.usefixtures("instructions")


def tolerances(dtype: torch.dtype, size: float) -> dict[str, float]:
    """Return the tolerances of outputs of about this size."""
    each = 1e-5 if dtype == torch.float32 else 1e-2
    return {"rtol": each, "atol": each * size}


class Texts:
    """Texts of four rows, as the steps divide them."""

    def __init__(self, wide: Tensor) -> None:
        self._texts = wide.split([sum(step[row] for step in STEPS) for row in range(4)])

    def steps(self) -> list[tuple[Tensor, StateRows]]:
        done, steps = [0] * 4, []
        for counts in STEPS:
            parts = [text[at : at + count] for text, at, count in zip(self._texts, done, counts, strict=True)]
            steps.append((torch.cat(parts), StateRows(torch.tensor(ROWS), torch.tensor([0, *counts]).cumsum(0))))
            done = [at + count for at, count in zip(done, counts, strict=True)]
        return steps

    def joined(self, outputs: list[Tensor]) -> list[Tensor]:
        """Return the outputs of each row, given those of each step."""
        parts = [out.split(counts) for out, counts in zip(outputs, STEPS, strict=True)]
        return [torch.cat([step[row] for step in parts]).float() for row in range(4)]

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self._texts)


TOKENS = sum(map(sum, STEPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "p", "groups", "n", "bounds"), [(6, 40, 2, 12, (0.2, 0.9)), (2, 16, 1, 16, None)])
def test_mamba2(
    heads: int, p: int, groups: int, n: int, bounds: tuple[float, float] | None, dtype: torch.dtype
) -> None:
    random = torch.Generator().manual_seed(n)
    width, limits = heads * p + 2 * groups * n, bounds or (0.0, math.inf)
    texts = Texts(torch.randn(TOKENS, width + heads + 3, generator=random).to(dtype))
    decay, skip, bias = -torch.rand(heads, generator=random), *torch.randn(2, heads, generator=random)
    state = torch.randn(6, heads, n, p, generator=random)
    unused, start = state[UNUSED].clone(), state[ROWS].clone()
    outputs = []
    for wide, rows in texts.steps():
        out = torch.empty(len(wide), heads * p, dtype=dtype)
        dt = wide[:, width : width + heads]
        ssd_scan(wide[:, :width], dt, decay, skip, bias, state, rows, out, dt_bounds=limits)
        outputs.append(out)
    for row, (text, out) in enumerate(zip(texts, texts.joined(outputs), strict=True)):
        x, b, c = text[None, :, :width].float().split((heads * p, groups * n, groups * n), 2)
        expected, last = mamba2_chunk_scan(
            x.unflatten(2, (heads, p)), text[None, :, width : width + heads].float(), decay,
            b.unflatten(2, (groups, n)), c.unflatten(2, (groups, n)), 16, skip, bias,
            start[row][None].mT, dt_softplus=True, dt_limit=limits, return_final_states=True,
        )  # fmt: skip
        torch.testing.assert_close(out, expected[0].flatten(1), **tolerances(dtype, float(expected.abs().max())))
        torch.testing.assert_close(state[ROWS[row]], last[0].mT, rtol=1e-5, atol=1e-4)
    assert torch.equal(state[UNUSED], unused)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("channels", "n"), [(43, 5), (64, 16)])
def test_mamba(channels: int, n: int, dtype: torch.dtype) -> None:
    """Some step sizes are so large that nothing is kept, and some so small that all is."""
    random = torch.Generator().manual_seed(n)
    texts = Texts(torch.randn(TOKENS, 2 * (channels + n) + 3, generator=random).to(dtype))
    decay, skip = -torch.rand(n, channels, generator=random), torch.randn(channels, generator=random)
    bias = 5 * torch.randn(channels, generator=random)
    bias[:2] = torch.tensor([-60.0, 60.0])
    state = torch.zeros(6, n, channels)
    state[UNUSED] = 1.0
    outputs = []
    for wide, rows in texts.steps():
        out = torch.empty(len(wide), channels, dtype=dtype)
        inputs = wide.split((channels, channels, n, n, 3), 1)[:4]
        selective_scan(*inputs, decay, skip, bias, state, rows, out)
        outputs.append(out)
    for row, (text, out) in enumerate(zip(texts, texts.joined(outputs), strict=True)):
        x, dt, b, c, _ = (each.T[None].float() for each in text.split((channels, channels, n, n, 3), 1))
        expected, last = mamba_selective_scan(
            x, dt, decay.T, b, c, D=skip, delta_bias=bias, delta_softplus=True, return_last_state=True
        )
        torch.testing.assert_close(out, expected[0].T, **tolerances(dtype, float(expected.abs().max())))
        torch.testing.assert_close(state[ROWS[row]], last[0].T, rtol=1e-4, atol=1e-5 * float(last.abs().max()))
    assert bool((state[UNUSED] == 1.0).all())


@pytest.mark.parametrize("wrong", [-1, 3])
def test_states_that_there_are_not(wrong: int) -> None:
    """An error says so, states and outputs stay as they are, and the next call is right."""
    wide, numbers, rows = (
        torch.randn(4, 64),
        torch.rand(64),
        StateRows(torch.tensor([1, wrong]), torch.tensor([0, 2, 4])),
    )
    states = {"conv": (3, 3, 16), "scan": (3, 2, 8, 8), "select": (3, 4, 16), "delta": (3, 2, 8, 8)}
    kept = {name: torch.randn(shape) for name, shape in states.items()}
    before = {name: state.clone() for name, state in kept.items()}

    def calls(rows: StateRows) -> list[tuple[object, ...]]:
        n, two = numbers, numbers[:2]
        return [
            (short_conv, wide[:, :16], n.view(4, 16), None, kept["conv"], rows),
            (ssd_scan, wide[:, :32], wide[:, 32:34], -two, two, two, kept["scan"], rows),
            (selective_scan, *(wide[:, a:b] for a, b in ((0, 16), (16, 32), (32, 36), (36, 40))),
             -n.view(4, 16), n[:16], n[:16], kept["select"], rows),
            (gated_delta, wide[:, :48], wide[:, 48:50], wide[:, 50:52], -two, two, kept["delta"], rows),
        ]  # fmt: skip

    for op, *arguments in calls(rows):
        extra = {"silu": True} if op is short_conv else {}
        with pytest.raises(IndexError, match="none of the states"):
            op(*arguments, torch.empty(4, 16), **extra)  # type: ignore[operator]
    assert all(torch.equal(kept[name], before[name]) for name in kept)
    for op, *arguments in calls(rows._replace(states=torch.tensor([1, 2]))):
        op(*arguments, torch.empty(4, 16), **({"silu": True} if op is short_conv else {}))  # type: ignore[operator]
    assert not any(torch.equal(kept[name], before[name]) for name in kept)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("keys", "values", "dk", "dv", "factor", "bound"), [(2, 6, 24, 40, 1.0, None), (1, 2, 16, 64, 2.0, -1.5)]
)
def test_gated_delta(
    keys: int, values: int, dk: int, dv: int, factor: float, bound: float | None, dtype: torch.dtype
) -> None:
    random = torch.Generator().manual_seed(dk)
    width = 2 * keys * dk + values * dv
    texts = Texts(torch.randn(TOKENS, width + 2 * values, generator=random).to(dtype))
    decay, bias = -torch.rand(values, generator=random), torch.randn(values, generator=random)
    state = torch.randn(6, values, dk, dv, generator=random)
    unused, start = state[UNUSED].clone(), state[ROWS].clone()
    outputs = []
    for wide, rows in texts.steps():
        out = torch.empty(len(wide), values * dv, dtype=dtype)
        qkv, a, b = wide.split((width, values, values), 1)
        gated_delta(qkv, a, b, decay, bias, state, rows, out, factor=factor, bound=bound)
        outputs.append(out)
    for row, (text, out) in enumerate(zip(texts, texts.joined(outputs), strict=True)):
        qkv, a, b = text[None].float().split((width, values, values), 2)
        q, k, v = qkv.split((keys * dk, keys * dk, values * dv), 2)
        gate = torch.nn.functional.softplus(a + bias) * decay
        gate = gate if bound is None else bound * (-decay * (a + bias)).sigmoid()
        expected, last = torch_chunk_gated_delta_rule(
            q.unflatten(2, (keys, dk)), k.unflatten(2, (keys, dk)), v.unflatten(2, (values, dv)),
            gate, factor * b.sigmoid(), 64, start[row][None], True, True,
        )  # fmt: skip
        assert last is not None
        torch.testing.assert_close(out, expected[0].flatten(1), **tolerances(dtype, float(expected.abs().max())))
        torch.testing.assert_close(state[ROWS[row]], last[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(state[UNUSED], unused)


def test_each_element_of_a_key_may_decay_by_itself() -> None:
    """Equal decays of all elements are the decay of the head, and others are not."""
    random = torch.Generator().manual_seed(0)
    qkv, b = torch.randn(5, 2 * 16 + 24, generator=random), torch.randn(5, 1, generator=random)
    a, bias, decay = torch.randn(5, 1, generator=random), torch.randn(1, generator=random), torch.tensor([-0.5])
    rows = StateRows(torch.tensor([1]), torch.tensor([0, 5]))
    outs, states = torch.zeros(3, 5, 24), torch.zeros(3, 2, 1, 16, 24)
    each = a.expand(5, 16).contiguous()
    gated_delta(qkv, a, b, decay, bias, states[0], rows, outs[0])
    gated_delta(qkv, each, b, decay, bias.expand(16).contiguous(), states[1], rows, outs[1])
    each[2, 3] += 1
    gated_delta(qkv, each, b, decay, bias.expand(16).contiguous(), states[2], rows, outs[2])
    torch.testing.assert_close(outs[0], outs[1])
    torch.testing.assert_close(states[0], states[1])
    different = (states[1] - states[2]).abs().amax((0, 1, 3)) > 1e-6
    assert different[3]
    assert not torch.allclose(outs[1], outs[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [1, 3])
def test_norm_behind_a_gate(groups: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    x, wide, weight = (torch.randn(7, n, generator=random).to(dtype) for n in (60, 90, 60))
    norm = MambaRMSNormGated(60, 60 // groups, 1e-5)
    norm.weight.data = weight[0].float()
    out = torch.empty_like(x)
    gated_norm(x, wide[:, 20:80], weight[0], 1e-5, 60 // groups, out, norm_first=False)
    expected = norm(x.float(), wide[:, 20:80].float())
    torch.testing.assert_close(out.float(), expected, **tolerances(dtype, 1.0))
    gated_norm(x, wide[:, 20:80], None, 1e-5, 60, out, norm_first=False)
    expected = x.float() * torch.nn.functional.silu(wide[:, 20:80].float())
    torch.testing.assert_close(out.float(), expected, **tolerances(dtype, 1.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_gate_behind_a_norm(activation: str, dtype: torch.dtype) -> None:
    """All heads have one weight; the norm may be in place."""
    random = torch.Generator().manual_seed(0)
    x, gate, weight = (torch.randn(7, n, generator=random).to(dtype) for n in (60, 60, 20))
    norm = Qwen3NextRMSNormGated(20, 1e-5)
    norm.weight.data, norm.activation = weight[0].float(), activation
    expected = norm(x.float().view(-1, 20), gate.float().view(-1, 20)).view(7, 60)
    gated_norm(x, gate, weight[0], 1e-5, 20, x, norm_first=True, activation=activation)
    torch.testing.assert_close(x.float(), expected, **tolerances(dtype, 1.0))
