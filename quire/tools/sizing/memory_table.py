"""Where a device's memory goes, and how many sequences of which length fit: the arithmetic that guides do by hand."""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import QuireError
from quire.models.spec import ModelSpec
from quire.tools.simulation.deployment import FormatName, in_format
from quire.tools.sizing.options import PlanOptions
from quire.tools.sizing.survey import deployed, sequences_that_fit

LENGTHS = (2_048, 8_192, 32_768, 131_072)


@dataclass(frozen=True)
class MemoryRow:
    """A device's memory with a model in one format.

    Attributes:
        device, tp, format: See Candidate.
        weights, activations, kv_cache: Bytes of one device; 0 where the weights do not fit.
        kv_bytes_per_token: Of one device.
        fits: Sequences at a time by their length, for lengths that the model has; 0: not one.
    """

    device: str
    tp: int
    format: FormatName
    weights: int
    activations: int
    kv_cache: int
    kv_bytes_per_token: int
    fits: dict[int, int]


def memory_row(options: PlanOptions, spec: ModelSpec, device: str, tp: int, form: FormatName) -> MemoryRow:
    """What fits on a device: each length is planned for by itself, as `quire serve --max-model-len` would.

    Raises:
        ConfigError: The model cannot be divided so.
    """
    spec, fits = in_format(spec, form), {}
    lengths = [length for length in LENGTHS if length < spec.max_model_len] + [spec.max_model_len]
    weights = activations = kv_cache = per_token = 0
    for length in lengths:
        try:
            found = deployed(options, spec, device, tp, length)
        except QuireError:
            fits[length] = 0
            continue
        fits[length] = sequences_that_fit(found, length)
        if not weights:
            parts = found.plan.footprint
            weights, activations, kv_cache = parts.weights, parts.activations, parts.kv_cache
            per_token = spec.kv_bytes_per_token(found.config.kv_dtype) // min(tp, spec.kv_heads)
    return MemoryRow(device, tp, form, weights, activations, kv_cache, per_token, fits)
