"""What the report of the start says about vectors and values of whole texts."""

from __future__ import annotations

from quire.models.pooler_config import PoolerSpec
from quire.models.sentence_files import DenseModule, NormModule, VectorModule
from quire.models.spec import ModelSpec


def pooling_lines(spec: ModelSpec) -> list[str]:
    """The lines that say what the model makes of texts and how, and where that was found; none for other models."""
    pooler = spec.pooler
    if not pooler.tasks:
        return []
    how = _head(pooler) if pooler.labels else _embedding(pooler)
    left = "" if pooler.files.include_prompt else "; a prompt's tokens are left out"
    lines = [f"pooling     {', '.join(pooler.tasks)}: {how}, from {pooler.source}{left}"]
    if pooler.files.prompts:
        default = f"; every text gets {pooler.files.default_prompt!r}" if pooler.files.default_prompt else ""
        lines.append(f"prompts     {', '.join(pooler.files.prompts)}{default}")
    if not pooler.generates:
        lines.append("runner      pooling: no text is generated")
    return lines


def _embedding(pooler: PoolerSpec) -> str:
    modules = [_module(module) for module in pooler.modules]
    parts = [" and ".join(pooler.modes) or "each token", *modules, *["normalised"] * pooler.normalizes]
    return f"{', '.join(parts)}, {pooler.dim} dimensions"


def _module(module: VectorModule) -> str:
    if isinstance(module, DenseModule):
        return f"Dense {module.inputs} to {module.outputs}"
    return "LayerNorm" if isinstance(module, NormModule) else "normalised"


def _head(pooler: PoolerSpec) -> str:
    values = f"{len(pooler.labels)} labels" if len(pooler.labels) > 1 else "one value"
    states = " and ".join(pooler.modes) or "each token"
    return f"{values} of {states}, {(pooler.activates and pooler.activation) or 'as they are'}"
