"""What the models generate: the base model's greedy answers, on which both are compared, and both models' scores.

An engine in this process serves each model, and is gone before the next one starts.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quire.errors import ConfigError, RequestError
from quire.offline.llm import LLM
from quire.outputs import RequestOutput
from quire.planning.auto_config import ResolvedConfig
from quire.sampling_params import SamplingParams
from quire.text.tokenizer import Tokenizer
from quire.tools.quant_check.questions import Question, percent_right


@dataclass(frozen=True)
class ScoredSequence:
    """Tokens of which those from `first` on are predicted, each from all tokens before it."""

    tokens: list[int]
    first: int


@dataclass(frozen=True)
class Scores:
    """Percent of the questions with answers that each model answers right."""

    questions: int
    base: float
    quantized: float


def passages_as_sequences(passages: Sequence[str], tokenizer: Tokenizer, longest: int) -> list[ScoredSequence]:
    """Each passage, predicted from its second token on."""
    encoded = [tokenizer.encode(passage)[:longest] for passage in passages]
    return [ScoredSequence(tokens, 1) for tokens in encoded if len(tokens) > 1]


def answer(
    questions: Sequence[Question], base: ResolvedConfig, quantized: ResolvedConfig, max_tokens: int
) -> tuple[list[ScoredSequence], Scores | None]:
    """The questions with the base model's greedy answers, and the scores, if there are questions with answers.

    Raises:
        ConfigError: A prompt cannot be served.
    """
    outputs = _generate(base, questions, None, max_tokens)
    _free_memory()
    sequences = [
        ScoredSequence([*output.prompt_token_ids, *output.outputs[0].token_ids], len(output.prompt_token_ids))
        for output in outputs
    ]
    scored = sum(bool(question.answers) for question in questions)
    scores = None
    if scored:
        theirs = _generate(quantized, questions, [output.prompt_token_ids for output in outputs], max_tokens)
        _free_memory()
        scores = Scores(scored, percent_right(questions, _texts(outputs)), percent_right(questions, _texts(theirs)))
    return [each for each in sequences if len(each.tokens) > each.first], scores


def _generate(
    resolved: ResolvedConfig, questions: Sequence[Question], prompts: list[list[int]] | None, max_tokens: int
) -> list[RequestOutput]:
    """Greedy answers in the order of the questions. `prompts` are token ids in place of the questions' own."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    with LLM(**_settings(resolved)) as llm:
        try:
            if prompts is not None:
                return llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
            found: dict[int, RequestOutput] = {}
            chats = {n: q.messages for n, q in enumerate(questions) if q.messages is not None}
            plain = {n: q.prompt for n, q in enumerate(questions) if q.prompt is not None}
            if chats:
                found |= zip(chats, llm.chat(list(chats.values()), params, use_tqdm=False), strict=True)
            if plain:
                found |= zip(plain, llm.generate(list(plain.values()), params, use_tqdm=False), strict=True)
            return [found[number] for number in range(len(questions))]
        except RequestError as error:
            raise ConfigError(f"--prompts: {error.message}", param="prompts") from error


def _settings(resolved: ResolvedConfig) -> dict[str, Any]:
    model, device = resolved.config.model, resolved.config.device.device
    return {
        "model": model.model,
        "tokenizer": model.tokenizer,
        "dtype": model.dtype,
        "quantization": model.quantization,
        "skip_tokenizer_init": model.skip_tokenizer_init,
        "device": device,
        "max_num_seqs": 32,
        "swap_space": 0,
        "enforce_eager": True,
    }


def _texts(outputs: Sequence[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
