"""One choice while it is generated: from its sequence's tokens to the text that a reader sees.

Joins incremental detokenization, stop tokens and stop strings, for the server and for `LLM`, streaming or not. Work for
each token is constant, and the text does not depend on how tokens were grouped. Knows no response format.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import NamedTuple

from quire.foundation.messages.to_engine import Add
from quire.sampling_params import SamplingParams
from quire.text.deltas import ChoiceDelta, SequenceDelta
from quire.text.tokenizer import Tokenizer


class ChoiceState:
    """One choice while it is generated, without text if there is no tokenizer. `shown_tokens` are special tokens that
    the text shows, whatever `skip_special_tokens` says; `cached_tokens` counts tokens of its prompt that were found
    computed, and `finished` tells whether its last delta was processed."""

    def __init__(self, add: Add, tokenizer: Tokenizer | None, shown_tokens: Collection[int] = ()) -> None:
        self.num_tokens = 0
        self.cached_tokens = 0
        self.finished = False
        self._stop_token_ids = frozenset(add.sampling.stop_token_ids or ())
        prompt_tail = add.tokens[max(0, add.prompt_len - PROMPT_TAIL) : add.prompt_len]
        self._text = TextStream(tokenizer, add.sampling, prompt_tail, add.stop_ids, shown_tokens)

    @property
    def tokens_only(self) -> bool:
        """Whether the choice has token ids only, so that no text can end it."""
        return self._text.tokens_only

    def process(self, delta: SequenceDelta) -> ChoiceDelta:
        """Turn what the engine sent into what the reader sees."""
        text = self._text.push(delta.tokens, final=delta.end is not None)
        used = text.tokens_used
        logprobs = [entry for entry in delta.logprobs[:used] if entry is not None]
        seen = ChoiceDelta(text.text, delta.tokens[:used], logprobs, delta.prompt_logprobs)
        self.cached_tokens += delta.cached_tokens
        if text.stop is not None:
            seen.finish_reason, seen.stop_reason = "stop", text.stop
        elif delta.end is not None:
            reason = delta.end.reason
            if reason == "timeout":
                seen.finish_reason, seen.stop_reason = "length", "timeout"
            else:
                seen.finish_reason = "error" if reason == "refused" else reason
                if reason == "stop" and delta.tokens and delta.tokens[-1] in self._stop_token_ids:
                    seen.stop_reason = delta.tokens[-1]
        self.num_tokens += used
        self.finished = seen.finish_reason is not None
        return seen


PROMPT_TAIL = 8
"""How many of a prompt's last tokens are looked at: they decide how the text after it begins."""


class TextDelta(NamedTuple):
    """What some tokens added.

    Attributes:
        stop: The stop string that ended the sequence; later tokens count for nothing.
        tokens_used: How many of the pushed tokens belong to the sequence: all, or those up to the end of the stop
            string.
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
        """Let text pass to `parts` as far as it is no stop string; returns the stop string that ended the sequence."""
        if not text:
            return None
        if self._min_tokens_left > 0:  # within min_tokens nothing stops
            parts.append(text)
            return None
        wanted, stop = self._stops.push(text)
        parts.append(wanted)
        self._stopped = stop is not None
        return stop


class IncrementalDetokenizer:
    """The text of one growing sequence, without ever showing half a character.

    Bytes that are no UTF-8 become U+FFFD, one for each maximal part of a character (Unicode 15, section 3.9).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        shown_tokens: Collection[int] = (),
        before: Sequence[int] = (),
    ) -> None:
        """Args:
        shown_tokens: Special tokens that are shown nevertheless.
        before: The last tokens of the prompt; empty when the text begins here."""
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        if shown_tokens:
            self._skipped = self._skipped.difference(shown_tokens)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._inside = False  # of a character, whose first bytes the decoder holds
        self._at_start = all(token in self._skipped for token in before)

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        if token in self._skipped:
            return ""
        if self._at_start:
            self._at_start = False
            return self._decode(self._tokenizer.first_token_bytes(token))
        if not self._inside and (text := self._tokenizer.whole_text(token)) is not None:
            return text
        return self._decode(self._tokenizer.token_bytes(token))

    def _decode(self, data: bytes) -> str:
        text = self._decoder.decode(data)
        self._inside = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        """What remains when no token will follow: U+FFFD for a character that was not completed."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Watches a stream of text for the stop string that is completed first; of several at the same place, the longest.

    Holds back just the text that might be the beginning of one, in linear time (Knuth, Morris and Pratt, 1977).
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """Hold back `stops`, non-empty strings, of which there may be none. `include` keeps the stop string in the
        text."""
        self._include = include
        self._patterns = [_Pattern(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text. Returns the text that is not part of any stop string, and the stop string if one is complete; no
        text may be added after that."""
        if not self._patterns:
            return text, None
        for at, character in enumerate(text):
            found = None
            for pattern in self._patterns:
                if pattern.advance(character) and found is None:
                    found = pattern.text
            if found is not None:
                seen = self._held + text[: at + 1]
                self._held = ""
                return (seen if self._include else seen[: -len(found)]), found
        seen = self._held + text
        keep = max(pattern.matched for pattern in self._patterns)
        self._held = seen[len(seen) - keep :]
        return seen[: len(seen) - keep], None

    def finish(self) -> str:
        """The text that was held back and is no stop string after all."""
        held, self._held = self._held, ""
        return held


class _Pattern:
    """How much of one stop string stands at the end of the stream."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._borders = [0]  # of each prefix that was matched so far: the longest shorter prefix that is also its end

    def advance(self, character: str) -> bool:
        """Whether this character completes the stop string."""
        while self.matched and self.text[self.matched] != character:
            self.matched = self._borders[self.matched - 1]
        if self.text[self.matched] == character:
            self.matched += 1
            if self.matched > len(self._borders):
                self._add_border()
        return self.matched == len(self.text)

    def _add_border(self) -> None:
        """Only once it is needed: most stop strings never come far, whatever their length."""
        text, borders = self.text, self._borders
        length, character = borders[-1], text[len(borders)]
        while length and text[length] != character:
            length = borders[length - 1]
        borders.append(length + (text[length] == character))
