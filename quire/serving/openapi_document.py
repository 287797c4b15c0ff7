"""The schemas of request bodies in the OpenAPI document: routes read their bodies themselves, and do not show them.

Owns which bodies there are, and what the document says about ranges of values. The checks stand elsewhere
(`quire/sampling_params.py` and the schemas), and a test holds both together.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from quire import sampling_params as limits
from quire.serving.api.audio.form import FORM_FIELDS, TranscriptionRequest
from quire.serving.api.pooling.schemas import POOLING_FIELDS, ClassifyRequest, EmbeddingRequest, PoolingRequest
from quire.serving.api.pooling.scoring_schemas import SCORING_FIELDS, RerankRequest, ScoreRequest
from quire.serving.api.routes.models import LoadAdapterRequest, UnloadAdapterRequest
from quire.serving.api.routes.tokens import DetokenizeRequest, TokenizeRequest
from quire.serving.api.schemas.chat import MAX_MESSAGES, ChatBatchRequest, ChatRequest
from quire.serving.api.schemas.completion import CompletionRequest, GenerateRequest
from quire.serving.api.schemas.known_fields import NO_FIELDS, OPENAI_FIELDS, FieldLists
from quire.serving.api.schemas.model_change import ModelChange
from quire.serving.api.schemas.queue_fields import MAX_PRIORITY, MAX_SALT
from quire.serving.dialects.anthropic.schemas import MESSAGES_FIELDS, CountTokensRequest, MessagesRequest
from quire.serving.dialects.batches.routes import BatchRequest
from quire.serving.dialects.cohere.schemas import COHERE_FIELDS, CohereEmbedRequest
from quire.serving.dialects.decisions.schemas import DECISION_FIELDS, DecisionRequest
from quire.serving.dialects.ollama.schemas import (
    OLLAMA_FIELDS,
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from quire.serving.dialects.responses.schemas import ResponsesRequest

_BODIES: dict[type[BaseModel], FieldLists] = {
    ChatRequest: OPENAI_FIELDS,
    ChatBatchRequest: OPENAI_FIELDS,
    CompletionRequest: OPENAI_FIELDS,
    TranscriptionRequest: FORM_FIELDS,
    GenerateRequest: OPENAI_FIELDS,
    MessagesRequest: MESSAGES_FIELDS,
    CountTokensRequest: MESSAGES_FIELDS,
    OllamaChatRequest: OLLAMA_FIELDS,
    OllamaGenerateRequest: OLLAMA_FIELDS,
    OllamaShowRequest: OLLAMA_FIELDS,
    TokenizeRequest: OPENAI_FIELDS,
    DetokenizeRequest: OPENAI_FIELDS,
    BatchRequest: OPENAI_FIELDS,
    ResponsesRequest: OPENAI_FIELDS,
    LoadAdapterRequest: OPENAI_FIELDS,
    UnloadAdapterRequest: OPENAI_FIELDS,
    EmbeddingRequest: POOLING_FIELDS,
    PoolingRequest: POOLING_FIELDS,
    ClassifyRequest: POOLING_FIELDS,
    ScoreRequest: SCORING_FIELDS,
    RerankRequest: SCORING_FIELDS,
    CohereEmbedRequest: COHERE_FIELDS,
    DecisionRequest: DECISION_FIELDS,
    OllamaEmbedRequest: OLLAMA_FIELDS,
    OllamaEmbeddingsRequest: OLLAMA_FIELDS,
    ModelChange: NO_FIELDS,
}
_SHARE: dict[str, Any] = {"exclusiveMinimum": 0, "maximum": 1}
_TOKEN_IDS: dict[str, Any] = {"items": {"minimum": 0}}
_STOP: dict[str, Any] = {"minLength": 1, "maxLength": limits.MAX_STOP_LENGTH}

RANGES: dict[str, dict[str, dict[str, Any]]] = {
    "allowed_token_ids": {"array": {"minItems": 1, **_TOKEN_IDS}},
    "bad_words": {
        "array": {
            "maxItems": limits.MAX_BAD_WORDS,
            "items": {"pattern": r"\S", "maxLength": limits.MAX_BAD_WORD_LENGTH},
        }
    },
    "cache_salt": {"string": {"minLength": 1, "maxLength": MAX_SALT}},
    "frequency_penalty": {"number": {"minimum": -2, "maximum": 2}},
    "input": {"array": {"minItems": 1}},
    "length_penalty": {"number": {"minimum": -limits.MAX_LENGTH_PENALTY, "maximum": limits.MAX_LENGTH_PENALTY}},
    "logit_bias": {"object": {"propertyNames": {"pattern": r"^(0|[1-9][0-9]{0,9})$"}}},
    "logprob_token_ids": {"array": {"maxItems": limits.MAX_LOGPROB_TOKEN_IDS, **_TOKEN_IDS}},
    "logprobs": {"integer": {"minimum": -1}},
    "max_completion_tokens": {"integer": {"minimum": 1}},
    "max_pattern_size": {"integer": {"minimum": 1, "maximum": limits.MAX_PATTERN}},
    "max_tokens": {"integer": {"minimum": 1}},
    "messages": {"array": {"minItems": 1, "maxItems": MAX_MESSAGES}},
    "min_count": {"integer": {"minimum": 2}},
    "min_p": {"number": {"minimum": 0, "maximum": 1}},
    "min_pattern_size": {"integer": {"minimum": 1, "maximum": limits.MAX_PATTERN}},
    "min_tokens": {"integer": {"minimum": 0}},
    "n": {"integer": {"minimum": 1, "maximum": limits.MAX_N}},
    "presence_penalty": {"number": {"minimum": -2, "maximum": 2}},
    "priority": {"integer": {"minimum": -MAX_PRIORITY, "maximum": MAX_PRIORITY}},
    "prompt_logprobs": {"integer": {"minimum": -1}},
    "repetition_penalty": {"number": {"exclusiveMinimum": 0}},
    "request_id": {"string": {"pattern": r"^[A-Za-z0-9._:-]{1,128}$"}},
    "seed": {"integer": {"minimum": -(2**63), "maximum": 2**63 - 1}},
    "stop": {"string": _STOP, "array": {"maxItems": limits.MAX_STOP_STRINGS, "items": _STOP}},
    "stop_sequences": {"array": {"maxItems": limits.MAX_STOP_STRINGS, "items": _STOP}},
    "stop_token_ids": {"array": {"maxItems": limits.MAX_STOP_TOKEN_IDS, **_TOKEN_IDS}},
    "temperature": {"number": {"minimum": 0}},
    "timeout": {"number": {"exclusiveMinimum": 0}},
    "token_ids": {"array": {"minItems": 1, **_TOKEN_IDS}},
    "tokens": {"array": _TOKEN_IDS},
    "top_k": {"integer": {"minimum": -1}},
    "top_logprobs": {"integer": {"minimum": 0}},
    "top_p": {"number": _SHARE},
    "truncate_prompt_tokens": {"integer": {"minimum": -1}},
}
"""Keywords that a field's schema gets wherever it stands, by the name of the field and the type of its value."""


