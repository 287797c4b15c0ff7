"""How many draft tokens there were, and how many of them were accepted."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.foundation.messages.workers import Result


@dataclass
class DraftCounts:
    """Since the start.

    Attributes:
        drafts: Rows that had draft tokens.
        tokens: These.
        accepted: By position, how many of them were accepted.
    """

    drafts: int = 0
    tokens: int = 0
    accepted: list[int] = field(default_factory=list)

    def count(self, result: Result) -> None:
        """A step's."""
        for gained, drafted in zip(result.counts, result.drafted, strict=True):
            if drafted:
                self.drafts += 1
                self.tokens += drafted
                self.accepted += [0] * (drafted - len(self.accepted))
                for position in range(gained - 1):
                    self.accepted[position] += 1
