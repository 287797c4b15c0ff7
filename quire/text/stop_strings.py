"""Stop strings in a stream of text.

Owns finding the first stop string and holding back just the text that might be the beginning of one, in linear time
(Knuth, Morris and Pratt, 1977). Knows nothing about tokens.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches a stream for the stop string that is completed first; of several at the same place, the longest."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """
        Args:
            stops: Non-empty strings; none lets everything pass.
            include: Keep the stop string in the text.
        """
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
        """What was held back and is no stop string after all."""
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
