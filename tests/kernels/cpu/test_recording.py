"""A recorded step is replayed at any sizes, on the inputs that stand in its buffers by then."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire.compute.kernels.cpu.activation import gelu
from quire.compute.kernels.cpu.embedding import take_rows
from quire.compute.kernels.cpu.library import Library, library
from quire.compute.kernels.cpu.linear import linear, pack_linear
from quire.compute.kernels.cpu.norm import rms_norm
from quire.compute.kernels.cpu.recording import NotRecordable, Sizes, record
from quire.compute.kernels.cpu.sample import sample
from quire.compute.kernels.reference.sample import SamplingColumns

MOST = Sizes(tokens=40, rows=30, sampled=30)
WIDTH = 70
COLUMN_DTYPES = (torch.float32, torch.int64, torch.float32, torch.float32, torch.int64, torch.int64)
"""Of SamplingColumns; zeros ask for the likeliest token."""


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
def test_last_calls_can_wait_and_see_what_has_become_of_their_inputs(kernels: Library) -> None:
    logits, tokens = torch.randn(MOST.sampled, WIDTH), torch.zeros(MOST.sampled, dtype=torch.int64)
    state = [torch.zeros(MOST.sampled, dtype=dtype) for dtype in COLUMN_DTYPES]
    faults, last = torch.zeros(MOST.sampled, dtype=torch.int8), torch.full_like(tokens, -1)
    every = torch.arange(MOST.sampled)

    def step(sizes: Sizes) -> Callable[[], Tensor]:
        number = sizes.sampled

        def copy_and_sample() -> Tensor:
            own = logits.new_empty((number, WIDTH))
            take_rows(logits, every[:number], own)
            sample(own, every[:number], SamplingColumns(*state), tokens[:number], faults[:number], last)
            return own

        return copy_and_sample

    recording = record(kernels, step, MOST)
    assert recording.last_entry in kernels.entries("sample")
    for sizes in (Sizes(7, 7, 7), MOST):
        last.fill_(-1)
        found = recording.replay(sizes, held_back=1)
        assert torch.equal(found, logits[: sizes.sampled])
        assert (last == -1).all()
        found[:, 20:] = -float("inf")
        recording.replay_rest()
        assert torch.equal(last[: sizes.sampled], logits[: sizes.sampled, :20].argmax(-1))
    recording.replay(Sizes(7, 7, 7))
    assert torch.equal(last[:7], logits[:7].argmax(-1))


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
