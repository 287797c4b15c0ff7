"""One sequence from its Add to its finished output, for callers that want whole outputs. Knows no engine's loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from msgspec import structs

from quire.errors import GenerationError, QuireError, RequestError
from quire.foundation.messages.from_engine import Deltas, End
from quire.foundation.messages.to_engine import Add
from quire.foundation.messages.workers import TokenLogprobs
from quire.outputs import CompletionOutput, Logprob
from quire.text.deltas import ChoiceDelta, SequenceDelta, deltas_by_sequence
from quire.text.text_stream import ChoiceState
from quire.text.tokenizer import Tokenizer


@dataclass
class SequenceAccumulator:
    """One sequence while it is generated: its output so far, and whether the engine has ended it."""

    add: Add
    index: int
    choice: ChoiceState
    whole: ChoiceDelta = field(default_factory=ChoiceDelta)
    end: End | None = None
    _logprob_before: float = 0.0  # of tokens that `gained` has given

    def add_tokens(self, tokens: list[int]) -> None:
        """Add tokens of a choice without text, when nothing else came with them."""
        self.whole.tokens += tokens
        self.choice.num_tokens += len(tokens)

    def add_delta(self, delta: SequenceDelta) -> bool:
        """Add what a step brought; returns whether the sequence is over."""
        self.whole.add(self.choice.process(delta))
        self.end = delta.end
        return self.choice.finished

    def output(self, tokenizer: Tokenizer | None) -> CompletionOutput:
        """The finished sequence."""
        whole, sampling = self.whole, self.add.sampling
        assert whole.finish_reason != "tool_calls"  # no parser reads the text
        ranked = sampling.logprob_token_ids is None
        asked = sampling.num_reported is not None
        entries = zip(whole.tokens, whole.logprobs, strict=True) if asked else ()
        return CompletionOutput(
            index=self.index,
            text=whole.text,
            token_ids=whole.tokens,
            cumulative_logprob=sum(entry.logprob for entry in whole.logprobs) if asked else None,
            logprobs=[logprobs_dict(token, entry, tokenizer, ranked=ranked) for token, entry in entries]
            if asked
            else None,
            finish_reason=whole.finish_reason,
            stop_reason=whole.stop_reason,
        )

    def gained(self, tokenizer: Tokenizer | None) -> CompletionOutput | None:
        """What came since the last call; None for nothing. Only `cumulative_logprob` counts from the beginning."""
        if not self.whole.tokens and not self.whole.text and self.whole.finish_reason is None:
            return None
        output = self.output(tokenizer)
        self.whole = ChoiceDelta()
        if output.cumulative_logprob is None:
            return output
        self._logprob_before += output.cumulative_logprob
        return replace(output, cumulative_logprob=self._logprob_before)

    def prompt_logprobs(self, tokenizer: Tokenizer | None) -> list[dict[int, Logprob] | None] | None:
        """Log probabilities of each token of the prompt; None when not asked for, or while it is not computed."""
        prompt, entries = self.add.tokens[: self.add.prompt_len], self.whole.prompt_logprobs
        if self.add.sampling.prompt_logprobs is None or len(entries) < len(prompt) - 1:
            return None
        return prompt_logprobs_dicts(prompt, entries, tokenizer)


def failure_of(end: End) -> QuireError | None:
    if end.reason == "refused":
        return RequestError(end.message)
    return GenerationError(end.message) if end.reason == "error" else None


def dispatch_deltas(message: Deltas, open_sequences: Mapping[int, SequenceAccumulator]) -> list[SequenceAccumulator]:
    """Give each sequence what a step brought it; returns the sequences that are over now."""
    deltas = deltas_by_sequence(_without_bare_tokens(message, open_sequences)).items()
    return [s for number, delta in deltas if (s := open_sequences.get(number)) and s.add_delta(delta)]


def _without_bare_tokens(message: Deltas, open_sequences: Mapping[int, SequenceAccumulator]) -> Deltas:
    """Add the tokens of choices without text that came with nothing else, which is quick; returns the rest."""
    if message.logprobs:
        return message
    with_more = {end.id for end in message.ends} | {
        number for number, _ in message.prompt_logprobs + message.cached_tokens
    }
    ids, counts, tokens, at = [], [], [], 0
    for number, count in zip(message.ids, message.counts, strict=True):
        gained = message.tokens[at : at + count]
        at += count
        sequence = open_sequences.get(number)
        if sequence is not None and number not in with_more and sequence.choice.tokens_only:
            sequence.add_tokens(gained)
        else:
            ids.append(number)
            counts.append(count)
            tokens += gained
    return structs.replace(message, ids=ids, counts=counts, tokens=tokens)


def prompt_logprobs_dicts(
    prompt: Sequence[int], entries: Sequence[TokenLogprobs], tokenizer: Tokenizer | None
) -> list[dict[int, Logprob] | None]:
    """Each token of a prompt and the likeliest tokens, by id. The first token has None, as no token comes before it."""
    rest = zip(prompt[1:], entries, strict=True)
    return [None, *(logprobs_dict(token, entry, tokenizer) for token, entry in rest)]


def logprobs_dict(
    token: int, entry: TokenLogprobs, tokenizer: Tokenizer | None, *, ranked: bool = True
) -> dict[int, Logprob]:
    """A token's entry as vLLM has it: the token itself, then the others. If they are `ranked`, these are the
    likeliest, best first; else they were named, and their ranks are unknown."""

    def of(token_id: int, logprob: float, rank: int | None) -> Logprob:
        return Logprob(logprob, rank, None if tokenizer is None else tokenizer.decode([token_id], False))

    others = zip(entry.top_ids, entry.top_logprobs, strict=True)
    return {token: of(token, entry.logprob, entry.rank)} | {
        other: of(other, logprob, rank if ranked else None)
        for rank, (other, logprob) in enumerate(others, start=1)
        if other != token
    }
