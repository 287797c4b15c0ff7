"""What is measured on: built-in passages, or the user's own prompts with the base model's greedy answers; and scores.

Each model is served by an engine in this process, which is gone before the next one starts.
"""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire.errors import ConfigError, RequestError, reason
from quire.offline.llm import LLM
from quire.outputs import RequestOutput
from quire.planning.auto_config import ResolvedConfig
from quire.sampling_params import SamplingParams
from quire.text.tokenizer import Tokenizer

PASSAGES = Path(__file__).with_name("passages.txt")
_BETWEEN = re.compile(r"\n\n(?=\S)(?!assert )")
_FIELDS = {"prompt", "messages", "answer"}
_WORD = re.compile(r"[^\W_]+(?:[.,:]\d+)*")


@dataclass(frozen=True)
class Question:
    """A line of a prompts file: either a prompt, as text or token ids, or messages in OpenAI's format. Each of
    `answers` is right; a line without any is not scored."""

    prompt: str | list[int] | None
    messages: list[dict[str, Any]] | None
    answers: tuple[str, ...]

    @property
    def needs_text(self) -> bool:
        return not isinstance(self.prompt, list) or bool(self.answers)

    def is_answered_by(self, text: str) -> bool:
        """Whether the text has the words of an answer in a row; case and punctuation do not count."""
        said = _words(text)
        return any(f" {wanted} " in f" {said} " for wanted in map(_words, self.answers))


def read_passages() -> list[str]:
    return _BETWEEN.split(PASSAGES.read_text(encoding="utf-8").strip())


def read_questions(path: str) -> list[Question]:
    """The questions of a file with a JSON object a line. Raises ConfigError, which names the line, if one is wrong."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--prompts {path} cannot be read: {reason(error)}.", param="prompts") from error
    questions = [_question(line, f"--prompts {path}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise ConfigError(f'--prompts {path} has no prompts: write {{"prompt": "..."}} a line.', param="prompts")
    return questions


def _question(line: str, where: str) -> Question:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: this is no JSON object: {reason(error)}.", param="prompts") from error
    if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
        raise ConfigError(f'{where}: an object with either "prompt" or "messages" is needed.', param="prompts")
    if unknown := entry.keys() - _FIELDS:
        raise ConfigError(f'{where}: "{min(unknown)}" is not one of {", ".join(sorted(_FIELDS))}.', param="prompts")
    prompt, messages, answer = entry.get("prompt"), entry.get("messages"), entry.get("answer")
    if messages is None and not (_is_text(prompt) or _is_list_of(prompt, int)):
        raise ConfigError(f'{where}: "prompt" is neither text nor a list of token ids.', param="prompts")
    if messages is not None and not _is_list_of(messages, dict):
        raise ConfigError(f'{where}: "messages" is no list of objects.', param="prompts")
    answers = [] if answer is None else [answer] if isinstance(answer, str) else answer
    if answer is not None and not (_is_list_of(answers, str) and all(map(_words, answers))):
        raise ConfigError(f'{where}: "answer" is neither text nor a list of texts.', param="prompts")
    return Question(prompt, messages, tuple(answers))


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_list_of(values: object, kind: type) -> bool:
    return isinstance(values, list) and bool(values) and all(type(value) is kind for value in values)


def _words(text: str) -> str:
    return " ".join(_WORD.findall(text.casefold()))


def percent_right(questions: Sequence[Question], texts: Sequence[str]) -> float:
    """The percentage of questions with answers that are answered right."""
    right = [each.is_answered_by(text) for each, text in zip(questions, texts, strict=True) if each.answers]
    return 100 * sum(right) / len(right)


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
    """The questions with the base model's greedy answers, and any scores. Raises ConfigError for an unusable prompt."""
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
