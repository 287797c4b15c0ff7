"""The tokens by which a speech model is told what to write: language, task, timestamps and what was said before.

Radford et al. 2022, "Robust Speech Recognition via Large-Scale Weak Supervision", section 2.3.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quire.errors import CheckpointError
from quire.foundation.messages.to_engine import TimestampRules, TranscriptRules
from quire.text.tokenizer import Tokenizer
from quire.text.tokenizer_files import read_json

Task = Literal["transcribe", "translate"]
_MULTILINGUAL = 51_865
"""Least size of the vocabulary of a multilingual model, as Whisper's own code has it, for files that do not say."""
_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")


@dataclass(frozen=True)
class SpeechTokens:
    """A model's tokens and rules of transcripts.

    Attributes:
        start: Begins every transcript.
        end: Ends every transcript. Tokens below it are text.
        languages: Tokens of languages by their codes; empty: the model writes English alone.
        tasks: Tokens of tasks; empty: the model only transcribes.
        barred: Says that there are no timestamps.
        first_timestamp: The timestamp of 0 seconds.
        previous: Comes before what was said before; None: the model does not know it.
        no_speech: Its probability at `start` is that of silence.
        rules: Which tokens a transcript may have.
    """

    start: int
    end: int
    languages: Mapping[str, int]
    tasks: Mapping[Task, int]
    barred: int
    first_timestamp: int
    previous: int | None
    no_speech: int
    rules: TranscriptRules

    def prompt(self, language: str | None, task: Task, before: Sequence[int], *, timestamps: bool) -> list[int]:
        """Return the tokens in front of a transcript.

        Args:
            language: A code of `languages`; None in models of English.
            task: What to write.
            before: Tokens of what was said before.
            timestamps: Whether the transcript has timestamps.
        """
        told = [self.previous, *before] if before and self.previous is not None else []
        spoken = [self.languages[language]] if language is not None and self.languages else []
        asked = [self.tasks[task]] if task in self.tasks else []
        return [*told, self.start, *spoken, *asked, *([] if timestamps else [self.barred])]

    def rules_of(self, *, timestamps: bool) -> TranscriptRules:
        """Return which tokens a transcript with or without timestamps may have."""
        return self.rules if timestamps else TranscriptRules(self.rules.never, self.rules.not_first)

    def is_timestamp(self, token: int) -> bool:
        """Whether a token is a timestamp."""
        return token >= self.first_timestamp

    def words(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens that are text."""
        return [token for token in tokens if token < self.end]


def load_speech_tokens(directory: Path, tokenizer: Tokenizer) -> SpeechTokens:
    """Read a speech model's tokens from its generation_config.json, config.json and tokenizer.

    Raises:
        CheckpointError: One is missing.
    """
    config, generation = read_json(directory / "config.json"), read_json(directory / "generation_config.json")
    values = {**config, **{name: value for name, value in generation.items() if value is not None}}

    def named(key: str, *marks: str) -> int:
        found = values.get(key) if key else None
        for mark in marks:
            found = tokenizer.token_id(mark) if found is None else found
        found = found[0] if isinstance(found, list) and found else found
        if type(found) is not int or found < 0:
            raise CheckpointError(f"The checkpoint has no token {marks[0]}: download its tokenizer again.")
        return found

    end, barred = named("eos_token_id", "<|endoftext|>"), named("no_timestamps_token_id", "<|notimestamps|>")
    previous, latest = values.get("prev_sot_token_id"), values.get("max_initial_timestamp_index")
    timestamps = TimestampRules(barred + 1, end, barred, None if latest is None else barred + 1 + int(latest))
    marks = tokenizer.special_tokens
    is_multilingual = values.get("is_multilingual", values.get("vocab_size", 0) >= _MULTILINGUAL)
    languages, tasks = _marks(values.get("lang_to_id") or marks), values.get("task_to_id") or {}
    for task in ("transcribe", "translate"):
        tasks.setdefault(task, tokenizer.token_id(f"<|{task}|>"))
    return SpeechTokens(
        start=named("decoder_start_token_id", "<|startoftranscript|>"),
        end=end,
        languages=languages if is_multilingual else {},
        tasks={task: token for task, token in tasks.items() if type(token) is int} if is_multilingual else {},
        barred=barred,
        first_timestamp=barred + 1,
        previous=previous if type(previous) is int else tokenizer.token_id("<|startofprev|>"),
        no_speech=barred - 1,
        rules=TranscriptRules(_ids(values, "suppress_tokens"), _ids(values, "begin_suppress_tokens"), timestamps),
    )


def _marks(marks: Mapping[str, Any]) -> dict[str, int]:
    found = ((_LANGUAGE.fullmatch(mark), token) for mark, token in marks.items())
    return {match[1]: token for match, token in found if match is not None and type(token) is int}


def _ids(values: Mapping[str, Any], key: str) -> list[int]:
    found = values.get(key) or []
    if not isinstance(found, list) or not all(type(token) is int and token >= 0 for token in found):
        raise CheckpointError(f"generation_config.json: {key} must be a list of token ids.")
    return found
