"""One choice while it is generated: turns what the engine sends about its sequence into what a reader sees.

Joins tokens with their text, and tells whether the engine or a stop string ended the choice. Used by the server and by
`LLM`; knows no response format.
"""

from __future__ import annotations

from collections.abc import Collection

from quire.foundation.messages.from_engine import End
from quire.foundation.messages.to_engine import Add
from quire.text.deltas import ChoiceDelta, SequenceDelta
from quire.text.text_stream import PROMPT_TAIL, TextStream
from quire.text.tokenizer import Tokenizer


class ChoiceState:
    """One choice while it is generated.

    Args:
        tokenizer: None for work on token ids alone.
        shown_tokens: Special tokens that the text shows, whatever `skip_special_tokens` says.

    Attributes:
        cached_tokens: Tokens of its prompt that were found computed.
        finished: Whether its last delta was processed.
    """

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
                seen.stop_reason = self._stop_token(delta, delta.end)
        self.num_tokens += used
        self.finished = seen.finish_reason is not None
        return seen

    def _stop_token(self, delta: SequenceDelta, end: End) -> int | None:
        last = delta.tokens[-1] if delta.tokens and end.reason == "stop" else None
        return last if last in self._stop_token_ids else None
