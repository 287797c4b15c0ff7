"""A model that ranks divide computes what the undivided one computes, in each rank the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.compute.collectives.collectives import Norms, norms_of
from quire.compute.collectives.shared_memory import NativeRanks
from quire.models.spec import read_spec
from tests.checkpoints import make_tiny
from tests.models.divisible import DIVISIBLE
from tests.models.forward import logits_of, logits_of_ranks

TOKENS = torch.randint(3, 320, (70,), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("case", DIVISIBLE)
@torch.inference_mode()
def test_logits_of_ranks_equal_those_of_one(case: str, tp: int, tmp_path: Path) -> None:
    directory = make_tiny(tmp_path, **DIVISIBLE[case])
    whole = logits_of(directory, TOKENS, torch.float32)
    first, *others = logits_of_ranks(directory, TOKENS, torch.float32, tp)
    assert float((first - whole).abs().max() / whole.abs().max()) < 1e-5
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("case", DIVISIBLE)
@torch.inference_mode()
def test_norms_may_add_up_themselves(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then they do all that stands between layers and the next norm, and nobody adds up again."""
    directory, own, by_norms = make_tiny(tmp_path, **DIVISIBLE[case]), norms_of("cpu"), 0
    expected = logits_of_ranks(directory, TOKENS, torch.float32, 2)

    def summing(ranks: NativeRanks) -> Norms:
        def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor, delta: Tensor) -> None:
            nonlocal by_norms
            by_norms += 1
            ranks.all_reduce(delta)
            own.rms_norm(x, weight, eps, out, delta)

        return Norms(rms_norm, own.rms_norm_quantized)

    monkeypatch.setattr(NativeRanks, "norms", property(summing))
    found = logits_of_ranks(directory, TOKENS, torch.float32, 2)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    spec = read_spec(directory)
    norm_follows = spec.norm.kind == "rms" and spec.norm.place == "before"
    assert by_norms == (2 * 2 * len(spec.layers) if norm_follows else 0)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("case", ["mixtral", "qwen3 moe"])
@torch.inference_mode()
def test_ranks_with_whole_experts_have_the_logits_of_one(case: str, tp: int, tmp_path: Path) -> None:
    directory = make_tiny(tmp_path, **DIVISIBLE[case])
    whole = logits_of(directory, TOKENS, torch.float32)
    first, *others = logits_of_ranks(directory, TOKENS, torch.float32, tp, ep=tp)
    assert float((first - whole).abs().max() / whole.abs().max()) < 1e-5
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(("case", "ep"), [("qwen2, tied", 1), ("mixtral", 2)])
@torch.inference_mode()
def test_ranks_compute_without_kernels_of_ours(
    case: str, ep: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.compute.kernels.cpu import library as module

    directory = make_tiny(tmp_path, **DIVISIBLE[case])
    whole = logits_of(directory, TOKENS, torch.float32)
    monkeypatch.setenv("QUIRE_CPU_ISA", "none")
    module.library.cache_clear()
    try:
        first, second = logits_of_ranks(directory, TOKENS, torch.float32, 2, ep=ep)
    finally:
        monkeypatch.undo()
        module.library.cache_clear()
    assert float((first - whole).abs().max() / whole.abs().max()) < 1e-5
    assert torch.equal(first, second)
