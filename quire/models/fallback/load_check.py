"""Compares a loaded model with transformers' own eager attention, so that no model is served that computes wrongly."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.compute.attention.backend import AttentionBackend, StepRows
from quire.errors import CheckpointError
from quire.models.fallback.decoder import FallbackDecoder
from quire.models.fallback.encoder import FallbackEncoder
from quire.models.fallback.weights import TransformersWeights
from quire.models.layers.layer import Layer
from quire.models.layers.rotary import Positions
from quire.models.model import Model
from quire.models.spec import ModelSpec

_TOKENS, _OTHER_TOKENS = 64, 24
_TEXTS = (_TOKENS, _OTHER_TOKENS, _TOKENS * 7 // 8, 9, 2)
"""Lengths of texts. What padding changes only near to it, as by convolutions, shows in short ones."""
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.03}
"""The largest difference of logits that is rounding, as a share of the largest logit."""
_OUTLIERS = 1 / 16
"""The share of positions that may differ more in half precision, where rounding changes which experts are chosen."""
_SEED = 20_240
_log = logging.getLogger(__name__)


def num_blocks(spec: ModelSpec, block_size: int) -> int:
    """Return how many KV blocks a check needs: two sequences in each group."""
    return 2 * -(-_TOKENS // block_size) * len(spec.kv_groups())


class _Part(NamedTuple):
    """Tokens `start` to `end` - 1 of sequence `slot`."""

    slot: int
    start: int
    end: int


def check(
    model: Model,
    layers: Sequence[Layer],
    attention: AttentionBackend,
    spec: ModelSpec,
    block_size: int,
    device: torch.device,
) -> None:
    """Compute two sequences in chunks, beside each other, and compare their logits with those of whole sequences.

    Args:
        layers: The layers of `model`, of which one has transformers' weights.
        attention: The backend over a KV cache of `num_blocks` blocks.

    Raises:
        CheckpointError: The logits differ; the message has the figure.
    """
    decoder = next(layer.decoder for layer in layers if isinstance(layer, TransformersWeights))
    if isinstance(decoder, FallbackEncoder):
        check_texts(decoder, spec, device)
        return
    assert isinstance(decoder, FallbackDecoder)
    longest = min(_TOKENS, spec.max_model_len)
    lengths = (longest, min(_OTHER_TOKENS, longest))
    generator = torch.Generator().manual_seed(_SEED)
    texts = [torch.randint(spec.vocab_size, (length,), generator=generator).to(device) for length in lengths]
    tables = _tables(spec, block_size, device)
    with torch.inference_mode():
        expected = [_reference(decoder.reference, text) for text in texts]
        for way in _ways(decoder):
            try:
                found = _computed(model, attention, texts, tables)
                worst, differs = _difference(found, expected)
            except Exception as error:  # of caches that go on only in the way that transformers' own generation does
                if decoder.own is None:
                    raise
                worst, differs = float("inf"), True
                _log.debug("load check  %s: %s", way, error)
            if decoder.own is not None:
                decoder.own.clear()
            if not differs:
                _log.info("load check  logits differ by %.1e of the largest%s", worst, f": {way}" if way else "")
                return
    raise CheckpointError(
        f"{spec.architecture}: in chunks, its logits differ by {worst:.1e} of the largest from those of transformers' "
        f"eager attention on the same weights, where {_TOLERANCES[expected[0].dtype]:g} is allowed: it would answer "
        "wrongly, so it is not served. Give another model, or report this with its config.json."
    )


def check_texts(encoder: FallbackEncoder, spec: ModelSpec, device: torch.device) -> None:
    """Compute texts in batches, and compare what is made of them with what is made of each one by itself.

    Raises:
        CheckpointError: They differ, also in batches without padding; the message has the figure.
    """
    lengths = [max(1, min(length, spec.max_model_len)) for length in _TEXTS]
    generator = torch.Generator().manual_seed(_SEED)
    tokens = torch.randint(spec.vocab_size, (sum(lengths),), generator=generator).to(device)
    types = (
        torch.randint(spec.token_types, (sum(lengths),), generator=generator).to(device) if spec.token_types else None
    )
    with torch.inference_mode():
        parts = [None] * len(lengths) if types is None else torch.split(types, lengths)
        expected = [
            _reference(partial(encoder.reference, types=part), text)
            for text, part in zip(torch.split(tokens, lengths), parts, strict=True)
        ]
        for pads in dict.fromkeys((encoder.pads, False)):
            encoder.pads = pads
            found = encoder.outputs(tokens, np.array(lengths), types)
            largest = torch.cat(expected).abs().max()
            worst = float(((found - torch.cat(expected)).abs().max() / largest).nan_to_num(torch.inf))
            if worst <= _TOLERANCES[found.dtype]:
                _log.info("load check  outputs differ by %.1e of the largest%s", worst, "" if pads else ": unpadded")
                return
    raise CheckpointError(
        f"{spec.architecture}: in batches, what it makes of texts differs by {worst:.1e} of the largest from "
        f"transformers' on the same weights, where {_TOLERANCES[found.dtype]:g} is allowed: it would answer wrongly, "
        "so it is not served. Give another model, or report this with its config.json."
    )


def _ways(decoder: FallbackDecoder) -> Iterator[str]:
    """Yield the ways to compute, the fastest first, while the decoder computes in each of them."""
    if decoder.own is not None:
        for way in decoder.own.ways:
            decoder.own.advance = way
            yield way.value
        return
    yield ""
    if decoder.unfuse_attentions():
        yield "attention modules are transformers' own"


def _reference(compute: Callable[[Tensor], Tensor], text: Tensor) -> Tensor:
    try:
        return compute(text)
    except Exception as error:
        raise CheckpointError(
            f"transformers itself cannot compute this model from token ids alone ({type(error).__name__}: {error}): "
            "give another model."
        ) from error


def _computed(
    model: Model, attention: AttentionBackend, texts: list[Tensor], tables: tuple[Tensor, ...]
) -> list[Tensor]:
    """Return the logits of each text, [tokens, vocab], computed in parts."""
    found: list[list[Tensor]] = [[] for _ in texts]
    for parts in _steps(len(texts[0]), len(texts[1])):
        rows = _rows(parts, attention, tables)
        attention.prepare(rows)
        tokens = torch.cat([texts[part.slot][part.start : part.end] for part in parts])
        hidden = model.hidden(tokens, Positions(rows.positions), attention)
        logits = model.logits(hidden)
        for part, own in zip(parts, torch.split(logits, [part.end - part.start for part in parts]), strict=True):
            found[part.slot].append(own.clone())
    return [torch.cat(own) for own in found]


def _steps(first: int, second: int) -> Iterator[list[_Part]]:
    """Yield steps: chunks of both sequences, a chunk beside the end of the other, single tokens, and one alone."""
    a, b = max(1, first * 5 // 8), max(1, second * 2 // 3)
    yield [_Part(0, 0, a), _Part(1, 0, b)]
    if b < second - 1 and a < first - 2:
        yield [_Part(1, b, second - 1), _Part(0, a, first - 2)]
        yield [_Part(0, first - 2, first - 1), _Part(1, second - 1, second)]
        yield [_Part(0, first - 1, first)]
    else:
        for token in range(a, first):
            yield [_Part(0, token, token + 1)]
        for token in range(b, second):
            yield [_Part(1, token, token + 1)]


def _tables(spec: ModelSpec, block_size: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return each group's table of two slots and the dummy, with blocks of their own from 1 on."""
    blocks = torch.arange(1, num_blocks(spec, block_size) + 1, device=device)
    return tuple(
        torch.cat((own, torch.zeros_like(own[:1]))) for own in blocks.view(len(spec.kv_groups()), 2, -1).unbind()
    )


