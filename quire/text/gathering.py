"""One sequence from its Add to its finished output, for callers that want it whole.

Owns vLLM's shape of log probabilities. Knows nothing about the engine's loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from quire.messages import Add, Deltas, End, TokenLogprobs
from quire.outputs import CompletionOutput, Logprob
from quire.text.choice import Choice, Delta, Piece, deltas_by_sequence
from quire.text.tokenizer import Tokenizer


@dataclass
class GatheredSequence:
    """One sequence while it grows: what came so far, and whether the engine has ended it."""

    add: Add
    index: int
    choice: Choice
    whole: Piece = field(default_factory=Piece)
    end: End | None = None

    def gain(self, tokens: list[int]) -> None:
        """Take in tokens of which only their number counts: of a silent choice, with no word beside them."""
        self.whole.tokens += tokens
        self.choice.num_tokens += len(tokens)

    def take(self, delta: Delta) -> bool:
        """Take in what a step brought; whether the sequence is over."""
        self.whole.add(self.choice.take(delta))
        self.end = delta.end
        return self.choice.finished

    def output(self, tokenizer: Tokenizer | None) -> CompletionOutput:
        """The finished sequence."""
        whole, sampling = self.whole, self.add.sampling
        ranked = sampling.logprob_token_ids is None
        asked = sampling.num_reported is not None
        entries = zip(whole.tokens, whole.logprobs, strict=True) if asked else ()
        return CompletionOutput(
            index=self.index,
            text=whole.text,
            token_ids=whole.tokens,
            cumulative_logprob=sum(entry.logprob for entry in whole.logprobs) if asked else None,
            logprobs=[logprobs_by_id(token, entry, tokenizer, ranked=ranked) for token, entry in entries]
            if asked
            else None,
            finish_reason=whole.finish_reason,
            stop_reason=whole.stop_reason,
        )

    def prompt_logprobs(self, tokenizer: Tokenizer | None) -> list[dict[int, Logprob] | None] | None:
        """For each token of the prompt; None when they were not asked for."""
        if self.add.sampling.prompt_logprobs is None:
            return None
        return prompt_logprobs_by_id(self.add.tokens[: self.add.prompt_len], self.whole.prompt_logprobs, tokenizer)


def deliver(message: Deltas, open_sequences: Mapping[int, GatheredSequence]) -> list[GatheredSequence]:
    """Hand a step's news to their sequences; those that are over now."""
    news = deltas_by_sequence(_without_plain_tokens(message, open_sequences)).items()
    return [s for number, delta in news if (s := open_sequences.get(number)) and s.take(delta)]


def _without_plain_tokens(message: Deltas, open_sequences: Mapping[int, GatheredSequence]) -> Deltas:
    """Hand over tokens where nothing else is to be done with them, as with most tokens of silent choices; the rest."""
    if message.logprobs:
        return message
    told = {end.id for end in message.ends} | {number for number, _ in message.prompt_logprobs + message.cached_tokens}
    ids, counts, tokens, at = [], [], [], 0
    for number, count in zip(message.ids, message.counts, strict=True):
        gained = message.tokens[at : at + count]
        at += count
        sequence = open_sequences.get(number)
        if sequence is not None and number not in told and sequence.choice.silent:
            sequence.gain(gained)
        else:
            ids.append(number)
            counts.append(count)
            tokens += gained
    return structs.replace(message, ids=ids, counts=counts, tokens=tokens)


def prompt_logprobs_by_id(
    prompt: Sequence[int], entries: Sequence[TokenLogprobs], tokenizer: Tokenizer | None
) -> list[dict[int, Logprob] | None]:
    """For each token of a prompt: it and the likeliest by id; nothing stands before the first, so it has none."""
    rest = zip(prompt[1:], entries, strict=True)
    return [None, *(logprobs_by_id(token, entry, tokenizer) for token, entry in rest)]


def logprobs_by_id(
    token: int, entry: TokenLogprobs, tokenizer: Tokenizer | None, *, ranked: bool = True
) -> dict[int, Logprob]:
    """A token's entry as vLLM has it: the token itself, then the others.

    Args:
        ranked: The others are the likeliest, best first; else they were named, and their ranks are not known.
    """

    def of(token_id: int, logprob: float, rank: int | None) -> Logprob:
        return Logprob(logprob, rank, None if tokenizer is None else tokenizer.decode([token_id], False))

    others = zip(entry.top_ids, entry.top_logprobs, strict=True)
    return {token: of(token, entry.logprob, entry.rank)} | {
        other: of(other, logprob, rank if ranked else None)
        for rank, (other, logprob) in enumerate(others, start=1)
        if other != token
    }
