"""`quire check-quant`: two models, the same tokens, and how far apart what they predict is. Loads torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quire.errors import ConfigError
from quire.tools.quant_check.both_models import BothModels, resolve_both
from quire.tools.quant_check.comparison import measure
from quire.tools.quant_check.continuations import ScoredSequence, Scores, answer, passages_as_sequences
from quire.tools.quant_check.findings import failures, verdict
from quire.tools.quant_check.options import CheckOptions
from quire.tools.quant_check.questions import Question, read_passages, read_questions
from quire.tools.quant_check.report import publish

LONGEST_PASSAGE = 1024


def run(options: CheckOptions) -> int:
    """Measure and report; the exit code: 0 if the quantized model is good, 1 if it is not or nothing can be said.

    Raises:
        SetupError: It cannot be measured.
    """
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
    """What is compared, and the scores."""
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
