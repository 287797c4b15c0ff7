"""docs/api.md has every route and every field, served, ignored or refused, and no other."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

import pytest
from pydantic import BaseModel
from starlette.routing import Route

from quire.errors import UnsupportedField
from quire.serving.api.pooling.schemas import PoolingRequest
from quire.serving.api.pooling.scoring_schemas import RerankRequest, ScoreRequest
from quire.serving.api.routes.tokens import DetokenizeRequest, TokenizeRequest
from quire.serving.api.schemas.chat import ChatRequest
from quire.serving.api.schemas.completion import CompletionRequest, GenerateRequest
from quire.serving.api.schemas.known_fields import OPENAI_FIELDS, FieldLists, served_fields
from quire.serving.api.schemas.sampling import RequestFields, SamplingFields
from quire.serving.dialects.anthropic.schemas import MESSAGES_FIELDS, MessagesRequest
from quire.serving.dialects.batches.routes import BatchRequest
from quire.serving.dialects.cohere.schemas import CohereEmbedRequest
from quire.serving.dialects.decisions.schemas import DecisionRequest
from quire.serving.dialects.ollama.schemas import (
    OLLAMA_FIELDS,
    OPTION_FIELDS,
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
    Options,
)
from quire.serving.dialects.responses.schemas import ResponsesRequest
from tests.api.server import running

DOCS = Path(__file__).parents[2] / "docs"
SECTIONS: dict[str, tuple[type[BaseModel], type[BaseModel] | None]] = {
    "Generating: fields that chat, completions and token ids share": (RequestFields, None),
    "Sampling: fields that chat and completions share": (SamplingFields, RequestFields),
    "Chat: `/v1/chat/completions`": (ChatRequest, SamplingFields),
    "Completions: `/v1/completions`": (CompletionRequest, SamplingFields),
    "Token ids: `/inference/v1/generate`": (GenerateRequest, RequestFields),
    "Tokens: `/tokenize`": (TokenizeRequest, None),
    "Text: `/detokenize`": (DetokenizeRequest, None),
    "Anthropic: `/v1/messages` and `/v1/messages/count_tokens`": (MessagesRequest, None),
    "Ollama: `/api/chat`": (OllamaChatRequest, None),
    "Ollama: `/api/generate`": (OllamaGenerateRequest, None),
    "Ollama: `/api/embed`": (OllamaEmbedRequest, None),
    "Ollama: `/api/embeddings`": (OllamaEmbeddingsRequest, None),
    "Ollama: `/api/show`": (OllamaShowRequest, None),
    "Ollama: `options`": (Options, None),
}
LISTS: dict[str, FieldLists] = {
    "Ignored and refused by the above": OPENAI_FIELDS,
    "Anthropic: `/v1/messages` and `/v1/messages/count_tokens`": MESSAGES_FIELDS,
    "Ollama: ignored and refused": OLLAMA_FIELDS,
    "Ollama: `options`": OPTION_FIELDS,
}


def tables(section: str) -> dict[str, list[list[str]]]:
    """The rows of a section's tables, as cells, by the first word of their heads."""
    text = (DOCS / "api.md").read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    found: dict[str, list[list[str]]] = {}
    for table in re.findall(r"(?:^\|.*\|\n)+", text, flags=re.MULTILINE):
        head, _, *rows = ([cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines())
        found[head[0]] = rows
    return found


def names(rows: list[list[str]]) -> list[str]:
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row[0])]


@pytest.mark.parametrize("section", SECTIONS)
def test_every_field_is_explained(section: str) -> None:
    schema, shared = SECTIONS[section]
    rows = tables(section)["field"]
    fields = [name for name in schema.model_fields if shared is None or name not in shared.model_fields]
    assert sorted(names(rows)) == sorted(fields)
    assert all(len(row[1]) > 3 for row in rows)


@pytest.mark.parametrize("section", LISTS)
def test_what_is_ignored_or_refused_is_said_with_a_reason(section: str) -> None:
    found, lists = tables(section), LISTS[section]
    check(found["ignored"], lists.ignored)
    check(found["refused"], lists.unsupported)
    for name, neutral, _ in found["refused"]:
        passing = [] if neutral == "—" else [value.strip("`") for value in neutral.split(", ")]
        assert len(passing) == len(lists.unsupported[name.strip("`")]), name


def test_a_field_that_another_endpoint_serves_is_refused_with_where_to_send_it() -> None:
    served = {
        "/v1/chat/completions": set(ChatRequest.model_fields),
        "/v1/completions": set(CompletionRequest.model_fields),
    }
    rows = {row[0].strip("`"): row[2] for row in tables("Ignored and refused by the above")["refused"]}
    for name, instead in rows.items():
        where = [path for path, fields in served.items() if name in fields]
        assert sorted(re.findall(r"/v1/[a-z/]+", instead)) == sorted(where), name
        with pytest.raises(UnsupportedField) as refused:
            served_fields({name: object()}, ())
        assert all(path in str(refused.value) for path in where), name


def check(rows: list[list[str]], expected: Collection[str]) -> None:
    assert sorted(names(rows)) == sorted(expected)
    assert all(len(row[-1]) > 3 for row in rows)


@pytest.mark.parametrize(
    ("page", "schema"),
    [
        ("responses.md", ResponsesRequest),
        ("batches.md", BatchRequest),
        ("embeddings.md", PoolingRequest),
        ("embeddings.md", ScoreRequest),
        ("embeddings.md", RerankRequest),
        ("embeddings.md", CohereEmbedRequest),
        ("embeddings.md", DecisionRequest),
    ],
)
def test_pages_of_their_own_have_every_field(page: str, schema: type[BaseModel]) -> None:
    words = set(re.findall(r"`([a-z_0-9]+)[`.]", (DOCS / page).read_text()))
    assert sorted(set(schema.model_fields) - words - set(RequestFields.model_fields)) == []


def test_every_route_is_listed(tmp_path: Path) -> None:
    listed = {tuple(name.split()) for name in names(tables("Routes")["route"])}
    with running(tmp_path, enable_tokenizer_info_endpoint=True, enable_lora=True) as server:
        served = {
            (method, route.path.replace(":path", ""))
            for route in server.app.router.routes
            if isinstance(route, Route)
            for method in route.methods or ()
            if method != "HEAD" and route.path not in ("/docs/files/{name}", "/page/{version}/{name:path}")
        }
    assert listed == served
