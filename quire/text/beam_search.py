"""Beam search: the likeliest sequences of a prompt as far as a beam of them sees. Knows no engine and no text.

The semantics are vLLM's. In every step each live beam is extended by its 2 × width likeliest tokens; extensions by an
end-of-sequence token are complete, of the others the `width` best live on. A sequence's score is its log probability
divided by length ** length_penalty, where the length counts prompt and output, but not the end-of-sequence token. There
is no early stopping beyond what cannot change the result. Log probabilities are the model's own: `temperature` does not
change them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import islice

from quire.foundation.messages.workers import TokenLogprobs
from quire.outputs import BeamSearchSequence, FinishReason
from quire.sampling_params import BeamSearchParams


@dataclass
class _Beam:
    tokens: list[int]
    logprob: float = 0.0
    end: int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class BeamSearch:
    """One prompt's search; alternately ask for `queries` and `extend` with their answers, until it is `done`.

    Args:
        num_reported: How many of the likeliest tokens `logprobs` report beside the sequence's own; None for no log
            probabilities.
    """

    def __init__(
        self, prompt: Sequence[int], params: BeamSearchParams, eos_ids: Collection[int], num_reported: int | None = None
    ) -> None:
        self._params = params
        self._num_reported = num_reported
        self._ends = frozenset() if params.ignore_eos else frozenset(eos_ids)
        self._longest = len(prompt) + params.max_tokens
        self._live = [_Beam(list(prompt))]
        self._complete: list[_Beam] = []

    @property
    def done(self) -> bool:
        """Whether no step can change the result."""
        return not self._live or len(self._live[0].tokens) == self._longest or self._is_decided()

    @property
    def queries(self) -> list[list[int]]:
        """The sequences whose likeliest next tokens come next."""
        return [beam.tokens for beam in self._live]

    def extend(self, answers: Sequence[TokenLogprobs]) -> None:
        """Go one step on with the likeliest next tokens of each query, 2 × width or more."""
        extended: list[tuple[float, _Beam, int, TokenLogprobs]] = []
        for beam, answer in zip(self._live, answers, strict=True):
            for place in range(2 * self._params.beam_width):
                logprob = beam.logprob + answer.top_logprobs[place]
                if (token := answer.top_ids[place]) in self._ends:
                    self._complete.append(_Beam(beam.tokens, logprob, token, self._reported(beam, answer, place)))
                else:
                    extended.append((logprob, beam, place, answer))
        # All are equally long, so the likeliest have the best scores. Only these get token lists of their own.
        extended.sort(key=lambda each: -each[0])
        best = extended[: self._params.beam_width]
        self._live = [
            _Beam([*beam.tokens, answer.top_ids[place]], logprob, None, self._reported(beam, answer, place))
            for logprob, beam, place, answer in best
        ]
        self._complete = self._best(self._complete)

    def result(self) -> list[BeamSearchSequence]:
        """The best sequences, best first; their text is left open."""
        return [self._sequence(beam) for beam in self._best([*self._complete, *self._live])]

    def logprobs(self) -> list[list[TokenLogprobs]]:
        """The log probabilities of each output token of each sequence of `result`."""
        kept = self._params.include_stop_str_in_output
        found = self._best([*self._complete, *self._live])
        return [beam.logprobs[:-1] if beam.end is not None and not kept else beam.logprobs for beam in found]

    def _reported(self, beam: _Beam, answer: TokenLogprobs, place: int) -> list[TokenLogprobs]:
        """The beam's log probabilities and those of its next token, which is at this place among the likeliest."""
        if self._num_reported is None:
            return []
        ids, logprobs = answer.top_ids[: self._num_reported], answer.top_logprobs[: self._num_reported]
        return [*beam.logprobs, TokenLogprobs(answer.top_logprobs[place], place + 1, ids, logprobs)]

    def _sequence(self, beam: _Beam) -> BeamSearchSequence:
        end = [] if beam.end is None or not self._params.include_stop_str_in_output else [beam.end]
        reason: FinishReason = "length" if beam.end is None else "stop"
        return BeamSearchSequence([*beam.tokens, *end], beam.logprob, None, reason, beam.end)

    def _best(self, beams: list[_Beam]) -> list[_Beam]:
        """The `width` best beams; of equal ones those that were found first."""
        return sorted(beams, key=lambda beam: -self._score(beam.logprob, len(beam.tokens)))[: self._params.beam_width]

    def _score(self, logprob: float, length: int) -> float:
        return logprob / math.pow(length, self._params.length_penalty)

    def _is_decided(self) -> bool:
        """Whether no live beam can still get among the complete ones, even if all its further tokens were certain."""
        if len(self._complete) < self._params.beam_width:
            return False
        lengths = len(self._live[0].tokens), self._longest  # the score is monotonic in between
        hope = max(self._score(beam.logprob, length) for beam in self._live for length in lengths)
        worst = self._complete[-1]
        return self._score(worst.logprob, len(worst.tokens)) >= hope


class BatchedBeamSearch:
    """The searches of several prompts, which go forward together; used like a BeamSearch."""

    def __init__(
        self, prompts: Sequence[Sequence[int]], params: BeamSearchParams, eos_ids: Collection[int],
        num_reported: int | None = None,
    ) -> None:  # fmt: skip
        self._searches = [BeamSearch(prompt, params, eos_ids, num_reported) for prompt in prompts]
        self._open = [search for search in self._searches if not search.done]

    @property
    def done(self) -> bool:
        """Whether no step can change any result."""
        return not self._open

    @property
    def queries(self) -> list[list[int]]:
        """The sequences whose likeliest next tokens come next, of all searches that are not done."""
        return [query for search in self._open for query in search.queries]

    @property
    def prompts_of_queries(self) -> list[int]:
        """Which prompt each of `queries` continues, by its place."""
        return [place for place, search in enumerate(self._searches) if not search.done for _ in search.queries]

    def extend(self, answers: Sequence[TokenLogprobs]) -> None:
        """Go one step on."""
        remaining = iter(answers)
        for search in self._open:
            search.extend(list(islice(remaining, len(search.queries))))
        self._open = [search for search in self._open if not search.done]

    def results(self) -> list[list[BeamSearchSequence]]:
        """The best sequences of each prompt, best first; their text is left open."""
        return [search.result() for search in self._searches]

    def logprobs(self) -> list[list[list[TokenLogprobs]]]:
        """The log probabilities of each output token of each sequence of `results`."""
        return [search.logprobs() for search in self._searches]
