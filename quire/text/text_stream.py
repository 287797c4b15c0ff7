"""From the tokens of one sequence to the text that its reader sees: incremental detokenization with stop strings.

Owns joining detokenizer, stop tokens and stop strings; used by the server and by `LLM`, streaming or not. Knows
nothing about HTTP, log probabilities or the engine.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from quire.sampling_params import SamplingParams
from quire.text.incremental_detokenizer import IncrementalDetokenizer
from quire.text.stop_strings import StopStrings
from quire.text.tokenizer import Tokenizer

PROMPT_TAIL = 8
"""How many of a prompt's last tokens are looked at: they decide how the text after it begins."""


class TextDelta(NamedTuple):
    """What some tokens added.

    Attributes:
        stop: The stop string that ended the sequence; later tokens count for nothing.
        tokens_used: How many of the pushed tokens belong to the sequence: all, or those up to and including the one
            that completed the stop string.
    """

    text: str
    stop: str | None
    tokens_used: int


class TextStream:
    """One sequence's text."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        prompt_tail_tokens: Sequence[int] = (),
        stop_ids: Collection[int] = (),
        shown_tokens: Collection[int] = (),
    ) -> None:
        """
        Args:
            tokenizer: None for work on token ids alone; the text is empty then.
            prompt_tail_tokens: The prompt, or its last PROMPT_TAIL tokens.
            stop_ids: Tokens that end the sequence (`Add.stop_ids`); such a token shows no text unless
                `include_stop_str_in_output`.
            shown_tokens: Special tokens that the text shows, whatever `skip_special_tokens` says.
        """
        self._detokenizer = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer,
                skip_special_tokens=params.skip_special_tokens,
                shown_tokens=shown_tokens,
                before=prompt_tail_tokens[-PROMPT_TAIL:],
            )
        self._hidden = frozenset() if params.include_stop_str_in_output else frozenset(stop_ids)
        self._stops = StopStrings(params.stop_strings, include=params.include_stop_str_in_output)
        self._min_tokens_left = params.min_tokens
        self._stopped = False

    @property
    def tokens_only(self) -> bool:
        """Whether there is never any text, so that no stop string can end the sequence."""
        return self._detokenizer is None

    def push(self, tokens: Sequence[int], final: bool) -> TextDelta:
        """Add tokens; `final` says that no more will follow, so nothing is held back."""
        if self._stopped or self._detokenizer is None:
            return TextDelta("", None, 0 if self._stopped else len(tokens))
        parts: list[str] = []
        for used, token in enumerate(tokens, start=1):
            text = "" if token in self._hidden else self._detokenizer.push(token)
            if stop := self._watch(text, parts):
                return TextDelta("".join(parts), stop, used)
            self._min_tokens_left -= 1
        if final and (stop := self._watch(self._detokenizer.finish(), parts)):
            return TextDelta("".join(parts), stop, len(tokens))
        if final:
            parts.append(self._stops.finish())
        return TextDelta("".join(parts), None, len(tokens))

    def _watch(self, text: str, parts: list[str]) -> str | None:
        """Let text pass to `parts` as far as it is no stop string; returns the one that ended the sequence."""
        if not text:
            return None
        if self._min_tokens_left > 0:  # within min_tokens nothing stops
            parts.append(text)
            return None
        wanted, stop = self._stops.push(text)
        parts.append(wanted)
        self._stopped = stop is not None
        return stop
