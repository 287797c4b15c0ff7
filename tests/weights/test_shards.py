"""A rank's part of tensors: found by comparing shapes, cut where units end, read by windows."""

from __future__ import annotations

import pytest
import torch

from quire.compute.mesh import Span
from quire.errors import CheckpointError
from quire.models.weights.checkpoint import WeightSpec
from quire.models.weights.dummy import DummyCheckpoint
from quire.models.weights.shards import Cut, Shards


def read(specs: list[WeightSpec], own: list[WeightSpec], cut: Cut) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each tensor the whole and the part."""
    checkpoint, found = DummyCheckpoint(specs, 0), []
    part = Shards(specs, own, lambda module: cut).of(checkpoint)
    for spec in specs:
        whole, out = torch.empty(spec.shape), torch.empty(part.contents()[spec.name].shape)
        checkpoint.read(spec.name, whole)
        part.read(spec.name, out)
        found.append((whole, out))
    return found


def test_spans_of_a_fused_tensor_stand_side_by_side() -> None:
    cut = Cut(24, (Span(4, 4), Span(16, 2)))
    whole = [WeightSpec("a.weight", (24, 6)), WeightSpec("a.bias", (24,)), WeightSpec("a.t", (6, 24))]
    own = [WeightSpec("a.weight", (6, 6)), WeightSpec("a.bias", (6,)), WeightSpec("a.t", (6, 6))]
    weight, bias, transposed = read(whole, own, cut)
    kept = [4, 5, 6, 7, 16, 17]
    assert torch.equal(weight[1], weight[0][kept])
    assert torch.equal(bias[1], bias[0][kept])
    assert torch.equal(transposed[1], transposed[0][:, kept])


def test_tensors_count_in_units_of_their_own() -> None:
    cut = Cut(64, (Span(32, 32),))
    whole = [WeightSpec("a.words", (8, 5)), WeightSpec("a.scales", (2, 5)), WeightSpec("a.scale", (5, 1))]
    own = [WeightSpec("a.words", (4, 5)), WeightSpec("a.scales", (1, 5)), WeightSpec("a.scale", (5, 1))]
    words, scales, scale = read(whole, own, cut)
    assert torch.equal(words[1], words[0][4:])
    assert torch.equal(scales[1], scales[0][1:])
    assert torch.equal(scale[1], scale[0]), "it is every rank's"


def test_a_tensor_may_be_stored_without_dimensions_of_one() -> None:
    spec, own = WeightSpec("a.scale", (8, 1), any_rank=True), WeightSpec("a.scale", (4, 1), any_rank=True)
    stored = DummyCheckpoint([WeightSpec("a.scale", (8,))], 0)
    part = Shards([spec], [own], lambda module: Cut(8, (Span(4, 4),))).of(stored)
    assert part.contents()["a.scale"].shape == (4,)
    whole, out = torch.empty(8), torch.empty(4)
    stored.read("a.scale", whole)
    part.read("a.scale", out)
    assert torch.equal(out, whole[4:])


@pytest.mark.parametrize(
    ("spec", "own", "cut"),
    [
        (WeightSpec("a.scales", (2, 5)), (1, 5), Cut(48, (Span(20, 24),))),
        (WeightSpec("a.scales", (3, 5)), (2, 5), Cut(320, (Span(0, 160),))),
        (WeightSpec("a.g_idx", (64,), divisible=False), (32,), Cut(64, (Span(0, 32),))),
    ],
    ids=["begins within a unit", "units are cut short", "counts from the beginning"],
)
def test_what_cannot_be_divided_is_refused_by_name(spec: WeightSpec, own: tuple[int, ...], cut: Cut) -> None:
    with pytest.raises(CheckpointError, match=rf"{spec.name} .* --tensor-parallel-size"):
        Shards([spec], [WeightSpec(spec.name, own)], lambda module: cut)


def test_what_is_not_divided_is_read_as_it_is() -> None:
    specs = [WeightSpec("a.weight", (4, 4))]
    checkpoint = DummyCheckpoint(specs, 0)
    assert Shards(specs).of(checkpoint) is checkpoint
    assert Shards(specs, specs, lambda module: Cut(4, (Span(0, 4),))).of(checkpoint) is checkpoint


def test_scales_of_blocks_are_put_in_the_order_of_their_outputs() -> None:
    """As where each head's queries, keys and values are stored together; of words with packed outputs, nothing says
    where outputs are."""
    cut = Cut(512, (Span(0, 128), Span(256, 128), Span(128, 128), Span(384, 128)))
    spec = WeightSpec("a.weight_scale_inv", (4, 3))
    stored, whole, out = DummyCheckpoint([spec], 0), torch.empty(4, 3), torch.empty(4, 3)
    stored.read(spec.name, whole)
    Shards([spec], [spec], lambda module: cut).of(stored).read(spec.name, out)
    assert torch.equal(out, whole[[0, 2, 1, 3]])
    packed = WeightSpec("a.qweight", (256, 64))
    with pytest.raises(CheckpointError, match=r"a\.qweight .* head by head"):
        Shards([packed], [packed], lambda module: cut)
