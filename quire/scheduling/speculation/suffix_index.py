"""Suffix decoding: what followed the last tokens where they stood before, in this text and in earlier outputs, by how
often it did (Oliaro et al. 2024, "SuffixDecoding", arXiv 2411.04975).

The paper keeps suffix trees. Here a text links each pair of neighbours to where the pair stood last; the paths below
the node of a match are those of its occurrences, of which the last ones are looked at. Knows nothing about slots, plans
or devices.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence

from quire.foundation.config.speculation import SuffixOptions

MAX_OCCURRENCES = 16
"""Most occurrences of a match in a text that are looked at, the last ones first."""
SHORTEST = 2
"""Fewest tokens of a match."""
GENERATIONS = 4
"""Past outputs are forgotten a generation at a time."""
MAX_TOKENS = 4_000_000
"""Most tokens of past outputs that are remembered: some 400 MB."""
END = -1
"""Stands behind each output."""
_NONE = -1


class LinkedText:
    """Tokens, and where each pair of neighbours stood before. Adding one takes the same time however many there are.

    Attributes:
        tokens: All of them.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens = array("i", tokens)
        self._before = array("i")  # by the place of a pair's second token: the same of the pair before
        self._last: dict[tuple[int, int], int] = {}

    @property
    def linked(self) -> int:
        """The number of tokens whose pairs are known."""
        return len(self._before)

    def link(self, most: int) -> int:
        """Link up to `most` tokens that are not linked yet, and return how many were."""
        begin, end = len(self._before), min(len(self._before) + most, len(self.tokens))
        tokens, before, last = self.tokens, self._before, self._last
        for place in range(begin, end):
            pair = (tokens[place - 1], tokens[place]) if place else (END, END)
            before.append(last.get(pair, _NONE))
            last[pair] = place
        return end - begin

    def occurrences(self, context: Sequence[int], most: int, skip: int = _NONE) -> list[tuple[int, int]]:
        """Where the last tokens of `context` stand: (place of the last one, how many of them), the last places first.

        Args:
            most: Most tokens of the context that are compared.
            skip: A place that does not count.
        """
        place, found = self._last.get((context[-2], context[-1]), _NONE), list[tuple[int, int]]()
        tokens, longest = self.tokens, min(most, len(context))
        while place != _NONE and len(found) < MAX_OCCURRENCES:
            if place != skip:
                size = SHORTEST
                while size < longest and size <= place and tokens[place - size] == context[-1 - size]:
                    size += 1
                found.append((place, size))
            place = self._before[place]
        return found


class PastOutputs:
    """The outputs of the last requests, by who may see them.

    Args:
        requests: Most requests that are remembered.
        tokens: Most tokens of all outputs.
    """

    def __init__(self, requests: int, tokens: int = MAX_TOKENS) -> None:
        generations = GENERATIONS if requests >= GENERATIONS else 1
        self._each, self._tokens_each = requests // generations, tokens // generations
        self._generations: deque[dict[str, LinkedText]] = deque(maxlen=generations)
        self._count, self._tokens = self._each, 0  # of the newest generation
        self._unread: deque[LinkedText] = deque()

    def add(self, audience: str, output: Sequence[int]) -> None:
        """Remember an output; it is read as `catch_up` says."""
        if len(output) <= SHORTEST:
            return
        if self._count == self._each or self._tokens + len(output) > self._tokens_each:
            self._generations.appendleft({})
            self._count = self._tokens = 0
        self._count += 1
        self._tokens += len(output)
        text = self._generations[0].setdefault(audience, LinkedText())
        if text.linked == len(text.tokens):
            self._unread.append(text)
        text.tokens.extend(output)
        text.tokens.append(END)

    def catch_up(self, most: int) -> int:
        """Read up to `most` tokens that were not read yet. Returns how many were read."""
        left = most
        while left and self._unread:
            text = self._unread[0]
            left -= text.link(left)
            if text.linked == len(text.tokens):
                self._unread.popleft()
        return most - left

    def texts(self, audience: str) -> list[LinkedText]:
        """The texts of outputs that this audience may see, the newest first."""
        return [generation[audience] for generation in self._generations if audience in generation]


class SuffixIndex:
    """A sequence's tokens, and what may follow them.

    Args:
        tokens: What it begins with; read as `catch_up` says.
        options: How far to look, and what is likely enough to propose.
        past: Outputs of other requests.
        audience: Who may see this sequence; only past outputs that they may see are used.
    """

    def __init__(self, tokens: Sequence[int], options: SuffixOptions, past: PastOutputs, audience: str) -> None:
        self._text, self._options, self._past, self._audience = LinkedText(tokens), options, past, audience
        self._begin = len(tokens)

    def append(self, tokens: Sequence[int]) -> None:
        """Append tokens to the sequence."""
        self._text.tokens.extend(tokens)

    def catch_up(self, most: int) -> int:
        """Read up to `most` tokens that were not read yet: the sequence's own first, then those of past outputs.
        Returns how many were read."""
        own = self._text.link(most)
        return own + self._past.catch_up(most - own)

    def propose(self, most: int) -> list[int]:
        """Propose up to `most` tokens of the continuation that is likely to be accepted farthest; none if there is
        none."""
        tokens = self._text.tokens
        most = min(most, self._options.depth - SHORTEST)
        if len(tokens) < SHORTEST or most <= 0:
            return []
        longest = max(SHORTEST, self._options.depth - most)
        context = tokens[-longest:]
        best, best_score = self._best(self._text, context, most, longest, len(tokens) - 1)
        for text in self._past.texts(self._audience):
            if best_score == most:
                break
            found, score = self._best(text, context, most, longest, _NONE)
            if score > best_score:
                best, best_score = found, score
        return best

    def close(self) -> None:
        """End the sequence, and let others find the tokens that it gained since this index was made."""
        if self._options.cached_requests:
            self._past.add(self._audience, self._text.tokens[self._begin :])

    def _best(
        self, text: LinkedText, context: Sequence[int], most: int, longest: int, skip: int
    ) -> tuple[list[int], float]:
        """The continuation in one text with the most tokens that are expected to be right, and how many these are."""
        places = text.occurrences(context, longest, skip)
        best: list[int] = []
        best_score = 0.0
        for size in sorted({size for _, size in places}, reverse=True):
            limit = min(most, int(size * self._options.factor))
            if limit <= best_score:
                break  # shorter matches may not say more
            found, score = self._continued(text.tokens, [place for place, own in places if own >= size], limit)
            if score > best_score:
                best, best_score = found, score
        return best, best_score

    def _continued(self, tokens: array[int], places: list[int], limit: int) -> tuple[list[int], float]:
        """What followed these places most often, token by token. A text that is over is taken to go on as proposed."""
        found: list[int] = []
        probability, score, end = 1.0, 0.0, len(tokens)
        while len(found) < limit:
            ahead = 1 + len(found)
            following = [tokens[at] if (at := place + ahead) < end else found[at - end] for place in places]
            token = following[0]
            if (alike := following.count(token)) < len(following):
                token = max(following, key=following.count)
                alike = following.count(token)
                probability *= alike / len(places)
                places = [place for place, own in zip(places, following, strict=True) if own == token]
            if token == END or probability < self._options.least_probability:
                break
            found.append(token)
            score += probability
        return found, score