def document_bodies(app: FastAPI) -> None:
    """Add the schemas of request bodies to the application's OpenAPI document."""
    default_openapi = app.openapi

    def openapi() -> dict[str, Any]:
        document = default_openapi()
        document.setdefault("components", {}).setdefault("schemas", {}).update(_schemas())
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _schemas() -> dict[str, Any]:
    _, found = models_json_schema(
        [(body, "validation") for body in _BODIES], ref_template="#/components/schemas/{model}"
    )
    schemas: dict[str, Any] = found["$defs"]
    sampling = schemas[ChatRequest.__name__]["properties"]
    for name, value in schemas[ResponsesRequest.__name__]["properties"].items():
        if not value.keys() & {"type", "anyOf", "$ref"} and name in sampling:
            value |= sampling[name]
    for body, lists in _BODIES.items():
        schema = schemas[body.__name__]
        for name in sorted(set(lists.ignored) - set(schema["properties"])):
            schema["properties"][name] = {"description": "Ignored."}
        schema["additionalProperties"] = False
    for schema in schemas.values():
        for name, value in schema.get("properties", {}).items():
            for kind, keywords in RANGES.get(name, {}).items():
                _limit(value, kind, keywords)
    _limit(schemas[CompletionRequest.__name__]["properties"]["max_tokens"], "integer", {"minimum": 0})  # with echo
    return schemas


def _limit(schema: dict[str, Any], kind: str, keywords: dict[str, Any]) -> None:
    """Add keywords to the schema of a property, where it has this type."""
    for branch in schema.get("anyOf", [schema]):
        if branch.get("type") == kind:
            items = {**branch.get("items", {}), **keywords.get("items", {})}
            branch.update(keywords, **({"items": items} if items else {}))
