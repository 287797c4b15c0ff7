"""`quire check-quant`: two models, the same tokens, and how far apart their predictions are. Loads torch.

The tokens run through both models, and then through the base model with one layer swapped at a time. Logits are
compared as they are computed and never kept; the base model's hidden states are kept on the host.

Some tools move scales from a weight into its neighbours before they quantize (AWQ and SmoothQuant: into the norm
before; others rotate the whole stream). Alone, such a layer computes something else, so it is swapped together with its
neighbours, or not at all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.foundation.clock import SystemClock
from quire.models.model import Model
from quire.tools.quant_check.both_models import BothModels, resolve_both
from quire.tools.quant_check.continuations import (
    Question,
    ScoredSequence,
    Scores,
    answer,
    passages_as_sequences,
    read_passages,
    read_questions,
)
from quire.tools.quant_check.findings import (
    Divergence,
    Findings,
    LayerFinding,
    TokenFigures,
    compare_logits,
    failures,
    joined,
    summarize,
    verdict,
)
from quire.tools.quant_check.forward import SequenceForward
from quire.tools.quant_check.layer_pairs import LayerPair, Mode, PairedModels, paired_models
from quire.tools.quant_check.options import CheckOptions
from quire.tools.quant_check.report import publish

SAME_NORM = 0.02
"""Relative error up to which a norm counts as unchanged: it may be stored in another dtype."""
SAME_EMBEDDING = 0.5
"""Relative error up to which an embedding counts as unchanged: it may be quantized."""
_BLOCK = re.compile(r"^(.*?\.\d+)\.")
LONGEST_PASSAGE = 1024
POSITIONS_AT_ONCE = 128
"""Tokens whose logits are compared at once: 128 of 128,256 logits take 66 MB in fp32, a few times over."""
Logits = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Suspect:
    """Layers that are swapped together: those of one layer's modules, or a block. The errors are by module, as from
    LayerPair.errors; a block has none, because its parts only make sense together."""

    name: str
    errors: dict[str, float]
    pairs: tuple[LayerPair, ...]

    @property
    def error(self) -> float | None:
        """The error of the worst module; None if there are no errors by module."""
        return max(self.errors.values(), key=_size, default=None)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Within this context the base model computes with the quantized layers."""
        for pair in self.pairs:
            pair.mode = "quantized"
        try:
            yield
        finally:
            for pair in self.pairs:
                pair.mode = "base"


def find_suspects(pairs: Sequence[LayerPair]) -> tuple[list[Suspect], list[Suspect], str | None]:
    """Find the layers that differ, after all were compared on the base model's activations.

    Returns blocks that can only be swapped as a whole, in the model's order; layers that can be swapped alone, the
    worst first; and why not all layers can be, if that is so.
    """
    errors = {pair: pair.errors() for pair in pairs}
    worst = {pair: max(map(_size, found.values()), default=0.0) for pair, found in errors.items()}
    if any(pair.kind == "embedding" and worst[pair] > SAME_EMBEDDING for pair in pairs):
        return [], [], "the embeddings differ, as after a rotation of the stream: no layer can be swapped alone"
    scaled = {_block(pair) for pair in pairs if pair.kind == "norm" and worst[pair] > SAME_NORM}
    different = [pair for pair in pairs if pair.kind != "norm" and worst[pair] > 0]
    single = [Suspect(p.name, errors[p], (p,)) for p in different if _block(p) not in scaled]
    single.sort(key=lambda suspect: -_size(suspect.error or 0.0))
    blocks = [block for block in dict.fromkeys(map(_block, pairs)) if block in scaled]
    together = [Suspect(block, {}, tuple(p for p in pairs if _block(p) == block)) for block in blocks]
    note = None
    if together:
        note = f"norms of {len(together)} blocks differ, as after AWQ or SmoothQuant: these blocks are swapped whole"
    return together, single, note


def _block(pair: LayerPair) -> str:
    """The block of a pair. An embedding is a block of its own, and so is everything after the last block."""
    found = _BLOCK.match(pair.modules[0])
    return found[1] if found else "embedding" if pair.kind == "embedding" else "head"


def _size(error: float) -> float:
    """An error to compare by: one that is not a number counts as the largest."""
    return math.inf if math.isnan(error) else error


def run(options: CheckOptions) -> int:
    """Measure and report; returns the exit code: 0 if the quantized model is good, 1 if it is bad or that is unclear.
    Raises SetupError if it cannot be measured."""
    questions = None if options.prompts is None else read_questions(options.prompts)
    models = resolve_both(options, needs_text=questions is None or any(each.needs_text for each in questions))
    sequences, scores = _sequences(options, questions, models)
    found = replace(measure(models, sequences, options.worst_layers), scores=scores)
    missed = failures(found, options.thresholds)
    publish(options, found, missed)
    return 0 if verdict(found, missed) == "good" else 1