def _rows(parts: list[_Part], attention: AttentionBackend, tables: tuple[Tensor, ...]) -> StepRows:
    device = tables[0].device
    counts = np.array([part.end - part.start for part in parts])
    starts = np.array([part.start for part in parts])
    row_of_token = np.repeat(np.arange(len(parts)), counts)
    slots = torch.tensor([part.slot for part in parts], device=device)
    positions = torch.cat([torch.arange(part.start, part.end, device=device) for part in parts])
    metadata = attention.build_metadata(counts, starts)
    return StepRows(
        counts=counts,
        row_of_token=row_of_token,
        bounds=starts,
        slot_of_token=slots[torch.from_numpy(row_of_token).to(device)],
        starts=torch.from_numpy(starts).to(device),
        positions=positions,
        slots=slots,
        device_counts=torch.from_numpy(counts).to(device),
        tables=tables,
        metadata=metadata.copied(lambda column: column.to(device)),
    )


def _difference(found: list[Tensor], expected: list[Tensor]) -> tuple[float, bool]:
    """Return the largest difference, as a share of the largest logit, and whether it is more than rounding."""
    worst, wrong, positions = 0.0, 0, 0
    tolerance = _TOLERANCES[expected[0].dtype]
    for own, other in zip(found, expected, strict=True):
        own, other = own.float(), other.float()
        largest = other.abs().max()
        share = (own - other).abs().amax(-1) / largest
        behind = (other.amax(-1) - other.gather(-1, own.argmax(-1)[:, None])[:, 0]) / largest
        bad = ~(share <= tolerance) | ~(behind <= tolerance)
        worst = max(worst, float(share.nan_to_num(torch.inf).max()))
        wrong, positions = wrong + int(bad.sum()), positions + len(own)
    allowed = 0 if expected[0].dtype == torch.float32 else int(positions * _OUTLIERS)
    return worst, wrong > allowed
