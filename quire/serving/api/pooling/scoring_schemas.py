"""The bodies of /score and /rerank."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from quire.errors import RequestError
from quire.serving.api.pooling.schemas import POOLING_FIELDS, PooledFields, check_num_inputs
from quire.serving.api.schemas.chat import ContentPart, not_served
from quire.serving.api.schemas.known_fields import FieldLists, Part, optional

SCORING_FIELDS = FieldLists(
    {*POOLING_FIELDS.ignored, "max_chunks_per_doc", "return_embeddings"},
    {**POOLING_FIELDS.unsupported, "rank_fields": ([],)},
)
"""Fields that no schema of these endpoints has."""


class ScoreText(Part):
    """A text as an object."""

    text: str | None = None
    content: list[ContentPart] | None = optional("Parts of type text.")
    type: Literal["text"] | None = None
    id: Any = optional("Ignored.")

    def whole(self, place: str) -> str:
        """The text; raises a RequestError that names the place if there is none, or a part is no text."""
        if (self.text is None) == (self.content is None):
            raise RequestError(f"{place} needs either text or content.", param=place)
        for part in self.content or ():
            if part.text is None:
                raise RequestError(f"{place}: {not_served(part.type[:64])}", param=place)
        return self.text if self.text is not None else "\n".join(part.text or "" for part in self.content or ())


OneText = str | ScoreText
Texts = str | ScoreText | list[OneText]


class ScoringFields(PooledFields):
    """Fields that scoring shares."""

    max_tokens_per_query: int | None = optional("Cut queries to this many tokens. 0: not.")
    max_tokens_per_doc: int | None = optional("Cut documents to this many tokens. 0: not.")
    instruction: str | None = optional("For the template of pairs: its variable instruction.")
    chat_template_kwargs: dict[str, Any] | None = optional("Variables of the template of pairs.")

    @property
    def template_variables(self) -> dict[str, Any]:
        given = {} if self.instruction is None else {"instruction": self.instruction}
        return {**given, **(self.chat_template_kwargs or {})}

    def limits(self, longest: int) -> tuple[int | None, int | None]:
        """The maximum number of tokens of a query and of a document; None for no limit. Raises RequestError for one
        that is negative, or not below `longest`."""
        found: list[int | None] = []
        for name in ("max_tokens_per_query", "max_tokens_per_doc"):
            value: int | None = getattr(self, name)
            if value is not None and not 0 <= value < longest:
                raise RequestError(f"{name} must be between 0 and {longest - 1}, got {value}.", param=name)
            found.append(value or None)
        return found[0], found[1]


class ScoreRequest(ScoringFields):
    """Pairs of texts: one with one, one with each of several, or several with as many."""

    text_1: Texts | None = optional("The first texts. queries and data_1 are other names.")
    text_2: Texts | None = optional("The second texts. documents, items and data_2 are other names.")
    queries: Texts | None = optional("Another name of text_1.")
    documents: Texts | None = optional("Another name of text_2.")
    items: Texts | None = optional("Another name of text_2.")
    data_1: Texts | None = optional("Another name of text_1.")
    data_2: Texts | None = optional("Another name of text_2.")

    def sides(self) -> tuple[str, str]:
        """The names under which both sides were sent; raises RequestError unless each side was sent once."""
        first = self._only("text_1", "queries", "data_1")
        return first, self._only("text_2", "documents", "items", "data_2")

    def _only(self, *names: str) -> str:
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            raise RequestError(f"Send one of {', '.join(names)}.", param=given[-1] if given else names[0])
        return given[0]


class RerankRequest(ScoringFields):
    """A query, and documents to be ordered by how well they answer it."""

    query: OneText
    documents: Texts = Field(description="Texts, or objects with a text.")
    top_n: int | None = optional("How many of the best are returned. Default: all, as with 0.")
    return_documents: bool | None = optional("Default true: results have the text of their document.")


def texts_of(name: str, value: Texts) -> list[str]:
    """The texts in a field; raises a RequestError that names the place of an empty one, or one that is no text."""
    if not isinstance(value, list):
        return [_text(name, value)]
    if not value:
        raise RequestError(f"{name} must not be empty.", param=name)
    check_num_inputs(name, len(value))
    return [_text(f"{name}[{place}]", each) for place, each in enumerate(value)]


def _text(place: str, value: OneText) -> str:
    text = value if isinstance(value, str) else value.whole(place)
    if not text:
        raise RequestError(f"{place} is empty: send a text.", param=place)
    return text
