"""A sum over ranks is made once, by whoever reads it first; norms may make it themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.compute.collectives.collectives import Norms, norms_of
from quire.compute.collectives.delta import PartialSum, Stream, total_of
from quire.models.layer_spec import NormSpec
from quire.models.layers.divided import SummedOverRanks
from quire.models.layers.norm import RMS, LayerNorm, RMSNorm
from quire.models.quantization.scheme import RowForm
from quire.models.weights.dummy import DummyCheckpoint
from quire.models.weights.tensor_options import TensorOptions

OPTIONS = TensorOptions(torch.device("cpu"), torch.float32)
WIDTH, EPS = 16, 1e-5
QUANTIZED = RowForm(torch.int8, dense_up_to=2)


class ThreeAlike:
    """Collectives of three ranks that have the same summand, with norms that add up or without."""

    def __init__(self, sums: bool = False) -> None:
        self.norms = Norms(self._rms_norm, self._rms_norm_quantized) if sums else None
        self.asked: list[str] = []

    def all_reduce(self, x: Tensor) -> None:
        self.asked.append("sum")
        x.mul_(3)

    def gather_columns(self, x: Tensor, out: Tensor) -> None:
        raise AssertionError

    def _rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor, delta: Tensor) -> None:
        self.asked.append("norm")
        norms_of("cpu").rms_norm(x, weight, eps, out, delta * 3)

    def _rms_norm_quantized(self, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, delta: Tensor) -> object:
        self.asked.append("quantized norm")
        return norms_of("cpu").rms_norm_quantized(x, weight, eps, dtype, delta * 3)


def rms_norm(form: RowForm | None = None) -> RMSNorm:
    norm = RMSNorm("norm", WIDTH, RMS(EPS), OPTIONS, form)
    norm.load_weights(DummyCheckpoint(list(norm.weight_specs()), 0))
    return norm


def summand(rows: int = 5) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))


def divided(own: Tensor, ranks: ThreeAlike) -> PartialSum:
    return SummedOverRanks(lambda: own.clone(), ranks)()


@torch.inference_mode()
@pytest.mark.parametrize("sums", [False, True])
def test_a_norm_adds_the_sum(sums: bool) -> None:
    ranks, norm, x = ThreeAlike(sums), rms_norm(), torch.ones(5, WIDTH)
    found = norm(x, divided(summand(), ranks))
    assert torch.equal(found, norm(expected := torch.ones(5, WIDTH), summand() * 3))
    assert torch.equal(x, expected)
    assert ranks.asked == ["norm" if sums else "sum"]


@torch.inference_mode()
@pytest.mark.parametrize(("rows", "asked"), [(2, "norm"), (5, "quantized norm")])
def test_norms_that_add_up_make_the_form_of_rows_that_is_taken(rows: int, asked: str) -> None:
    ranks, norm, x = ThreeAlike(sums=True), rms_norm(QUANTIZED), torch.ones(rows, WIDTH)
    found = norm.rows(x, divided(summand(rows), ranks))
    expected = norm.rows(torch.ones(rows, WIDTH), summand(rows) * 3)
    assert ranks.asked == [asked]
    if isinstance(found, Tensor):
        assert isinstance(expected, Tensor)
        assert torch.equal(found, expected)
    else:
        assert not isinstance(expected, Tensor)
        assert torch.equal(found.codes, expected.codes)
        assert torch.equal(found.scales, expected.scales)


@torch.inference_mode()
def test_what_has_been_read_is_not_added_up_again() -> None:
    """Where a stage's stream is read beside the model, or handed on."""
    ranks, norm, x = ThreeAlike(sums=True), rms_norm(), torch.ones(5, WIDTH)
    stream = Stream(x, divided(summand(), ranks))
    for _ in range(2):
        assert torch.equal(torch.stack([each for each in stream.tensors() if each is not None])[1], summand() * 3)
    norm(*stream)
    assert torch.equal(x, 1 + summand() * 3)
    assert ranks.asked == ["sum"]


@torch.inference_mode()
def test_a_norm_of_the_sum_itself_and_a_layer_norm_read_the_sum() -> None:
    ranks, norm = ThreeAlike(sums=True), rms_norm()
    assert torch.equal(norm(divided(summand(), ranks)), norm(summand() * 3))
    layer_norm = LayerNorm("norm", WIDTH, NormSpec("layer", EPS), OPTIONS)
    layer_norm.load_weights(DummyCheckpoint(list(layer_norm.weight_specs()), 0))
    found = layer_norm(torch.ones(5, WIDTH), divided(summand(), ranks))
    assert torch.equal(found, layer_norm(torch.ones(5, WIDTH), summand() * 3))
    assert ranks.asked == ["sum", "sum"]


def test_what_no_rank_divides_is_what_it_is() -> None:
    x = summand()
    assert total_of(x) is x
    assert Stream(x, None).tensors() == (x, None)
