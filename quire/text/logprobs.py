"""Log probabilities as vLLM shows them: for each token a dict from token ids to `Logprob`."""

from __future__ import annotations

from collections.abc import Sequence

from quire.foundation.messages.workers import TokenLogprobs
from quire.outputs import Logprob
from quire.text.tokenizer import Tokenizer


def prompt_logprobs_dicts(
    prompt: Sequence[int], entries: Sequence[TokenLogprobs], tokenizer: Tokenizer | None
) -> list[dict[int, Logprob] | None]:
    """For each token of a prompt: it and the likeliest by id. The first has None: no token comes before it."""
    rest = zip(prompt[1:], entries, strict=True)
    return [None, *(logprobs_dict(token, entry, tokenizer) for token, entry in rest)]


def logprobs_dict(
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
