"""A recorded step is replayed at any sizes, on the inputs that stand in its buffers by then."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire.kernels.cpu.activation import gelu
from quire.kernels.cpu.embedding import take_rows
from quire.kernels.cpu.library import Library, library
from quire.kernels.cpu.linear import linear, pack_linear
from quire.kernels.cpu.norm import rms_norm
from quire.kernels.cpu.recording import NotRecordable, Sizes, record

MOST = Sizes(tokens=40, rows=30, sampled=30)
WIDTH = 70


@pytest.fixture
def kernels() -> Library:
    if (found := library()) is None:
        pytest.skip("there are no kernels on this machine")
    return found


class Step:
    """x → norm(gelu(W x) + x), of some of its rows."""

    def __init__(self) -> None:
        self.x = torch.randn(MOST.tokens, WIDTH)
        self.all = torch.arange(MOST.tokens)
        self.chosen = torch.randint(0, 7, (MOST.sampled,))
        self.norm = torch.randn(WIDTH)
        self.weight = pack_linear(torch.randn(WIDTH, WIDTH))

    def __call__(self, sizes: Sizes) -> Callable[[], Tensor]:
        x, chosen = self.x[: sizes.tokens], self.chosen[: sizes.sampled]

        def step() -> Tensor:
            gated, out = torch.empty_like(x), torch.empty_like(x)
            copy, picked = torch.empty_like(x), x.new_empty((sizes.sampled, WIDTH))
            gelu(linear(x, self.weight, None), gated)
            take_rows(x, self.all[: sizes.tokens], copy)
            rms_norm(copy, self.norm, 1e-5, out, gated)
            take_rows(out, chosen, picked)
            return picked

        return step


@torch.inference_mode()
def test_replay_equals_running(kernels: Library) -> None:
    step = Step()
    recording = record(kernels, step, MOST)
    for sizes in (Sizes(7, 7, 7), MOST, Sizes(7, 1, 1), Sizes(33, 2, 30), MOST):
        step.x.normal_()
        step.chosen.random_(0, sizes.tokens)
        assert torch.equal(recording.replay(sizes), step(sizes)())


@torch.inference_mode()
def test_tensors_that_are_not_in_use_together_share_memory(kernels: Library) -> None:
    """Of a long chain, two tensors are alive at a time."""
    weight = pack_linear(torch.eye(WIDTH))
    x = torch.randn(MOST.tokens, WIDTH)

    def step(sizes: Sizes) -> Callable[[], Tensor]:
        def chain() -> Tensor:
            y = x[: sizes.tokens]
            for _ in range(20):
                y = linear(y, weight, None)
            return y

        return chain

    recording = record(kernels, step, MOST)
    assert torch.equal(recording.replay(MOST), x[: MOST.sampled])
    assert len(recording._memory) < 3 * x.nbytes


def test_what_kernels_do_not_compute_is_not_recordable(kernels: Library) -> None:
    step = Step()
    steps: dict[str, Callable[[Sizes], Callable[[], Tensor]]] = {
        "aten.add": lambda sizes: lambda: step.x[: sizes.tokens] + 1,
        "lives longer": lambda sizes: lambda: step.x[: sizes.tokens],
        "no linear": lambda sizes: lambda: linear(step.x[: sizes.tokens * sizes.rows % 11 + 1], step.weight, None),
        "depend on its sizes": lambda sizes: (
            lambda: linear(step(sizes)(), step.weight, None) if sizes.rows == 9 else step(sizes)()
        ),
    }
    for told, bad in steps.items():
        with torch.inference_mode(), pytest.raises(NotRecordable, match=told):
            record(kernels, bad, MOST)
    torch.testing.assert_close(step.x[:2] + 1, 1 + step.x[:2])  # nothing of the trace is left
    assert not kernels._recorders