def _sequences(
    options: CheckOptions, questions: Sequence[Question] | None, models: BothModels
) -> tuple[list[ScoredSequence], Scores | None]:
    scores = None
    if questions is None:
        assert models.tokenizer is not None
        longest = min(LONGEST_PASSAGE, models.longest)
        sequences = passages_as_sequences(read_passages(), models.tokenizer, longest)
    else:
        sequences, scores = answer(questions, models.base, models.quantized, options.max_tokens)
    if not sequences:
        raise ConfigError("The base model answers nothing to these prompts: give others.", param="prompts")
    return sequences, scores


def measure(models: BothModels, sequences: Sequence[ScoredSequence], worst_layers: int) -> Findings:
    """Compare the models on these sequences, then swap the worst layers one at a time. Raises SetupError if one
    fails."""
    clock, both = SystemClock(), (models.base, models.quantized)
    with paired_models(*both, clock, at_once=models.fit_at_once) as paired:
        forward = SequenceForward(models.base, [len(sequence.tokens) for sequence in sequences], clock)
        try:
            with torch.inference_mode():
                comparison = _Comparison(paired, forward, sequences)
                whole = comparison.of_whole_model()
                together, single, note = find_suspects(paired.pairs)
                swapped = [*together, *single[:worst_layers]]
                alone = [LayerFinding(each.name, each.errors, comparison.of_one(each).mean_kl) for each in swapped]
        finally:
            forward.close()
    alone.sort(key=lambda layer: math.inf if layer.kl is None or math.isnan(layer.kl) else layer.kl, reverse=True)
    others = [LayerFinding(each.name, each.errors) for each in single[worst_layers:]]
    found = Findings(len(sequences), whole, (*alone, *others), notes=(note,) if note else ())
    if not found.knows_texts:
        unknown = "the base model does not know these texts: give --prompts that it was made for"
        found = replace(found, notes=(*found.notes, unknown))
    return found


class _Comparison:
    """Compares the base model with the quantized one, or with itself after layers are swapped, on all sequences."""

    def __init__(self, models: PairedModels, forward: SequenceForward, sequences: Sequence[ScoredSequence]) -> None:
        self._models = models
        self._forward = forward
        self._sequences = sequences
        self._hidden: list[Tensor] = []  # the base model's, on the host

    def of_whole_model(self) -> Divergence:
        """Compare the quantized model. Meanwhile every layer is compared on the base model's activations."""
        base, quantized, parts = self._models.base, self._models.quantized, []
        _set_mode(self._models.pairs, "compare")
        for batch in self._batches():
            ours, theirs = self._hidden_of(base, batch), self._hidden_of(quantized, batch)
            self._hidden += [hidden.cpu() for hidden in ours]
            for sequence, hidden, other in zip(batch, ours, theirs, strict=True):
                parts += _compared(sequence, hidden, other, base.logits, quantized.logits)
        _set_mode(self._models.pairs, "base")
        return summarize(joined(parts))

    def of_one(self, suspect: Suspect) -> Divergence:
        """Compare the base model with these layers swapped."""
        base, parts, kept = self._models.base, [], iter(self._hidden)

        def swapped_logits(hidden: Tensor) -> Tensor:
            with suspect.swapped():
                return base.logits(hidden)

        for batch in self._batches():
            with suspect.swapped():
                theirs = self._hidden_of(base, batch)
            for sequence, other in zip(batch, theirs, strict=True):
                parts += _compared(sequence, next(kept).to(other.device), other, base.logits, swapped_logits)
        return summarize(joined(parts))

    def _batches(self) -> Iterator[Sequence[ScoredSequence]]:
        for batch in self._forward.batches:
            yield self._sequences[batch.start : batch.stop]

    def _hidden_of(self, model: Model, batch: Sequence[ScoredSequence]) -> list[Tensor]:
        return self._forward.hidden(model, [sequence.tokens for sequence in batch])


def _compared(
    sequence: ScoredSequence, hidden: Tensor, other: Tensor, logits: Logits, other_logits: Logits
) -> list[TokenFigures]:
    """Figures of a sequence's predicted tokens, from two hidden states [tokens, hidden]."""
    tokens, parts = torch.tensor(sequence.tokens, device=hidden.device), []
    for start in range(sequence.first - 1, len(tokens) - 1, POSITIONS_AT_ONCE):
        end = min(start + POSITIONS_AT_ONCE, len(tokens) - 1)
        ours, theirs = (each[start:end].clone() for each in (hidden, other))
        parts.append(compare_logits(logits(ours), other_logits(theirs), tokens[start + 1 : end + 1]))
    return parts


def _set_mode(pairs: Sequence[LayerPair], mode: Mode) -> None:
    for pair in pairs:
        pair.mode = mode
