"""Layers say what they need, and take it from the checkpoint: stacked, converted, in any thread."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quire.compute.kernels.routing import Routing
from quire.foundation.clock import SystemClock
from quire.models.layer_spec import MixtureSpec, NormSpec, QKNormSpec
from quire.models.layers.attention import Heads
from quire.models.layers.factory import LayerFactory
from quire.models.layers.layer import load_all_weights, weight_specs_of
from quire.models.layers.mixture import MixtureNames
from quire.models.layers.norm import RMS
from quire.models.layers.rotary import Positions, Rotary
from quire.models.quantization.scheme import ExpertNames
from quire.models.weights.checkpoint import WeightSpec
from quire.models.weights.dummy import DummyCheckpoint
from quire.models.weights.progress import ReadingProgress
from quire.models.weights.tensor_options import TensorOptions

WEIGHTS = (("w1", (12, 8)), ("w3", (12, 8)), ("w2", (8, 12)))
PLACE = TensorOptions(torch.device("cpu"), torch.float32)


def load(factory: LayerFactory, seed: int = 0) -> DummyCheckpoint:
    checkpoint = DummyCheckpoint(weight_specs_of(factory.layers), seed)
    load_all_weights(factory.layers, checkpoint, 3, ReadingProgress(1, SystemClock(), False))
    return checkpoint


def read(checkpoint: DummyCheckpoint, name: str) -> torch.Tensor:
    out = torch.empty(checkpoint.contents()[name].shape)
    checkpoint.read(name, out)
    return out


@torch.inference_mode()
def test_merged_projections_are_the_separate_ones_side_by_side() -> None:
    factory = LayerFactory(PLACE)
    merged = factory.column_parallel(("a", "b"), (6, 4), 8, True)
    checkpoint = load(factory)
    x = torch.randn(3, 8)
    parts = [F.linear(x, read(checkpoint, f"{n}.weight"), read(checkpoint, f"{n}.bias")) for n in "ab"]
    torch.testing.assert_close(merged(x), torch.cat(parts, -1), rtol=1e-5, atol=1e-9)


def test_a_factory_lists_every_need_once_and_allocates_nothing() -> None:
    factory = LayerFactory(PLACE)
    embedding = factory.embedding("embed", 10, 8)
    factory.column_parallel(("attn.q_proj", "attn.k_proj"), (24, 12), 8, True)
    factory.row_parallel("attn.o_proj", 8, 24, False, transposed=True)
    factory.norm("norm", 8, RMS(1e-6))
    factory.qk_norm(("attn.q_norm", "attn.k_norm"), Heads(4, 2, 6), QKNormSpec(), RMS(1e-6))
    factory.stream_norm("ln", 8, NormSpec("layer", 1e-6, bias=True))
    names = MixtureNames("moe.gate", "moe.experts", ExpertNames("w1", "w3", "w2"))
    factory.experts(MixtureSpec(8, 12, 2, Routing(1, True)), names)
    factory.head("head", embedding, 10, 8)
    factory.head("lm_head", None, 10, 8)
    assert weight_specs_of(factory.layers) == [
        WeightSpec("embed.weight", (10, 8)),
        WeightSpec("attn.q_proj.weight", (24, 8)),
        WeightSpec("attn.k_proj.weight", (12, 8)),
        WeightSpec("attn.q_proj.bias", (24,)),
        WeightSpec("attn.k_proj.bias", (12,)),
        WeightSpec("attn.o_proj.weight", (24, 8)),
        WeightSpec("norm.weight", (8,)),
        WeightSpec("attn.q_norm.weight", (6,)),
        WeightSpec("attn.k_norm.weight", (6,)),
        WeightSpec("ln.weight", (8,)),
        WeightSpec("ln.bias", (8,)),
        WeightSpec("moe.gate.weight", (2, 8)),
        *(WeightSpec(f"moe.experts.{i}.{n}.weight", s) for i in (0, 1) for n, s in WEIGHTS),
        WeightSpec("lm_head.weight", (10, 8)),
    ]
    assert not hasattr(embedding.weight, "data")


@torch.inference_mode()
def test_a_transposed_weight_is_turned_round() -> None:
    factory = LayerFactory(PLACE)
    layer = factory.row_parallel("c_proj", 6, 4, False, transposed=True)
    checkpoint, x = load(factory), torch.randn(3, 4)
    torch.testing.assert_close(layer(x), x @ read(checkpoint, "c_proj.weight"), rtol=1e-5, atol=1e-9)


@torch.inference_mode()
def test_norms_of_heads_each_have_their_weight() -> None:
    factory = LayerFactory(PLACE)
    names = ("attn.q_norm", "attn.k_norm")
    norm = factory.qk_norm(names, Heads(2, 1, 6), QKNormSpec(), RMS(1e-6, unit_offset=True))
    checkpoint = load(factory)
    q, k = (1 + read(checkpoint, f"attn.{n}_norm.weight") for n in "qk")
    torch.testing.assert_close(norm.weight, torch.stack((q, q, k)))


@torch.inference_mode()
def test_tied_head_and_embedding_share_their_weight() -> None:
    factory = LayerFactory(PLACE)
    embedding = factory.embedding("embed", 10, 8)
    head = factory.head("head", embedding, 10, 8)
    weight = read(load(factory), "embed.weight")
    assert torch.equal(embedding(torch.tensor([3, 0])), weight[[3, 0]])
    x = torch.randn(2, 8)
    torch.testing.assert_close(head(x), F.linear(x, weight))


@torch.inference_mode()
def test_an_embeddings_scale_is_rounded_before_it_multiplies() -> None:
    factory = LayerFactory(TensorOptions(torch.device("cpu"), torch.bfloat16))
    embedding = factory.embedding("embed", 50, 64, scale=1152**0.5)
    weight = torch.empty((50, 64), dtype=torch.bfloat16)
    load(factory).read("embed.weight", weight)
    tokens = torch.arange(50)
    assert torch.equal(embedding(tokens), weight * torch.tensor(1152**0.5, dtype=torch.bfloat16))
    assert not torch.equal(embedding(tokens), (weight.float() * 1152**0.5).bfloat16())


def test_angles_of_sequences_whose_frequencies_differ_by_length() -> None:
    rotary = Rotary(lambda lengths: 1.0 / lengths.float().unsqueeze(1) ** torch.tensor([0.0, 0.5]), 1.5, PLACE)
    angles = rotary(Positions(torch.tensor([3, 5]), torch.tensor([16, 100])))
    exact = torch.tensor([[3.0, 3 / 4], [5.0, 5 / 10]])
    torch.testing.assert_close(angles.cos, 1.5 * exact.cos())
    torch.testing.assert_close(angles.sin, 1.5 * exact.sin())


def test_angles_are_taken_in_fp32_and_given_in_the_models_dtype() -> None:
    frequencies = torch.tensor([1.0, 1e-3])
    angles = Rotary(frequencies, 1.0, TensorOptions(torch.device("cpu"), torch.bfloat16))(
        Positions(torch.tensor([0, 100_003]))
    )
    exact = torch.tensor([0.0, 100_003.0]).unsqueeze(1) * frequencies
    assert torch.equal(angles.cos, exact.cos().bfloat16())
    assert torch.equal(angles.sin, exact.sin().bfloat16())
