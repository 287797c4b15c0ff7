"""The body of Cohere's POST /v2/embed."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from quire.errors import RequestError
from quire.serving.api.pooling.schemas import POOLING_FIELDS, check_num_inputs
from quire.serving.api.schemas.chat import not_served
from quire.serving.api.schemas.known_fields import FieldLists, Part, optional
from quire.serving.api.schemas.queue_fields import QueueFields

COHERE_FIELDS = FieldLists(POOLING_FIELDS.ignored, {**POOLING_FIELDS.unsupported, "images": ([],)})
"""Fields that the schema does not have."""
EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]


class CohereContent(Part):
    """A piece of an input."""

    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: dict[str, Any] | None = optional("Not served.")


class CohereInput(Part):
    """An input in pieces, which are put together."""

    content: list[CohereContent] = Field(min_length=1)

    def text(self, place: str) -> str:
        """The whole text; raises a RequestError that names the place for a piece that is none."""
        for piece in self.content:
            if piece.type != "text" or piece.text is None:
                raise RequestError(f"{place}.content: {not_served('image')}", param=f"{place}.content")
        return "\n".join(piece.text or "" for piece in self.content)


class CohereEmbedRequest(QueueFields):
    """Texts to embed."""

    texts: list[str] | None = optional("The texts.")
    inputs: list[CohereInput] | None = optional("In place of texts: inputs in pieces of text.")
    input_type: str | None = optional(
        "What the texts are for: the name of one of the model's prompts, or search_query, search_document, "
        "classification, clustering."
    )
    embedding_types: list[EmbeddingType] | None = Field(
        default=None, min_length=1, description="In which forms the vectors are returned. Default float."
    )
    output_dimension: int | None = optional("Length of the vectors, where the model was trained for several.")
    truncate: Literal["NONE", "START", "END"] | None = optional(
        "Which end of long texts is cut off. Default END; NONE refuses them."
    )
    max_tokens: int | None = optional("How many tokens of a text count. Default: what the model takes.")

    def whole_texts(self) -> tuple[str, list[str]]:
        """The name of the field with the texts, and the texts. Raises RequestError if there are none, or too many."""
        if (self.texts is None) == (self.inputs is None):
            raise RequestError("Send either texts or inputs.", param="texts")
        name = "texts" if self.texts is not None else "inputs"
        given = [each.text(f"inputs[{place}]") for place, each in enumerate(self.inputs or ())]
        texts = given if self.texts is None else self.texts
        if not texts:
            raise RequestError(f"{name} must not be empty.", param=name)
        check_num_inputs(name, len(texts))
        return name, texts
