"""Routers of half-precision models: the logits, and the experts they choose, are those of transformers' own routers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.compute.kernels.reference.experts import route
from quire.models.layers import factory
from quire.models.layers.mixture import Router
from tests.checkpoints import edit_config, make_tiny
from tests.models.forward import load
from tests.models.test_mixtures import MIXTURES
from tests.models_sweep.rows import ROWS, SHAPE

EXPERTS = 44
"""So many that rounded logits are often equal; no other product of these models has as many outputs."""
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
FEW = ["DeepseekV3ForCausalLM", "Ernie4_5_MoeForCausalLM", "MixtralForCausalLM"]
ROUNDED = {
    "MixtralForCausalLM", "Qwen3MoeForCausalLM", "MellumForCausalLM", "Lfm2MoeForCausalLM", "JambaForCausalLM",
    "GraniteMoeHybridForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM", "MiniMaxForCausalLM",
    "GptOssForCausalLM", "Qwen2MoeForCausalLM", "Mistral4ForCausalLM", "OlmoeForCausalLM", "FlexOlmoForCausalLM",
    "GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM", "MiniMaxM2ForCausalLM",
    "AfmoeForCausalLM", "Cohere2MoeForCausalLM", "PhimoeForCausalLM", "Llama4ForCausalLM", "LagunaForCausalLM",
}  # fmt: skip
"""Architectures whose routers round logits to the model's dtype, in transformers as here."""


@pytest.mark.parametrize(
    "architecture",
    [*FEW, *(pytest.param(name, marks=pytest.mark.models) for name in MIXTURES if name not in FEW)],
)
@torch.inference_mode()
def test_a_bfloat16_router_chooses_as_transformers_does(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    row = SHAPE | ROWS[architecture] | {"architecture": architecture}
    row |= {key: EXPERTS for key in COUNTS if key in row}
    directory = make_tiny(tmp_path, **row)
    edit_config(directory, {"architectures": [architecture]})
    theirs: list[tuple[Tensor, Tensor]] = []
    linear = F.linear

    def recorded(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        y = linear(x, weight, *rest)
        if len(weight) == EXPERTS:
            theirs.append((x.flatten(0, -2), y.flatten(0, -2)))
        return y

    with monkeypatch.context() as patched:
        patched.setattr(F, "linear", recorded)
        model = getattr(transformers, architecture).from_pretrained(directory, dtype=torch.bfloat16).eval()
        model(torch.randint(3, 320, (6, 300), generator=torch.Generator().manual_seed(1)))
    ours: list[Router] = []

    def built(*arguments: Any, **named: Any) -> Router:
        ours.append(Router(*arguments, **named))
        return ours[-1]

    monkeypatch.setattr(factory, "Router", built)
    load(directory, torch.bfloat16)
    assert len(ours) == len(theirs) > 0
    others = [0, 0]
    for router, (x, logits) in zip(ours, theirs, strict=True):
        last_place = 2**-7 if architecture in ROUNDED else 0  # a sum of another order may be rounded to a neighbour
        torch.testing.assert_close(router.logits(x).float(), logits.float(), rtol=last_place, atol=2e-5)
        assert router(x.bfloat16())[0].dtype == torch.bfloat16
        chosen = route(logits, router.routing, correction=router.correction)[1].sort().values
        rounded = route(logits.bfloat16(), router.routing, correction=router.correction)[1]
        for at, numbers in enumerate((router(x)[1], rounded)):
            others[at] += int((numbers.sort().values != chosen).any(-1).sum())
    if architecture not in ROUNDED:  # of equal logits, any may be taken
        assert 8 * others[0] < others[1]  # fp32 sums have another order, which may change a token's experts
