"""Every term of every parity case matters: a spec without it has other logits than transformers, or none.

A term is a field of a spec that differs from its default. It is set back to the default in all layers that have it,
which is what a forgotten line in a family or a layer comes to; so a term that this does not see is one that no parity
case would notice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.models.spec import ModelSpec, read_spec
from tests.checkpoints import make_tiny
from tests.models import forward
from tests.parity.cases import CASES

NEAR = 1e-4
"""What parity tests let pass, of the largest logit."""
OF_MODELS = {
    "embedding_scale", "logit_scale", "logit_cap", "embedding_norm", "head_bias", "position_offset",
    "tie_embeddings", "learned_positions",
}  # fmt: skip
SIZES = {
    "groups",
    "values",
    "inputs",
    "outputs",
    "hidden",
    "width",
    "kv_heads",
    "head_dim",
    "eps",
    "count",
    "name",
    "own",
}
"""Fields that are sizes and names, without which weights do not fit, and ε, which shows in small norms only."""


def without_a_term(part: Any) -> Iterator[tuple[str, Any]]:
    """Yield the path of each field that is not its default, and the part with the default in its place."""
    for field in fields(part):
        value = getattr(part, field.name)
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if field.name == "kept_groups":
            default = part.groups  # experts are chosen among all
        if not field.init or field.name in SIZES:
            continue
        if is_dataclass(value):
            for path, other in without_a_term(value):
                yield f"{field.name}.{path}", replace(part, **{field.name: other})
        if default is not MISSING and value != default:
            yield field.name, replace(part, **{field.name: default})


def specs_without_terms(spec: ModelSpec) -> dict[str, ModelSpec]:
    """The model without each of its terms, by the terms' paths."""
    found: dict[str, dict[int, Any]] = {}
    for number, layer in enumerate(spec.layers):
        for path, other in without_a_term(layer):
            found.setdefault(path, {})[number] = other
    models = {
        path: replace(spec, layers=tuple(others.get(number, layer) for number, layer in enumerate(spec.layers)))
        for path, others in found.items()
    }
    defaults = {field.name: field.default for field in fields(spec) if field.name in OF_MODELS}
    for name, default in defaults.items():
        value = None if default is MISSING and name == "logit_cap" else False if default is MISSING else default
        if getattr(spec, name) != value:
            models[name] = replace(spec, **{name: value})
    return models


UNSEEN: dict[str, str] = {
    "mlp.routing.epsilon": "it is far below the sums of scores",
    "mlp.routing.fp32": "the cases are fp32 themselves; tests/models_sweep/test_router_logits.py sees it",
    "norms.number": "the place of norms says it as well; weights are counted by it",
    "gemma4: scaled": "its own layers read it unasked; weights are counted by it",
    "gemma4: mlp.router_norm": "its own layers read it unasked; weights are counted by it",
    "gemma4: mlp.routing.renormalise": "a norm behind the experts undoes a token's factor",
    "llama4: mixer.qk_norm.behind_rope": "rotations keep lengths, and the norm has no weights",
    "nanochat: mixer.qk_norm.behind_rope": "rotations keep lengths, and the norm has no weights",
    "mimo: mlp.routing.of_best_two": "the case has a single group",
    "yarn rope: mixer.rope.scaling.truncate": "the bounds are whole numbers in this case; gpt-oss sees it",
}
"""Terms that logits do not show, in any case or only in those whose name begins so, and why."""


@pytest.mark.models
@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_no_term_can_be_forgotten(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_tiny(tmp_path, **CASES[case])
    tokens = torch.randint(3, 300, (150,), generator=torch.Generator().manual_seed(4))
    expected = forward.logits_of(directory, tokens, torch.float32)
    spec, unseen = read_spec(directory), []
    for path, other in specs_without_terms(spec).items():
        monkeypatch.setattr(forward, "read_spec", lambda *_, other=other: other)
        try:
            logits = forward.logits_of(directory, tokens, torch.float32)
        except Exception:  # it cannot be built, or the weights are others: whoever forgets it sees that
            continue
        if float((logits - expected).abs().max() / expected.abs().max()) < NEAR:
            unseen.append(path)
    assert [path for path in unseen if not {path, f"{case.split(',')[0]}: {path}"} & UNSEEN.keys()] == []
