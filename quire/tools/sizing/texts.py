"""`quire plan` for models that make vectors or values of texts: what a step takes, and what it computes in a second.

Nothing grows while texts are computed: encoders hold keys and values for one step, and decoders until a text's end. So
memory is weights, the largest step's activations and what the texts of steps hold, and speed is that of full steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from quire.errors import ConfigError, QuireError
from quire.foundation.config.model import ModelConfig
from quire.models.spec import ModelSpec, read_spec, spec_of
from quire.planning.footprint import GIB, Footprint
from quire.planning.memory_budget import KVDemand
from quire.planning.step_limits import longest_of
from quire.tools.bench.report import write_json
from quire.tools.simulation.deployment import Deployment, FormatName, in_format
from quire.tools.simulation.load import find_model
from quire.tools.sizing.options import PlanOptions, read_prices
from quire.tools.sizing.report import columns, named
from quire.tools.sizing.survey import deployed, devices, formats, sizes

_REFUSED = ("trace", "target_tpot", "picture")
"""Options that are about tokens one after another."""


@dataclass(frozen=True)
class TextRow:
    """A device, or several, with a model in one format, and full steps of texts of one length.

    Attributes:
        footprint: Bytes of one device, of whose KV cache only what the texts of steps hold is counted; None: the model
            does not fit.
        texts: Texts in a full step.
        step_ms: Milliseconds of such a step.
        tokens_per_s, texts_per_s: Of all devices of the row together, whose steps follow one another at once.
        price: Of a million tokens; None: not known.
        reason: Why the model does not fit.
    """

    device: str
    tp: int
    format: FormatName
    footprint: Footprint | None = None
    texts: int = 0
    step_ms: float = 0.0
    tokens_per_s: float = 0.0
    texts_per_s: float = 0.0
    price: float | None = None
    reason: str = ""


def spec_of_texts(options: PlanOptions) -> ModelSpec | None:
    """Return the spec of a model that is run to make vectors or values of texts; None: it generates text."""
    assert options.model is not None
    directory = find_model(options.model)
    spec = read_spec(directory)
    if (directory / "modules.json").is_file():
        spec = spec_of(ModelConfig(model=str(directory)), directory)
    return None if spec.generates and spec.pooler.generates else spec


def plan_texts(options: PlanOptions, spec: ModelSpec) -> int:
    """Plan, print and write; returns the exit code: 0, or 1 if the model fits no device.

    Raises:
        ConfigError: An option is about generated tokens, or wrong.
    """
    for name in _REFUSED:
        if getattr(options, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{options.model} makes no tokens one after another: leave {flag} out.", param=name)
    longest = longest_of(spec)
    if options.input_len == PlanOptions.input_len:
        options = replace(options, input_len=min(options.input_len, longest))
    if options.input_len > longest:
        raise ConfigError(
            f"Texts of {options.input_len:,} tokens are longer than the {longest:,} that the model was made for: lower "
            "--input-len.",
            param="input_len",
        )
    prices = read_prices(options.prices)
    rows = [
        _row(options, spec, device, tp, form, prices)
        for device in devices(options)
        for tp in sizes(options, device)
        for form in formats(options, spec)
    ]
    rows.sort(key=_order)
    print(_as_text(options, spec, rows))
    if options.json is not None:
        write_json(options.json, _as_json(options, spec, rows))
    return 0 if rows[0].footprint is not None else 1


def _order(row: TextRow) -> tuple[bool, bool, float]:
    rate = row.tokens_per_s / row.tp
    return row.footprint is None, row.price is None, -rate if row.price is None else row.price


def _row(
    options: PlanOptions, spec: ModelSpec, device: str, tp: int, form: FormatName, prices: dict[str, float]
) -> TextRow:
    try:
        found = deployed(options, in_format(spec, form), device, tp, options.input_len)
    except QuireError as error:
        return TextRow(device, tp, form, reason=error.message)
    length, limits = options.input_len, found.limits
    texts = max(1, min(limits.tokens // length, limits.rows))
    step_ms = found.step(np.full(texts, length), np.zeros(texts, np.int64), 0)
    texts_per_s = 1e3 * texts / step_ms
    tokens_per_s = texts_per_s * length
    price = prices[device] * tp / 3600 / tokens_per_s * 1e6 if device in prices else None
    footprint = _needed(found)
    return TextRow(device, tp, form, footprint, texts, step_ms, tokens_per_s, texts_per_s, price)


def _needed(found: Deployment) -> Footprint:
    """Return the memory that is of use: of the KV cache, the blocks of all texts that may run at a time."""
    demand, plan = KVDemand.of(found.config, found.spec), found.plan
    blocks = min(plan.num_blocks, demand.blocks_for_all_sequences(plan.max_model_len))
    parts = plan.footprint
    return Footprint(parts.weights, parts.activations, (blocks + 1) * demand.block_bytes, states=parts.states)


def _as_text(options: PlanOptions, spec: ModelSpec, rows: Sequence[TextRow]) -> str:
    held = "one step" if spec.two_sided else "the steps of a text"
    first = "the fastest" if rows[0].price is None else "the cheapest"
    head = (
        f"{options.model}: {spec.architecture}, {spec.num_parameters / 1e6:,.1f}M parameters, {len(spec.layers)} "
        f"layers, texts of up to {longest_of(spec):,} tokens",
        f"Keys and values: {spec.kv_bytes_per_token('bfloat16'):,} bytes a token in bf16, held for {held}",
        "",
        f"Full steps of texts of {options.input_len:,} tokens; {first} first:",
    )
    lines = [["device", "weights", "GiB", "activations", "KV", "texts a step", "ms", "tokens/s", "texts/s", "$/1M", ""]]
    lines += [_line(row) for row in rows]
    notes = [
        "",
        "note: of devices alone: tokenising and HTTP are not counted, and bound the fastest of them.",
    ]
    if others := sorted({row.device for row in rows} - {"h200", "cpu"}):
        notes.append(f"note: {', '.join(others)}: published figures, reached to shares that were measured on an H200.")
    if any(row.device == "cpu" for row in rows):
        notes.append("note: cpu: a guess from its cores.")
    return "\n".join([*head, *columns(lines), *notes])


def _line(row: TextRow) -> list[str]:
    parts, head = row.footprint, [named(row.device, row.tp), row.format]
    if parts is None:
        return [*head, *["-"] * 8, row.reason]
    gib = [f"{size / GIB:.2f}" for size in (parts.weights, parts.activations, parts.kv_cache)]
    price = "-" if row.price is None else f"{row.price:,.4f}"
    figures = [f"{row.texts}", f"{row.step_ms:,.1f}", f"{row.tokens_per_s:,.0f}", f"{row.texts_per_s:,.0f}", price]
    return [*head, *gib, *figures, ""]


def _as_json(options: PlanOptions, spec: ModelSpec, rows: Sequence[TextRow]) -> dict[str, Any]:
    return {
        "model": options.model,
        "parameters": spec.num_parameters,
        "kv_bytes_per_token": spec.kv_bytes_per_token("bfloat16"),
        "input_len": options.input_len,
        "candidates": [asdict(row) for row in rows],
    }
